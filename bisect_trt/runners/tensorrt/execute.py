"""Executes a serialised engine on real inputs: outputs of any shape, latency, repeated runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from bisect_trt.base.atomic_files import write_whole
from bisect_trt.base.errors import RunnerFailedError
from bisect_trt.base.outcomes import Verdict
from bisect_trt.metrics.arrays import Arrays
from bisect_trt.metrics.statistics import copies_needed
from bisect_trt.runners.tensorrt.buffers import Buffers, Cuda
from bisect_trt.runners.tensorrt.build import refusal
from bisect_trt.runners.tensorrt.records import AS_USUAL, EngineOptions

REPEATS = 3
"""Runs of each sample at least: forwards, backwards in the other context, forwards."""
ENOUGH = copies_needed(0.95)
"""Runs that must all pass to show that at least 95 % do: 59."""
REPEAT_BUDGET_S = 30.0
"""Time for further runs after answers differed."""

Counted = tuple[tuple[Arrays, int], ...]
Run = Callable[[Arrays], Arrays]


class LoadedEngine:
    """An engine with its execution contexts; ``seconds`` is the time to load it, by step."""

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
        """A context with a stream of its own; the first one where there is no memory for two."""
        if self._second is None:
            # It shares the engine's weights but needs activation memory of its own.
            count = len(self._logger.messages)
            try:
                self._second = self._context(self._cuda.with_own_stream())
            except RunnerFailedError:
                self._second = self.first
                del self._logger.messages[count:]  # or a later failure would be taken for this one
        return self._second

    def close(self) -> None:
        """Destroys the second context's stream; engine and contexts are freed with the object."""
        second, self._second = self._second, None
        if second is not None and second is not self.first:
            second.close()

    def inspect(self) -> str:
        """Returns the engine's description of itself, as JSON."""
        inspector = self.engine.create_engine_inspector()
        inspector.execution_context = self.first.context
        text: str = inspector.get_engine_information(self._trt.LayerInformationFormat.JSON)
        return text

    def keep_kernels(self, cache: Path) -> None:
        """Writes the kernels that TensorRT for RTX compiled to ``cache``."""
        if self._kernels is not None:
            write_whole(cache, bytes(self._kernels.serialize()))

    def _runtime_config(self, cache: Path | None, options: EngineOptions) -> Any:
        """The runtime configuration; None where this TensorRT has none."""
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
        if options.eager_kernels and hasattr(
            config, "dynamic_shapes_kernel_specialization_strategy"
        ):
            strategies = self._trt.DynamicShapesKernelSpecializationStrategy
            config.dynamic_shapes_kernel_specialization_strategy = strategies.EAGER
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
        """Destroys the stream."""
        self._cuda.close()

    def run(self, arrays: Arrays) -> dict[str, NDArray[Any]]:
        """Returns the outputs for one sample."""
        with self._bound(arrays) as buffers:
            self._enqueue(buffers)
            return buffers.fetch_all()

    def latency_ms(self, arrays: Arrays) -> float:
        """Returns the median device time of one inference after a warm-up, without copies."""
        with self.ready(arrays) as enqueue:
            times: list[float] = []
            deadline = time.perf_counter() + 0.3
            while len(times) < 10 or time.perf_counter() < deadline:
                times.append(self._cuda.elapsed_ms(enqueue))
            return statistics.median(times)

    @contextmanager
    def ready(self, arrays: Arrays) -> Iterator[Callable[[], None]]:
        """Gives a function that enqueues an inference on ``arrays``, after a warm-up."""
        with self._bound(arrays) as buffers:
            self._enqueue(buffers)  # gives the outputs their memory
            self._cuda.synchronise()
            buffers.fix()
            deadline = time.perf_counter() + 0.1
            while time.perf_counter() < deadline:
                self._enqueue(buffers)
                self._cuda.synchronise()
            yield lambda: self._enqueue(buffers)

    def _bound(self, arrays: Arrays) -> Buffers:
        return Buffers(self._trt, self._cuda, self.context, arrays)

    def _enqueue(self, buffers: Buffers) -> None:
        if not self.context.execute_async_v3(self._cuda.stream):
            message = "the engine could not be executed"
            failure = refusal(message, Verdict.CRASHED, self._logger, self._cuda)
            raise buffers.failure or failure


def run_repeatedly(
    samples: Sequence[Arrays], contexts: Sequence[Run], repeats: int
) -> list[Counted]:
    """Returns each sample's different answers with their counts, the most frequent first."""
    # One run is no observation: order and context change between runs, since answers may depend on
    # them. Once answers differ, runs go on until they bound the share of bad ones.
    answers: list[list[tuple[Arrays, int]]] = [[] for _ in samples]
    deadline = time.perf_counter() + REPEAT_BUDGET_S
    passes = 0
    while passes < repeats or (
        repeats > 1
        and 1 < max(map(len, answers)) < 16  # answers that all differ teach nothing more
        and passes < max(2 * repeats, -(-ENOUGH // len(samples)))
        and time.perf_counter() < deadline
    ):
        order = range(len(samples)) if passes % 2 == 0 else reversed(range(len(samples)))
        run = contexts[passes % len(contexts)]
        for index in order:
            _count(answers[index], run(samples[index]))
        passes += 1
    return [tuple(sorted(counted, key=lambda answer: -answer[1])) for counted in answers]


def _count(counted: list[tuple[Arrays, int]], outputs: Arrays) -> None:
    for index, (answer, count) in enumerate(counted):
        if same_bits(answer, outputs):
            counted[index] = (answer, count + 1)
            return
    counted.append((outputs, 1))


def same_bits(one: Arrays, other: Arrays) -> bool:
    """True if two runs gave the same outputs to the last bit, NaNs included."""
    return one.keys() == other.keys() and all(
        (array.shape, array.dtype) == (other[name].shape, other[name].dtype)
        and array.tobytes() == other[name].tobytes()
        for name, array in one.items()
    )
