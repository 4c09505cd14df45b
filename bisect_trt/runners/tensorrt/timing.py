"""Times engines beside each other, in a process of their own."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bisect_trt.base.atomic_files import write_whole
from bisect_trt.base.errors import RunnerFailedError, one_line
from bisect_trt.metrics.arrays import Arrays
from bisect_trt.runners.device import GpuCondition, gpu_condition
from bisect_trt.runners.tensorrt.buffers import Cuda, import_cuda
from bisect_trt.runners.tensorrt.build import build_engine, make_logger
from bisect_trt.runners.tensorrt.execute import LoadedEngine
from bisect_trt.runners.tensorrt.records import EngineOptions, EngineRequest, import_tensorrt

STORING_WORKER = "bisect_trt.runners.tensorrt.timing:StoringWorker"
TIMING_WORKER = "bisect_trt.runners.tensorrt.timing:TimingWorker"

TURN_MS = 40.0
"""About how long an engine runs by one way of launching in one round."""
_TURN_RUNS = (3, 20)
"""The least and the most runs in that time."""
_AS_TIMED = EngineOptions(eager_kernels=True)


@dataclass(frozen=True)
class StoredEngine:
    """An engine on disk.

    ``file`` is the engine, ``kernels`` the file of compiled kernels, which need not exist.
    ``renamed`` maps the model's names of inputs to the engine's where they differ.
    """

    file: str
    kernels: str
    renamed: Mapping[str, str]


@dataclass(frozen=True)
class RoundTimes:
    """The medians of an engine's rounds in ms, the same number of both.

    ``graph_ms`` are replays of a captured CUDA graph, NaN where none can be captured;
    ``plain_ms`` are single enqueues. Both are empty where ``failure`` says why there are none.
    """

    graph_ms: tuple[float, ...] = ()
    plain_ms: tuple[float, ...] = ()
    failure: str = ""


@dataclass(frozen=True)
class TimedEngines:
    """The times by engine, and what the GPU did in the middle round; None where that is unknown."""

    times: Mapping[str, RoundTimes]
    condition: GpuCondition | None


class StoringWorker:
    """Builds engines and stores them, so that several processes can prepare what one times."""

    def __init__(self, module: str | None) -> None:
        self._trt = import_tensorrt(module)

    def store(self, request: EngineRequest, file: str, sample: Arrays | None) -> StoredEngine:
        """Builds the engine into ``file``; runs it once on ``sample`` to compile its kernels.

        Without ``sample`` no GPU is needed.
        """
        built = build_engine(self._trt, request)
        write_whole(Path(file), built.engine)
        renamed = {original: parsed for parsed, original in built.inputs.items()}
        stored = StoredEngine(file, f"{file}.kernels", renamed)
        if sample is not None:
            loaded = _loaded(self._trt, Cuda(import_cuda()), stored)
            loaded.first.run(_named(sample, stored))
            loaded.keep_kernels(Path(stored.kernels))
        return stored


class TimingWorker:
    """Loads stored engines and times them in rounds."""

    def __init__(self, module: str | None) -> None:
        self._trt = import_tensorrt(module)
        self._cuda = Cuda(import_cuda())

    def describe(self) -> dict[str, str]:
        """Returns TensorRT's version and the GPU."""
        return {self._trt.__name__: str(self._trt.__version__), **self._cuda.device()}

    def time(
        self, engines: Mapping[str, StoredEngine], sample: Arrays, rounds: int
    ) -> TimedEngines:
        """Times all ``engines`` on ``sample`` in ``rounds`` interleaved rounds.

        An engine that cannot be loaded or run has a failure instead.

        Raises:
            RunnerFailedError: the GPU is lost.
        """
        failures: dict[str, str] = {}
        turns: dict[str, _Turns] = {}
        condition = None
        with ExitStack() as open_engines:
            for name, stored in engines.items():
                try:
                    loaded = _loaded(self._trt, self._cuda, stored)
                    enqueue = open_engines.enter_context(loaded.first.ready(_named(sample, stored)))
                    replay = open_engines.enter_context(self._cuda.captured(enqueue))
                    turns[name] = _Turns(self._cuda, enqueue, replay)
                except RunnerFailedError as error:
                    if error.lost and not error.machine:
                        raise
                    failures[name] = one_line(error)
            for number in range(rounds):
                # Forwards and backwards: what ran before an engine warms or cools the GPU.
                for turn in turns.values() if number % 2 == 0 else reversed(turns.values()):
                    turn.take()
                if number == rounds // 2:
                    condition = gpu_condition()
            times = {name: turn.times() for name, turn in turns.items()}
        found = {n: times[n] if n in times else RoundTimes(failure=failures[n]) for n in engines}
        return TimedEngines(found, condition)


class _Turns:
    """The turns of one loaded engine."""

    def __init__(
        self, cuda: Cuda, enqueue: Callable[[], None], replay: Callable[[], None] | None
    ) -> None:
        self._cuda, self._plain, self._graph = cuda, enqueue, replay
        least, most = _TURN_RUNS
        first_ms = cuda.elapsed_ms(enqueue)
        self._runs = min(most, max(least, round(TURN_MS / max(first_ms, 1e-3))))
        self._graph_ms: list[float] = []
        self._plain_ms: list[float] = []

    def take(self) -> None:
        """Runs the engine by both ways of launching."""
        self._graph_ms.append(math.nan if self._graph is None else self._median_ms(self._graph))
        self._plain_ms.append(self._median_ms(self._plain))

    def times(self) -> RoundTimes:
        """The times of all turns."""
        return RoundTimes(tuple(self._graph_ms), tuple(self._plain_ms))

    def _median_ms(self, launch: Callable[[], None]) -> float:
        """The median time of a run, after one that fills caches with this engine's weights."""
        self._cuda.elapsed_ms(launch)
        return statistics.median(self._cuda.elapsed_ms(launch) for _ in range(self._runs))


def _loaded(trt: object, cuda: Cuda, stored: StoredEngine) -> LoadedEngine:
    """The stored engine, with its compiled kernels where there are some."""
    return LoadedEngine(
        trt,
        cuda,
        make_logger(trt),
        Path(stored.file).read_bytes(),
        kernels=Path(stored.kernels),
        options=_AS_TIMED,
    )


def _named(sample: Arrays, stored: StoredEngine) -> Arrays:
    """``sample`` by the engine's names of inputs."""
    return {stored.renamed.get(name, name): array for name, array in sample.items()}
