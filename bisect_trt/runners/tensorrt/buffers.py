"""Memory on the GPU: poisoned buffers of inputs and outputs, between margins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from bisect_trt.base.errors import RunnerFailedError, RunnerUnavailableError
from bisect_trt.base.outcomes import Verdict

# Polygraphy's buffers have no margins, and its errors do not tell a full GPU from a lost one.
MARGIN_BYTES = 512
"""The size of a margin: CUDA's alignment, so that the memory between margins is aligned too."""
MARGIN_BYTE = 0xA5
"""The value of each byte in a margin."""
POISON_BYTE = 0xFF
"""The value of each byte of unwritten memory: as floats these are NaN."""


def import_cuda() -> Any:
    """Imports cuda-python's runtime module.

    Raises:
        RunnerUnavailableError: it or a GPU is missing.
    """
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise RunnerUnavailableError(
            f"cuda-python cannot be imported ({error}): pip install cuda-python"
        ) from error
    code, count = runtime.cudaGetDeviceCount()
    if code != runtime.cudaError_t.cudaSuccess or count == 0:
        raise RunnerUnavailableError(
            f"no usable GPU ({code.name}): engines can be built here but not run; use --runner "
            "emulated"
        )
    return runtime


class Cuda:
    """A stream of a GPU, and the calls on it; failures raise :class:`RunnerFailedError`."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self.stream = int(self._call("cudaStreamCreate"))

    def _call(self, name: str, *arguments: Any) -> Any:
        code, *values = getattr(self._runtime, name)(*arguments)
        codes = self._runtime.cudaError_t
        if code == codes.cudaErrorMemoryAllocation:
            raise RunnerFailedError(
                f"the GPU's memory does not suffice ({code.name})", Verdict.CRASHED, machine=True
            )
        if code != codes.cudaSuccess:  # after any other error the process cannot use the device
            raise RunnerFailedError(f"CUDA failed: {code.name}", Verdict.CRASHED, lost=True)
        return values[0] if len(values) == 1 else values

    def with_own_stream(self) -> Cuda:
        """Returns the same device with another stream."""
        return Cuda(self._runtime)

    def close(self) -> None:
        """Destroys the stream."""
        self._call("cudaStreamDestroy", self.stream)

    def free_bytes(self) -> int:
        """Returns the device's free memory."""
        return int(self._call("cudaMemGetInfo")[0])

    def allocate(self, size: int) -> int:
        """Returns a device pointer to ``size`` bytes (at least one)."""
        return int(self._call("cudaMalloc", max(1, size)))

    def free(self, pointer: int) -> None:
        """Frees device memory."""
        self._call("cudaFree", pointer)

    def fill(self, pointer: int, byte: int, size: int) -> None:
        """Sets every byte of memory to ``byte``, in the stream's order."""
        self._call("cudaMemsetAsync", pointer, byte, size, self.stream)

    def upload(self, pointer: int, array: NDArray[Any]) -> None:
        """Copies a contiguous array to the device, in the stream's order."""
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._call("cudaMemcpyAsync", pointer, array.ctypes.data, array.nbytes, kind, self.stream)

    def download(self, pointer: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Copies an array from the device, and waits for it."""
        array = np.empty(shape, dtype)
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        if array.nbytes:
            self._call(
                "cudaMemcpyAsync", array.ctypes.data, pointer, array.nbytes, kind, self.stream
            )
        self.synchronise()
        return array

    def synchronise(self) -> None:
        """Waits until the stream is idle."""
        self._call("cudaStreamSynchronize", self.stream)

    def elapsed_ms(self, enqueue: Callable[[], None]) -> float:
        """Returns the device's time for what ``enqueue`` puts into the stream."""
        begin, end = self._call("cudaEventCreate"), self._call("cudaEventCreate")
        self._call("cudaEventRecord", begin, self.stream)
        enqueue()
        self._call("cudaEventRecord", end, self.stream)
        self._call("cudaEventSynchronize", end)
        elapsed = float(self._call("cudaEventElapsedTime", begin, end))
        for event in (begin, end):
            self._call("cudaEventDestroy", event)
        return elapsed

    @contextmanager
    def captured(self, enqueue: Callable[[], None]) -> Iterator[Callable[[], None] | None]:
        """Captures what ``enqueue`` puts into the stream as a CUDA graph.

        Gives a function that launches it; None where the work cannot be captured.
        """
        # Of this thread alone: TensorRT for RTX may compile kernels in others.
        mode = self._runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._call("cudaStreamBeginCapture", self.stream, mode)
        with suppress(RunnerFailedError):
            enqueue()
        code, graph = self._runtime.cudaStreamEndCapture(self.stream)
        if code != self._runtime.cudaError_t.cudaSuccess:
            self._runtime.cudaGetLastError()  # the device is fine: the next call starts anew
            yield None
            return
        executable = self._call("cudaGraphInstantiate", graph, 0)
        try:
            yield lambda: self._call("cudaGraphLaunch", executable, self.stream)
        finally:
            self._call("cudaGraphExecDestroy", executable)
            self._call("cudaGraphDestroy", graph)

    def device(self) -> dict[str, str]:
        """Returns the GPU's name and compute capability, and CUDA's driver and runtime versions."""
        properties = self._call("cudaGetDeviceProperties", self._call("cudaGetDevice"))
        name = properties.name
        driver, runtime = (
            self._call(name) for name in ("cudaDriverGetVersion", "cudaRuntimeGetVersion")
        )
        return {
            "gpu": name.decode() if isinstance(name, bytes) else str(name),
            "compute_capability": f"{properties.major}.{properties.minor}",
            "cuda_driver": f"{driver // 1000}.{driver % 1000 // 10}",
            "cuda_runtime": f"{runtime // 1000}.{runtime % 1000 // 10}",
        }


class GuardedMemory:
    """``size`` bytes of poisoned device memory between two margins."""

    def __init__(self, cuda: Cuda, size: int) -> None:
        self._cuda, self._size = cuda, size
        self._base = cuda.allocate(size + 2 * MARGIN_BYTES)
        self.pointer = self._base + MARGIN_BYTES
        cuda.fill(self._base, MARGIN_BYTE, size + 2 * MARGIN_BYTES)
        cuda.fill(self.pointer, POISON_BYTE, size)

    def intact(self) -> bool:
        """True if the margins are as they were written."""
        margins = (self._base, self.pointer + self._size)
        arrays = (self._cuda.download(m, (MARGIN_BYTES,), np.dtype(np.uint8)) for m in margins)
        return all(bool((array == MARGIN_BYTE).all()) for array in arrays)

    def free(self) -> None:
        """Frees the memory and its margins."""
        self._cuda.free(self._base)


class Buffers:
    """The device memory of one sample, bound to a context's tensors inside the ``with`` block."""

    def __init__(
        self, trt: Any, cuda: Cuda, context: Any, arrays: Mapping[str, NDArray[Any]]
    ) -> None:
        self._trt, self._cuda, self._context, self._arrays = trt, cuda, context, arrays
        self._engine = context.engine
        self._inputs: dict[str, GuardedMemory] = {}
        self._host: list[NDArray[Any]] = []  # uploads are asynchronous: they must stay alive
        self._allocators: dict[str, Any] = {}

    def __enter__(self) -> Buffers:
        try:
            for index in range(self._engine.num_io_tensors):
                name = self._engine.get_tensor_name(index)
                if self._engine.get_tensor_mode(name) == self._trt.TensorIOMode.INPUT:
                    self._bind_input(name)
                else:
                    allocator = _output_allocator(self._trt, self._cuda)
                    self._context.set_output_allocator(name, allocator)
                    self._allocators[name] = allocator
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        outputs = (memory for a in self._allocators.values() for memory in a.memory)
        for memory in (*self._inputs.values(), *outputs):
            memory.free()

    def fix(self) -> None:
        """After a run, gives outputs of known shape fixed addresses."""
        # TensorRT would call the allocators at each run, which takes longer than a small model.
        for name, allocator in self._allocators.items():
            if -1 not in tuple(self._context.get_tensor_shape(name)):
                self._context.set_output_allocator(name, None)
                self._context.set_tensor_address(name, allocator.memory[-1].pointer)

    @property
    def failure(self) -> RunnerFailedError | None:
        """Why an output got no memory; None if all did."""
        return next((a.failure for a in self._allocators.values() if a.failure is not None), None)

    def fetch_all(self) -> dict[str, NDArray[Any]]:
        """Returns the outputs by name.

        Raises:
            RunnerFailedError: the engine wrote outside its tensors.
        """
        outputs, memories = {}, dict(self._inputs)
        for name, allocator in self._allocators.items():
            memories[name] = allocator.memory[-1]
            dtype = _np_dtype(self._trt, self._engine.get_tensor_dtype(name))
            outputs[name] = self._cuda.download(memories[name].pointer, allocator.shape, dtype)
        for name, memory in memories.items():
            if not memory.intact():
                raise RunnerFailedError(
                    f"the engine wrote outside of its memory, beside tensor {name!r}",
                    Verdict.CRASHED,
                    lost=True,
                )
        return outputs

    def _bind_input(self, name: str) -> None:
        engine, context = self._engine, self._context
        dtype = _np_dtype(self._trt, engine.get_tensor_dtype(name))
        # Not ascontiguousarray, which gives a scalar an axis.
        array = np.asarray(self._arrays[name], dtype, order="C")
        if not context.set_input_shape(name, array.shape):
            raise RunnerFailedError(
                f"input {name!r} of shape {array.shape} is outside the engine's profile",
                Verdict.CRASHED,
            )
        self._host.append(array)
        # Shape values are read on the host.
        if engine.get_tensor_location(name) == self._trt.TensorLocation.HOST:
            context.set_tensor_address(name, array.ctypes.data)
            return
        memory = self._inputs[name] = GuardedMemory(self._cuda, array.nbytes)
        self._cuda.upload(memory.pointer, array)
        context.set_tensor_address(name, memory.pointer)


def _output_allocator(trt: Any, cuda: Cuda) -> Any:
    class Allocator(trt.IOutputAllocator):  # type: ignore[misc]
        """Allocates an output's memory when TensorRT knows its size."""

        def __init__(self) -> None:
            trt.IOutputAllocator.__init__(self)
            self.memory: list[GuardedMemory] = [GuardedMemory(cuda, 0)]
            self.shape: tuple[int, ...] = ()
            self.failure: RunnerFailedError | None = None
            self._size = 0

        def reallocate_output(self, name: str, memory: int, size: int, alignment: int) -> int:
            if size > self._size:
                try:
                    self.memory.append(GuardedMemory(cuda, size))
                except RunnerFailedError as error:  # exceptions cannot pass through TensorRT
                    self.failure = error
                    return 0
                self._size = size
            return self.memory[-1].pointer

        def reallocate_output_async(
            self, name: str, memory: int, size: int, alignment: int, stream: int
        ) -> int:
            return self.reallocate_output(name, memory, size, alignment)

        def notify_shape(self, name: str, shape: Any) -> None:
            self.shape = tuple(shape)

    return Allocator()


def _np_dtype(trt: Any, dtype: Any) -> np.dtype[Any]:
    """NumPy's type for TensorRT's; trt.nptype does not know BF16."""
    numpy_type: np.dtype[Any] = np.dtype(
        ml_dtypes.bfloat16 if dtype.name == "BF16" else trt.nptype(dtype)
    )
    return numpy_type
