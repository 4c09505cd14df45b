"""Which engine judges, if any, and who runs it: a process, one a GPU, or actors on a Ray
cluster.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from bisect_trt.core.errors import RunnerFailedError, RunnerUnavailableError
from bisect_trt.core.machine.cores import thread_count
from bisect_trt.core.machine.memory import free_bytes
from bisect_trt.core.precision import Precision
from bisect_trt.core.verdict import Verdict
from bisect_trt.graph.files.save import weights_size
from bisect_trt.runners.onnxruntime_cuda import OrtCudaRunner
from bisect_trt.runners.ort.devices import visible_gpus
from bisect_trt.runners.tensorrt.module import installed_module
from bisect_trt.runners.tensorrt.runner import TensorRTRunner
from bisect_trt.runners.workers.crew import Crew
from bisect_trt.runners.workers.process import IsolatedWorker
from bisect_trt.runners.workers.ray_actors import ray_actors
from bisect_trt.stations.asked.settings import Settings
from bisect_trt.stations.case.case import Case

_REPEATED = (Verdict.CRASHED,)
"""A crash is an engine's answer only if it repeats; a hang, which costs a time-out, at once."""

_MOST_BUILDERS, _CORES_OF_ONE = 4, 4
_A_BUILD, _LEAST_FREE = 4, 1 << 30
"""Memory that a build takes: so many times the weights, and bytes (ViT-L: 1.2 GB of weights, 4.1 GB
held at most)."""

EngineRunner = TensorRTRunner | OrtCudaRunner


def open_engine(case: Case, caches: Path) -> EngineRunner | None:
    """The runner that ``--runner`` names; None for the emulator, and for ``auto`` where no engine
    can run here.

    Raises:
        RunnerUnavailableError: the one asked for cannot work here.
        MachineError: the GPU has no memory left for it.
    """
    settings = case.settings
    if settings.runner == "onnxruntime-cuda":
        return OrtCudaRunner(case.graph, timeout_s=settings.probe_timeout_s)
    if settings.runner == "emulated":
        return None
    if settings.runner == "auto" and not _engine_likely(settings.trt_module):
        return None
    try:
        return TensorRTRunner(
            case.graph,
            (*case.samples, *case.holdout),
            settings.trt_module,
            profiles=settings.profiles,
            caches=caches,
            timeout_s=settings.probe_timeout_s,
            weak=settings.typing == "weak",
            hire=partial(_engine_crew, settings),
            builders=_builders(case),
        )
    except (RunnerUnavailableError, RunnerFailedError) as error:
        if settings.runner == "auto":
            return None
        if isinstance(error, RunnerFailedError):
            error = error.blamed_on_model()
        raise RunnerUnavailableError(f"--runner tensorrt: {error}") from error


def has_rtx_sums(engine: EngineRunner | None, precision: Precision) -> bool:
    """True for an engine whose sums are those of
    :mod:`bisect_trt.runners.emulator.rtx.arithmetic`.
    """
    rtx = isinstance(engine, TensorRTRunner) and "tensorrt_rtx" in engine.versions
    return rtx and precision is Precision.FP16


def _builders(case: Case) -> int:
    """How many engines may be built beside the emulation: where cores and memory are left for it,
    and one process on this machine runs them.
    """
    settings, free = case.settings, free_bytes()
    if settings.ray is not None or settings.workers > 1 or free is None:
        return 0
    room = int(free // (_A_BUILD * weights_size(case.graph.proto) + _LEAST_FREE))
    return max(0, min(_MOST_BUILDERS, thread_count() // _CORES_OF_ONE, room - 1))


def _engine_likely(module: str | None) -> bool:
    """Whether it is worth starting a process to ask: TensorRT is installed and NVIDIA's driver
    library loads.
    """
    if installed_module(module) is None:
        return False
    try:
        ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return False
    return True


def _engine_crew(settings: Settings, target: str, arguments: Mapping[str, Any]) -> Crew:
    """One worker a GPU, at most ``--workers`` of them: processes here, each with its own
    CUDA_VISIBLE_DEVICES, or Ray actors.
    """
    if settings.ray is not None:
        gpus = 0.5 if settings.emulate_on == "cuda" else 1  # the emulators take the other halves
        # They wait for their GPU: the cores are the emulators'.
        actors = ray_actors(settings.ray, target, arguments, settings.workers, gpus, cpus=0)
        return Crew(actors, ends=_REPEATED)
    devices = visible_gpus()[: settings.workers]
    if settings.workers == 1 or len(devices) < 2:
        return Crew([IsolatedWorker(target, arguments)], ends=_REPEATED)
    members = [IsolatedWorker(target, arguments, {"CUDA_VISIBLE_DEVICES": d}) for d in devices]
    return Crew(members, ends=_REPEATED)


def idle_options(chosen: Settings) -> str:
    """That the options which say how engines are built change nothing, where the user chose some
    and no engine judges; blank where none was chosen.
    """
    asked = {
        "--certify engine": chosen.certify == "engine",
        "--max-builds": chosen.max_builds is not None,
        "--typing weak": chosen.typing == "weak",
        "--trt-module": chosen.trt_module is not None,
        "--profile": len(chosen.profiles) > 0,
    }
    idle = [name for name, is_chosen in asked.items() if is_chosen]
    change = "changes" if len(idle) == 1 else "change"
    return f"no engine judges here: {' and '.join(idle)} {change} nothing" if idle else ""
