"""Which emulator, engine and workers a run uses."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bisect_trt.base.display import counted
from bisect_trt.base.errors import RunnerFailedError, RunnerUnavailableError
from bisect_trt.base.limits import thread_count
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.evaluate.cache import Cache, Row
from bisect_trt.runners.device import CPU, Device, cuda_device, gpu_facts, visible_gpus
from bisect_trt.runners.device_check import why_not_on_cuda
from bisect_trt.runners.emulator import EmulatedRunner
from bisect_trt.runners.emulator_workers import SERVER, EmulatorPool, server_arguments
from bisect_trt.runners.ort_cuda import OrtCudaRunner
from bisect_trt.runners.process import IsolatedWorker, Remote, WorkerPool
from bisect_trt.runners.ray_actors import LOCAL, ray_actors
from bisect_trt.runners.tensorrt.records import installed_module
from bisect_trt.runners.tensorrt.runner import TensorRTRunner
from bisect_trt.settings import Settings
from bisect_trt.steps.problem import Problem

_ON_GPU, _OF_THREE = 0.05, 0.4
"""Beside two cores; a third of a draw's inferences are the second emulator's."""

_FAR, _NOTICED_S = 16.0, 0.05
"""So many times what was counted, and at least so many seconds: it was not counted right."""

_AGAIN, _AGAIN_S = 5, 1.0


class Pace:
    """What an inference takes in the mean."""

    def __init__(
        self,
        problem: Problem,
        emulator: EmulatedRunner,
        cache: Cache,
        key: Callable[..., str],
        *,
        beside_engine: bool,
    ) -> None:
        self._problem = problem
        self._emulator = emulator
        self._cache = cache
        self._key = key
        self._beside_engine = beside_engine
        self._took_s = 0.0

    @property
    def usual_seconds(self) -> float:
        """About what one of a draw's inferences takes in the mean, counted from the model: on a GPU
        a small part of it, but for those of a second emulator, which is on the CPU.
        """
        if not self._is_far:
            return self._counted_s
        return float(_FAR ** round(math.log(self._took_s, _FAR)))

    @property
    def _counted_s(self) -> float:
        usual = self._problem.usual_seconds
        if self._emulator.device != CPU:
            usual *= _ON_GPU if self._beside_engine else _OF_THREE
        return usual

    def took(self, seconds: float) -> None:
        """Hear that an emulated inference took so long. Loops, and what stands behind shapes that
        follow from values, are not counted; only where that is far from what was counted does a
        clock decide, and by powers of 16.

        What is far is looked at again, and kept: a machine that was busy when a small network's
        first evaluations ran gave 117 pins tested on 25 copies where it otherwise gives 107 and 80.
        """
        self._took_s = seconds
        if self._is_far:
            self._took_s = min(seconds, self.timed_again())

    @property
    def _is_far(self) -> bool:
        return self._took_s >= max(_FAR * self._counted_s, _NOTICED_S)

    def timed_again(self) -> float:
        """An inference's seconds by the quickest of a few, each from the inputs on; of a slow one's
        there are fewer. Infinite where it fails.
        """
        sample, plan = self._problem.samples[0], self._problem.base
        key = self._key("took", plan.digest, sample.digest)
        known = self._cache.recall(key)
        if known is not None:
            return float(known[0])
        quickest, began = math.inf, time.perf_counter()
        for _ in range(_AGAIN):
            before = time.perf_counter()
            try:
                next(iter(self._emulator.outputs(plan, [sample])))
            except RunnerFailedError:  # the evaluation has said so
                break
            now = time.perf_counter()
            quickest = min(quickest, now - before)
            if now - began > _AGAIN_S:
                break
        self._cache.record([Row(key, "took", quickest)])
        return quickest


_ALONE, _BESIDE = 0.9, 0.5
"""What the emulators' activations may take of the GPU's free memory: alone, and beside an engine
that is built and run there too.
"""


def emulator_device(settings: Settings) -> Device:
    """What ``--emulate-on`` names.

    Raises:
        RunnerUnavailableError: CUDA was asked for and cannot work here.
    """
    if settings.emulate_on == "cpu":
        return CPU
    if settings.ray is not None:  # a cluster's GPUs are none of this machine's
        return cuda_device("cuda on Ray")
    reason = why_not_on_cuda()
    if reason is not None:
        raise RunnerUnavailableError(f"--emulate-on cuda: {reason}")
    gpus = visible_gpus() or ["0"]
    name, free = gpu_facts(gpus[0])
    share = _ALONE if settings.runner == "emulated" else _BESIDE
    # This process' sessions are on the first GPU, as are those of every len(gpus)-th worker.
    sharing = 1 + (-(-settings.workers // len(gpus)) if settings.workers > 1 else 0)
    return cuda_device(name, 0, int(free * share / sharing))


def open_emulator(problem: Problem, device: Device) -> EmulatedRunner:
    """The emulator of this process."""
    settings = problem.settings
    device = CPU if settings.ray is not None else device  # a cluster's GPUs are elsewhere
    return EmulatedRunner(problem.graph, settings.precision, device=device)


def open_emulator_pool(
    problem: Problem, local: EmulatedRunner, device: Device
) -> EmulatorPool | None:
    """The emulator's workers; None for a run in this process alone.

    Several processes of one machine share its cores evenly, are no more than these, and take its
    GPUs in turn. On a cluster each has one core, or its part of ``--threads``.

    Raises:
        BadInputError: the model cannot be sent to them.
        RunnerUnavailableError: the cluster asked for is not there.
    """
    settings = problem.settings
    if settings.workers == 1 and settings.ray is None:
        return None
    if settings.ray in (None, LOCAL):
        count, threads = shared_out(settings.workers, thread_count())
    else:
        count = settings.workers
        threads = max(1, (settings.threads or count) // count)
    device = local.device if settings.ray is None else device
    arguments = server_arguments(
        problem.graph.proto,
        settings.precision,
        threads,
        replace(device, number=0),
        elsewhere=settings.ray not in (None, LOCAL),
    )
    members: Sequence[Remote]
    if settings.ray is not None:
        gpus = 0.0 if device == CPU else 1.0 if settings.runner == "emulated" else 0.5
        members = ray_actors(settings.ray, SERVER, arguments, count, gpus=gpus, cpus=threads)
    else:
        members = [
            IsolatedWorker(SERVER, arguments, seen)
            for seen in gpus_in_turn(visible_gpus() if device != CPU else (), count)
        ]
    # An emulated evaluation does not kill its worker by itself.
    worker_pool = WorkerPool(members, attempts=3, retry_timeouts=True)
    return EmulatorPool(worker_pool, settings.evaluation_timeout_s, device)


def gpus_in_turn(gpus: Sequence[str], workers: int) -> list[dict[str, str]]:
    """The environment of each worker: which of ``gpus`` it sees, all where none is named."""
    if not gpus:
        return [{}] * workers
    return [{"CUDA_VISIBLE_DEVICES": gpus[i % len(gpus)]} for i in range(workers)]


def shared_out(workers: int, threads: int) -> tuple[int, int]:
    """How many workers a machine gets, and the threads of each: together never more than all."""
    count = min(workers, threads)
    return count, threads // count


def fewer_hired(asked: int, hired: int) -> str:
    """Why fewer workers were hired than asked for."""
    were = "was" if hired == 1 else "were"
    cores = counted(hired, "core")
    return f"--workers {asked}: more than the {cores} to use here, so {hired} {were} hired"


def baseline_plans(problem: Problem) -> tuple[PrecisionPlan, ...]:
    """FP32 with TF32 cleared, TF32 allowed, everything reduced."""
    return PrecisionPlan(Precision.FP32), PrecisionPlan(Precision.TF32), problem.base


EngineRunner = TensorRTRunner | OrtCudaRunner


def open_engine(problem: Problem, caches: Path) -> EngineRunner | None:
    """The runner that ``--runner`` names; None for the emulator, and for ``auto`` where no engine
    can run here.

    Raises:
        RunnerUnavailableError: the one asked for cannot work here.
        MachineError: the GPU has no memory left for it.
    """
    settings = problem.settings
    if settings.runner == "onnxruntime-cuda":
        return OrtCudaRunner(problem.graph, timeout_s=settings.evaluation_timeout_s)
    if settings.runner == "emulated":
        return None
    if settings.runner == "auto" and not _engine_likely(settings.trt_module):
        return None
    try:
        return TensorRTRunner(
            problem.graph,
            (*problem.samples, *problem.holdout),
            settings.trt_module,
            profiles=settings.profiles,
            caches=caches,
            timeout_s=settings.evaluation_timeout_s,
            weak=settings.typing == "weak",
            hire=partial(_engine_pool, settings),
        )
    except (RunnerUnavailableError, RunnerFailedError) as error:
        if settings.runner == "auto":
            return None
        if isinstance(error, RunnerFailedError):
            error = error.blamed_on_model()
        raise RunnerUnavailableError(f"--runner tensorrt: {error}") from error


def _engine_likely(module: str | None) -> bool:
    """Whether TensorRT is installed and NVIDIA's driver library loads."""
    if installed_module(module) is None:
        return False
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _engine_pool(settings: Settings, target: str, arguments: Mapping[str, Any]) -> WorkerPool:
    """One worker a GPU, at most ``--workers`` of them: processes here, or Ray actors."""
    if settings.ray is not None:
        gpus = 0.5 if settings.emulate_on == "cuda" else 1  # the emulators take the other halves
        # They wait for their GPU: the cores are the emulators'.
        actors = ray_actors(settings.ray, target, arguments, settings.workers, gpus=gpus, cpus=0)
        return WorkerPool(actors)
    devices = visible_gpus()[: settings.workers] if settings.workers > 1 else []
    seen = gpus_in_turn(devices, max(1, len(devices)))
    return WorkerPool([IsolatedWorker(target, arguments, environment) for environment in seen])


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
