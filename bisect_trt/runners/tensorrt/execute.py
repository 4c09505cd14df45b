"""Running a serialised engine on real inputs, in one context or two: outputs of unknown shape,
debug tensors, latency.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from bisect_trt.base.atomic_files import write_whole
from bisect_trt.base.errors import RunnerFailedError
from bisect_trt.base.outcomes import Verdict
from bisect_trt.runners.tensorrt.buffers import Buffers, Cuda, np_dtype
from bisect_trt.runners.tensorrt.build import refusal
from bisect_trt.runners.tensorrt.records import AS_USUAL, EngineOptions

Arrays = dict[str, NDArray[Any]]

WARM_UP_S, MEASURED_S, MOST_RUNS, FEWEST_RUNS = 0.1, 0.3, 500, 10


class LoadedEngine:
    """An engine with its execution context. ``seconds`` holds what loading it and making the
    context took.

    Raises:
        RunnerFailedError: the engine cannot be loaded.
    """

    def __init__(
        self,
        trt: Any,
        cuda: Cuda,
        logger: Any,
        serialised: bytes,
        cache: Path | None = None,
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
        self._config = self._runtime_config(cache, options)
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
                # What was said of this one is no word on what comes next.
                del self._logger.messages[heard:]
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

    def run(self, arrays: Mapping[str, NDArray[Any]]) -> Arrays:
        """The outputs for one sample."""
        with self._bound(arrays) as buffers:
            self._enqueue(buffers)
            return buffers.fetch_all()

    def latency_ms(self, arrays: Mapping[str, NDArray[Any]]) -> float:
        """The median time of one inference on the device, copies apart, by CUDA events after a
        warm-up.
        """
        with self._bound(arrays) as buffers:
            self._enqueue(buffers)
            self._cuda.synchronise()
            buffers.fix()
            deadline = time.perf_counter() + WARM_UP_S
            while time.perf_counter() < deadline:
                self._enqueue(buffers)
                self._cuda.synchronise()
            begin, end = self._cuda.event(), self._cuda.event()
            times: list[float] = []
            deadline = time.perf_counter() + MEASURED_S
            while len(times) < FEWEST_RUNS or (
                len(times) < MOST_RUNS and time.perf_counter() < deadline
            ):
                self._cuda.record(begin)
                self._enqueue(buffers)
                self._cuda.record(end)
                times.append(self._cuda.elapsed_ms(begin, end))
            for event in (begin, end):
                self._cuda.destroy(event)
            return statistics.median(times)

    def debug_values(self, arrays: Mapping[str, NDArray[Any]]) -> Arrays:
        """The values of the engine's debug tensors for one sample; empty where this TensorRT never
        reports them.
        """
        trt, cuda, seen = self._trt, self._cuda, Arrays()
        if not hasattr(trt, "IDebugListener"):
            return seen

        class Listener(trt.IDebugListener):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                trt.IDebugListener.__init__(self)

            def process_debug_tensor(
                self, memory: Any, location: Any, dtype: Any, shape: Any, name: str, stream: Any
            ) -> bool:
                seen[name] = cuda.download(
                    int(memory), tuple(shape), np_dtype(trt, dtype)
                )  # lives only during this call
                return True

        self.context.set_debug_listener(Listener())
        self.context.set_all_tensors_debug_state(True)
        self.run(arrays)
        return seen

    def _bound(self, arrays: Mapping[str, NDArray[Any]]) -> Buffers:
        return Buffers(self._trt, self._cuda, self.context, arrays)

    def _enqueue(self, buffers: Buffers) -> None:
        if not self.context.execute_async_v3(self._cuda.stream):
            what = "the engine could not be executed"
            failed = refusal(what, Verdict.CRASHED, self._logger, self._cuda)
            raise buffers.failure or failed
