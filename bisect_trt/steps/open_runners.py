"""Opens the emulator, the engine and the workers of a run, and times an inference."""

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
from bisect_trt.base.sample import Sample
from bisect_trt.model.graph import Graph
from bisect_trt.runners.device import CPU, Device, cuda_device, gpu_facts, visible_gpus
from bisect_trt.runners.device_check import why_not_on_cuda
from bisect_trt.runners.emulator import EmulatedRunner
from bisect_trt.runners.emulator_workers import SERVER, EmulatorPool, server_arguments
from bisect_trt.runners.ort_cuda import OrtCudaRunner
from bisect_trt.runners.ort_engine import OrtEngineRunner
from bisect_trt.runners.ort_rtx import OrtRtxRunner
from bisect_trt.runners.process import IsolatedWorker, Remote, WorkerPool
from bisect_trt.runners.ray_actors import LOCAL, ray_actors
from bisect_trt.runners.tensorrt.records import RTX, installed_module
from bisect_trt.runners.tensorrt.runner import TensorRTRunner
from bisect_trt.settings import Settings
from bisect_trt.steps.problem import Problem
from bisect_trt.steps.timing import Timer, time_engines

_FAR = 16.0
"""The ratio of measured to counted time from which the count is known to be wrong."""


class Pace:
    """Estimates what an emulated inference takes, on which the number of copies depends.

    The estimate is counted from the model, so that a busy machine changes no answer. A clock
    decides only where it is far off: loops, and shapes that follow from values, are not counted.
    """

    def __init__(
        self,
        problem: Problem,
        emulator: EmulatedRunner,
        recalled: Callable[[str, Sequence[str], Callable[[], float]], float],
        *,
        beside_engine: bool,
    ) -> None:
        self._problem = problem
        self._emulator = emulator
        self._recalled = recalled
        self._beside_engine = beside_engine
        self._took_s = 0.0

    @property
    def usual_seconds(self) -> float:
        """The mean time of one inference of a copy, as counted or rounded to a power of 16."""
        if not self._is_far:
            return self._counted_s
        return float(_FAR ** round(math.log(self._took_s, _FAR)))

    @property
    def _counted_s(self) -> float:
        usual = self._problem.usual_seconds
        if self._emulator.device != CPU:
            # Against two cores. Without an engine a third of the inferences are the second
            # emulator's, which stays on the CPU.
            usual *= 0.05 if self._beside_engine else 0.4
        return usual

    def took(self, seconds: float) -> None:
        """Note what an emulated inference took, which is timed again where it is far off.

        The machine may have been busy: a small network's first evaluations alone once gave 25
        copies instead of 80, and 117 pins instead of 107.
        """
        self._took_s = seconds
        if self._is_far:
            self._took_s = min(seconds, self.timed_again())

    @property
    def _is_far(self) -> bool:
        return self._took_s >= max(_FAR * self._counted_s, 0.05)

    def timed_again(self) -> float:
        """The seconds of the quickest of a few inferences; infinite where it fails."""
        sample, plan = self._problem.samples[0], self._problem.base

        def quickest() -> float:
            least, began = math.inf, time.perf_counter()
            for _ in range(5):
                before = time.perf_counter()
                try:
                    next(iter(self._emulator.outputs(plan, [sample])))
                except RunnerFailedError:  # the plan's evaluation has reported it
                    break
                now = time.perf_counter()
                least = min(least, now - before)
                if now - began > 1.0:
                    break
            return least

        return self._recalled("took", [plan.digest, sample.digest], quickest)


def emulator_device(settings: Settings) -> Device:
    """The device that ``--emulate-on`` names.

    Raises:
        RunnerUnavailableError: it is CUDA, which cannot work here.
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
    # Activations may take this part of the GPU's free memory; an engine needs some too.
    share = 0.9 if settings.runner == "emulated" else 0.5
    # This process's sessions are on the first GPU, as are those of every len(gpus)-th worker.
    sharing = 1 + (-(-settings.workers // len(gpus)) if settings.workers > 1 else 0)
    return cuda_device(name, 0, int(free * share / sharing))


def open_emulator(problem: Problem, device: Device) -> EmulatedRunner:
    """The emulator of this process."""
    settings = problem.settings
    device = CPU if settings.ray is not None else device  # a cluster's GPUs are elsewhere
    return EmulatedRunner(
        problem.graph,
        settings.precision,
        threads=settings.threads or 0,
        device=device,
        large_bytes=settings.limits.large_bytes,
    )


def open_emulator_pool(
    problem: Problem, local: EmulatedRunner, device: Device, server: str = SERVER
) -> EmulatorPool | None:
    """The emulator's workers, each a ``server``; None for a run in this process alone.

    Workers on this machine share its cores and take its GPUs in turn. On a cluster each has one
    core, or its part of ``--threads``.

    Raises:
        BadInputError: the model cannot be sent to them.
        RunnerUnavailableError: the cluster is not there.
    """
    settings = problem.settings
    if settings.workers == 1 and settings.ray is None:
        return None
    if settings.ray in (None, LOCAL):
        count, threads = shared_out(settings.workers, thread_count(settings.threads))
    else:
        count = settings.workers
        threads = max(1, (settings.threads or count) // count)
    device = local.device if settings.ray is None else device
    arguments = server_arguments(
        problem.graph,
        settings.precision,
        threads,
        replace(device, number=0),
        elsewhere=settings.ray not in (None, LOCAL),
    )
    members: Sequence[Remote]
    if settings.ray is not None:
        gpus = 0.0 if device == CPU else 1.0 if settings.runner == "emulated" else 0.5
        members = ray_actors(settings.ray, server, arguments, count, gpus=gpus, cpus=threads)
    else:
        members = [
            IsolatedWorker(server, arguments, environment)
            for environment in gpus_in_turn(visible_gpus() if device != CPU else (), count)
        ]
    # An emulated evaluation does not end its worker: what did was something else, so try again.
    worker_pool = WorkerPool(members, attempts=3, retry_timeouts=True)
    return EmulatorPool(worker_pool, settings.evaluation_timeout, device)


def gpus_in_turn(gpus: Sequence[str], workers: int) -> list[dict[str, str]]:
    """The environment of each worker, which shows it one of ``gpus``; all if there are none."""
    if not gpus:
        return [{}] * workers
    return [{"CUDA_VISIBLE_DEVICES": gpus[i % len(gpus)]} for i in range(workers)]


def shared_out(workers: int, threads: int) -> tuple[int, int]:
    """How many workers a machine gets, and the threads of each, together at most ``threads``."""
    count = min(workers, threads)
    return count, threads // count


def fewer_hired(wanted: int, hired: int) -> str:
    """Why fewer workers were hired than ``--workers`` wanted."""
    were = "was" if hired == 1 else "were"
    cores = counted(hired, "core")
    return f"--workers {wanted}: more than the {cores} to use here, so {hired} {were} hired"


def baseline_plans(problem: Problem) -> tuple[PrecisionPlan, ...]:
    """Strict FP32 with TF32 cleared, TF32 allowed, everything reduced."""
    return PrecisionPlan(Precision.FP32), PrecisionPlan(Precision.TF32), problem.base


EngineRunner = TensorRTRunner | OrtEngineRunner

BY_ONNXRUNTIME = (OrtCudaRunner.name, OrtRtxRunner.name)
"""The runners that open sessions of ONNX Runtime on a GPU."""


def open_session(settings: Settings, graph: Graph, samples: Sequence[Sample]) -> OrtEngineRunner:
    """The runner of :data:`BY_ONNXRUNTIME` that the settings name.

    Raises:
        BadInputError: a sample is outside of ``--profile``, or has other axes than the first.
        RunnerUnavailableError: its execution provider is not installed.
    """
    timeout_s = settings.evaluation_timeout
    if settings.runner == OrtCudaRunner.name:
        return OrtCudaRunner(graph, timeout_s=timeout_s)
    return OrtRtxRunner(graph, samples, profiles=settings.profile, timeout_s=timeout_s)


def open_engine(problem: Problem, caches: Path) -> EngineRunner | None:
    """The engine's runner; None for the emulator, and for ``auto`` where no engine can run.

    Raises:
        RunnerUnavailableError: the runner that ``--runner`` names cannot work here.
        MachineError: the GPU has no memory left for it.
    """
    settings = problem.settings
    samples = (*problem.samples, *problem.holdout)
    if settings.runner in BY_ONNXRUNTIME:
        return open_session(settings, problem.graph, samples)
    if settings.runner == "emulated":
        return None
    if settings.runner == "auto" and not _engine_likely(settings.trt_module):
        return None
    try:
        return TensorRTRunner(
            problem.graph,
            samples,
            settings.trt_module,
            profiles=settings.profile,
            caches=caches,
            timeout_s=settings.evaluation_timeout,
            weak=settings.typing == "weak",
            hire=partial(_engine_pool, settings),
            threads=settings.threads,
        )
    except (RunnerUnavailableError, RunnerFailedError) as error:
        if settings.runner == "auto":
            return None
        if isinstance(error, RunnerFailedError):
            error = error.blamed_on_model()
        raise RunnerUnavailableError(f"--runner tensorrt: {error}") from error


def timer_of(
    engine: EngineRunner | None, settings: Settings, engines_beside: int = 0
) -> Timer | None:
    """What times plans of TensorRT's engines; None for other runners, flags and clusters.

    ``engines_beside`` are engines' processes of this run that stay open beside.
    """
    on_this_machine = isinstance(engine, TensorRTRunner) and settings.ray is None
    if not on_this_machine or settings.typing == "weak":
        return None
    module = installed_module(settings.trt_module)
    # TensorRT picks kernels by timing them, so that two builds at a time disturb each other.
    builders = min(4, max(1, thread_count(settings.threads) // 2))
    return partial(
        time_engines,
        module=module,
        builders=builders if module == RTX else 1,
        # The one that times, the engine's, and this one where it emulates there.
        own_processes=2 + engines_beside + (settings.emulate_on == "cuda"),
        timeout_s=settings.evaluation_timeout,
    )


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
        # Engines wait for their GPU and need no core beside the emulators.
        actors = ray_actors(settings.ray, target, arguments, settings.workers, gpus=gpus, cpus=0)
        return WorkerPool(actors)
    devices = visible_gpus()[: settings.workers] if settings.workers > 1 else []
    environments = gpus_in_turn(devices, max(1, len(devices)))
    return WorkerPool([IsolatedWorker(target, arguments, one) for one in environments])


def idle_options(settings: Settings, engine: object = None) -> str:
    """A sentence on options that change nothing without an engine, or with that of ONNX Runtime."""
    if isinstance(engine, TensorRTRunner):
        return ""
    without, has_profile = engine is None, isinstance(engine, OrtRtxRunner)
    why = "no engine judges here" if without else f"--runner {settings.runner}"
    given = {
        "--certify engine": without and settings.certify == "engine",
        "--max-builds": without and settings.max_builds is not None,
        "--typing weak": settings.typing == "weak",
        "--trt-module": settings.trt_module is not None,
        "--profile": not has_profile and len(settings.profile) > 0,
        "--time-shape": len(settings.time_shape) > 0,
    }
    idle = [name for name, is_given in given.items() if is_given]
    change = "changes" if len(idle) == 1 else "change"
    return f"{why}: {' and '.join(idle)} {change} nothing" if idle else ""
