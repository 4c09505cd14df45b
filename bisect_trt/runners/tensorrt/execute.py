"""Running a serialised engine on real inputs: buffers, outputs of unknown shape, debug tensors,
latency.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from bisect_trt.core.errors import RunnerFailedError
from bisect_trt.core.files import write_whole
from bisect_trt.core.verdict import Verdict
from bisect_trt.runners.tensorrt.cuda import Cuda

Arrays = dict[str, NDArray[Any]]

WARM_UP_S, MEASURED_S, MOST_RUNS, FEWEST_RUNS = 0.1, 0.3, 500, 10


class LoadedEngine:
    """An engine with its execution context. ``seconds`` holds what loading it and making the
    context took.
    """

    def __init__(
        self, trt: Any, cuda: Cuda, logger: Any, serialised: bytes, cache: Path | None = None
    ) -> None:
        self._trt, self._cuda = trt, cuda
        began = time.perf_counter()
        self.runtime = trt.Runtime(logger)
        self.engine = self.runtime.deserialize_cuda_engine(serialised)
        if self.engine is None:
            raise RunnerFailedError(
                "TensorRT cannot load the engine", Verdict.CRASHED, _last(logger)
            )
        loaded = time.perf_counter()
        self._kernels: Any = None
        self.context = self._make_context(cache)
        if self.context is None:
            raise RunnerFailedError(
                "TensorRT cannot make an execution context", Verdict.CRASHED, _last(logger)
            )
        self.seconds = {"load": loaded - began, "context": time.perf_counter() - loaded}
        names = [self.engine.get_tensor_name(i) for i in range(self.engine.num_io_tensors)]
        self._inputs = [
            n for n in names if self.engine.get_tensor_mode(n) == trt.TensorIOMode.INPUT
        ]
        self._outputs = [n for n in names if n not in self._inputs]
        self._logger = logger

    def run(self, arrays: Mapping[str, NDArray[Any]]) -> Arrays:
        """The outputs for one sample."""
        with _Buffers(self, arrays) as buffers:
            self._enqueue()
            return {name: buffers.fetch(name) for name in self._outputs}

    def latency_ms(self, arrays: Mapping[str, NDArray[Any]]) -> float:
        """The median time of one inference on the device, copies apart, by CUDA events after a
        warm-up.
        """
        with _Buffers(self, arrays):
            deadline = time.perf_counter() + WARM_UP_S
            while time.perf_counter() < deadline:
                self._enqueue()
                self._cuda.synchronise()
            begin, end = self._cuda.event(), self._cuda.event()
            times: list[float] = []
            deadline = time.perf_counter() + MEASURED_S
            while len(times) < FEWEST_RUNS or (
                len(times) < MOST_RUNS and time.perf_counter() < deadline
            ):
                self._cuda.record(begin)
                self._enqueue()
                self._cuda.record(end)
                times.append(self._cuda.elapsed_ms(begin, end))
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

    def inspect(self) -> str:
        """What the engine says of itself, as JSON."""
        inspector = self.engine.create_engine_inspector()
        inspector.execution_context = self.context
        text: str = inspector.get_engine_information(self._trt.LayerInformationFormat.JSON)
        return text

    def keep_kernels(self, cache: Path) -> None:
        """Write the kernels that TensorRT for RTX compiled, for the next context."""
        if self._kernels is not None:
            write_whole(cache, bytes(self._kernels.serialize()))

    def _make_context(self, cache: Path | None) -> Any:
        if not hasattr(self._trt, "IRuntimeCache") or not hasattr(
            self.engine, "create_runtime_config"
        ):
            return self.engine.create_execution_context()
        config = self.engine.create_runtime_config()
        self._kernels = config.create_runtime_cache()
        if cache is not None and cache.exists():
            self._kernels.deserialize(cache.read_bytes())
        config.set_runtime_cache(self._kernels)
        return self.engine.create_execution_context(config)

    def _enqueue(self) -> None:
        if not self.context.execute_async_v3(self._cuda.stream):
            raise RunnerFailedError(
                "the engine could not be executed", Verdict.CRASHED, _last(self._logger)
            )


class _Buffers:
    """Device memory for one sample, bound to the engine's tensors while in use."""

    def __init__(self, loaded: LoadedEngine, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._loaded, self._arrays = loaded, arrays
        self._pointers: list[int] = []
        self._host: list[NDArray[Any]] = []
        self._allocators: dict[str, Any] = {}

    def __enter__(self) -> _Buffers:
        for name in self._loaded._inputs:
            self._bind_input(name)
        for name in self._loaded._outputs:
            allocator = _output_allocator(self._loaded._trt, self._loaded._cuda)
            self._loaded.context.set_output_allocator(name, allocator)
            self._allocators[name] = allocator
        return self

    def __exit__(self, *_: object) -> None:
        for pointer in (
            *self._pointers,
            *(p for a in self._allocators.values() for p in a.pointers),
        ):
            self._loaded._cuda.free(pointer)

    def fetch(self, name: str) -> NDArray[Any]:
        """An output's array."""
        allocator = self._allocators[name]
        dtype = np_dtype(self._loaded._trt, self._loaded.engine.get_tensor_dtype(name))
        pointer = allocator.pointers[-1] if allocator.pointers else 0
        return self._loaded._cuda.download(pointer, allocator.shape, dtype)

    def _bind_input(self, name: str) -> None:
        loaded = self._loaded
        dtype = np_dtype(loaded._trt, loaded.engine.get_tensor_dtype(name))
        array = np.ascontiguousarray(self._arrays[name], dtype)
        if not loaded.context.set_input_shape(name, array.shape):
            raise RunnerFailedError(
                f"input {name!r} of shape {array.shape} is outside the engine's profile",
                Verdict.CRASHED,
            )
        if loaded.engine.get_tensor_location(name) == loaded._trt.TensorLocation.HOST:
            self._host.append(array)
            loaded.context.set_tensor_address(name, array.ctypes.data)
            return
        pointer = loaded._cuda.allocate(array.nbytes)
        self._pointers.append(pointer)
        self._host.append(array)
        loaded._cuda.upload(pointer, array)
        loaded.context.set_tensor_address(name, pointer)


def _output_allocator(trt: Any, cuda: Cuda) -> Any:
    class Allocator(trt.IOutputAllocator):  # type: ignore[misc]
        """Gives an output the memory it asks for, once its size is known."""

        def __init__(self) -> None:
            trt.IOutputAllocator.__init__(self)
            self.pointers: list[int] = []
            self.shape: tuple[int, ...] = ()
            self._size = -1

        def reallocate_output(self, name: str, memory: int, size: int, alignment: int) -> int:
            if size > self._size:
                self.pointers.append(cuda.allocate(size))
                self._size = size
            return self.pointers[-1]

        def reallocate_output_async(
            self, name: str, memory: int, size: int, alignment: int, stream: int
        ) -> int:
            return self.reallocate_output(name, memory, size, alignment)

        def notify_shape(self, name: str, shape: Any) -> None:
            self.shape = tuple(shape)

    return Allocator()


def np_dtype(trt: Any, dtype: Any) -> np.dtype[Any]:
    """NumPy's type for TensorRT's; BF16 is ml_dtypes'."""
    if dtype.name == "BF16":
        bf16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bf16
    plain: np.dtype[Any] = np.dtype(trt.nptype(dtype))
    return plain


def _last(logger: Any) -> list[str]:
    return [f"[{severity}] {text}" for severity, text in logger.messages][-8:]
