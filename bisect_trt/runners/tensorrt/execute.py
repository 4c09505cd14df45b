"""Running a serialised engine on real inputs: outputs of unknown shape, latency, repeated runs.

One run of an engine is no observation: every sample is run several times, in two contexts and in
another order, and as often as it takes where the answers are not all the same.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.base.atomic_files import write_whole
from bisect_trt.base.errors import RunnerFailedError
from bisect_trt.base.outcomes import Verdict
from bisect_trt.metrics.arrays import Arrays
from bisect_trt.metrics.statistics import copies_needed
from bisect_trt.runners.tensorrt.buffers import Buffers, Cuda
from bisect_trt.runners.tensorrt.build import refusal
from bisect_trt.runners.tensorrt.records import AS_USUAL, EngineOptions

WARM_UP_S = 0.1
LATENCY_TIME_S = 0.3
MIN_LATENCY_RUNS = 10

REPEATS = 3
"""How often each sample is run at least: forwards, backwards in the other context, forwards."""
ENOUGH = copies_needed(0.95)
"""Runs of which all must meet the requirement to bound the share that does by 95 %: 59."""
REPEAT_BUDGET_S = 30.0
MAX_DIFFERENT_ANSWERS = 16

Counted = tuple[tuple[Arrays, int], ...]
Run = Callable[[Arrays], Arrays]


class LoadedEngine:
    """An engine with its execution contexts.

    ``seconds`` holds what loading it and making the first context took.

    Raises:
        RunnerFailedError: the engine cannot be loaded.
    """

    def __init__(
        self,
        trt: Any,
        cuda: Cuda,
        logger: Any,
        serialised: bytes,
        *,
        kernels: Path | None = None,
        options: EngineOptions = AS_USUAL,
    ) -> None:
        self._trt, self._cuda, self._logger = trt, cuda, logger
        began = time.perf_counter()
        self.runtime = trt.Runtime(logger)
        self.engine = self.runtime.deserialize_cuda_engine(serialised)
        if self.engine is None:
            raise refusal("TensorRT cannot load the engine", Verdict.CRASHED, logger, cuda)
        loaded = time.perf_counter()
        self._kernels: Any = None
        self._config = self._runtime_config(kernels, options)
        self.first = self._context(cuda)
        self._second: EngineContext | None = None
        self.seconds = {"load": loaded - began, "context": time.perf_counter() - loaded}

    @property
    def second(self) -> EngineContext:
        """Another context with a stream of its own; the first where there is no memory for two."""
        if self._second is None:
            heard = len(self._logger.messages)
            try:
                self._second = self._context(self._cuda.with_own_stream())
            except RunnerFailedError:
                self._second = self.first
                del self._logger.messages[heard:]  # they say nothing of what comes next
        return self._second

    def close(self) -> None:
        """Give back what the second context runs on; engine and contexts go with the object."""
        second, self._second = self._second, None
        if second is not None and second is not self.first:
            second.close()

    def inspect(self) -> str:
        """What the engine says of itself, as JSON."""
        inspector = self.engine.create_engine_inspector()
        inspector.execution_context = self.first.context
        text: str = inspector.get_engine_information(self._trt.LayerInformationFormat.JSON)
        return text

    def keep_kernels(self, cache: Path) -> None:
        """Write the kernels that TensorRT for RTX compiled, for the next context."""
        if self._kernels is not None:
            write_whole(cache, bytes(self._kernels.serialize()))

    def _runtime_config(self, cache: Path | None, options: EngineOptions) -> Any:
        """None where this TensorRT has no such thing."""
        if not hasattr(self._trt, "IRuntimeCache") or not hasattr(
            self.engine, "create_runtime_config"
        ):
            return None
        config = self.engine.create_runtime_config()
        self._kernels = config.create_runtime_cache()
        if cache is not None and cache.exists():
            self._kernels.deserialize(cache.read_bytes())
        config.set_runtime_cache(self._kernels)
        if not options.cuda_graphs and hasattr(config, "cuda_graph_strategy"):
            config.cuda_graph_strategy = self._trt.CudaGraphStrategy.DISABLED
        return config

    def _context(self, cuda: Cuda) -> EngineContext:
        arguments = () if self._config is None else (self._config,)
        context = self.engine.create_execution_context(*arguments)
        if context is None:
            raise refusal(
                "TensorRT cannot make an execution context", Verdict.CRASHED, self._logger, cuda
            )
        return EngineContext(self._trt, cuda, self._logger, context)


class EngineContext:
    """One execution context, on the stream of ``cuda``."""

    def __init__(self, trt: Any, cuda: Cuda, logger: Any, context: Any) -> None:
        self._trt, self._cuda, self._logger = trt, cuda, logger
        self.context = context

    def close(self) -> None:
        """Give its stream back."""
        self._cuda.close()

    def run(self, arrays: Arrays) -> dict[str, NDArray[Any]]:
        """The outputs for one sample."""
        with self._bound(arrays) as buffers:
            self._enqueue(buffers)
            return buffers.fetch_all()

    def latency_ms(self, arrays: Arrays) -> float:
        """The median time of one inference on the device, without copies, after a warm-up."""
        with self._bound(arrays) as buffers:
            self._enqueue(buffers)
            self._cuda.synchronise()
            buffers.fix()
            deadline = time.perf_counter() + WARM_UP_S
            while time.perf_counter() < deadline:
                self._enqueue(buffers)
                self._cuda.synchronise()
            times: list[float] = []
            deadline = time.perf_counter() + LATENCY_TIME_S
            while len(times) < MIN_LATENCY_RUNS or time.perf_counter() < deadline:
                times.append(self._cuda.elapsed_ms(lambda: self._enqueue(buffers)))
            return statistics.median(times)

    def _bound(self, arrays: Arrays) -> Buffers:
        return Buffers(self._trt, self._cuda, self.context, arrays)

    def _enqueue(self, buffers: Buffers) -> None:
        if not self.context.execute_async_v3(self._cuda.stream):
            what = "the engine could not be executed"
            failed = refusal(what, Verdict.CRASHED, self._logger, self._cuda)
            raise buffers.failure or failed


def run_repeatedly(
    samples: Sequence[Arrays], contexts: Sequence[Run], repeats: int
) -> list[Counted]:
    """Each sample's answers with how often they came, the most frequent first.

    Every sample is run ``repeats`` times, every other time in the next context and in reverse
    order. Where an answer differs from another to the same sample, all are run on until there are
    enough runs to bound the share of bad ones, for half a minute at most.
    """
    answers: list[list[tuple[Arrays, int]]] = [[] for _ in samples]
    deadline = time.perf_counter() + REPEAT_BUDGET_S
    passes = 0
    while passes < repeats or (
        repeats > 1
        and 1 < max(len(known) for known in answers) < MAX_DIFFERENT_ANSWERS
        and passes < max(2 * repeats, -(-ENOUGH // len(samples)))
        and time.perf_counter() < deadline
    ):
        order = range(len(samples)) if passes % 2 == 0 else reversed(range(len(samples)))
        run = contexts[passes % len(contexts)]
        for number in order:
            _count(answers[number], run(samples[number]))
        passes += 1
    return [tuple(sorted(known, key=lambda answer: -answer[1])) for known in answers]


def _count(known: list[tuple[Arrays, int]], outputs: Arrays) -> None:
    for place, (answer, count) in enumerate(known):
        if same_bits(answer, outputs):
            known[place] = (answer, count + 1)
            return
    known.append((outputs, 1))


def same_bits(one: Arrays, other: Arrays) -> bool:
    """Whether two runs gave the same outputs to the last bit; NaNs of one pattern are the same."""
    return one.keys() == other.keys() and all(
        array.shape == other[name].shape
        and array.dtype == other[name].dtype
        and bool(np.array_equal(_bytes_of(array), _bytes_of(other[name])))
        for name, array in one.items()
    )


def _bytes_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
