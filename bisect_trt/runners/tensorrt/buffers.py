"""Memory on the GPU: poisoned buffers of inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from bisect_trt.base.errors import RunnerFailedError, RunnerUnavailableError
from bisect_trt.base.outcomes import Verdict


def import_cuda() -> Any:
    """cuda-python's runtime module.

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
    """A stream and what is done on it. Every failure raises :class:`RunnerFailedError` with CUDA's
    name for it: the process has lost its device then, for whatever comes next, or there was no
    memory.
    """

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self.stream: int = int(self._checked(runtime.cudaStreamCreate()))

    def _checked(self, result: tuple[Any, ...]) -> Any:
        code, *values = result
        known = self._runtime.cudaError_t
        if code == known.cudaErrorMemoryAllocation:
            raise RunnerFailedError(
                f"the GPU's memory does not suffice ({code.name})", Verdict.CRASHED, machine=True
            )
        if code != known.cudaSuccess:
            raise RunnerFailedError(f"CUDA failed: {code.name}", Verdict.CRASHED, lost=True)
        return values[0] if len(values) == 1 else values

    def free_bytes(self) -> int:
        """What of the device's memory nobody has taken."""
        return int(self._checked(self._runtime.cudaMemGetInfo())[0])

    def allocate(self, size: int) -> int:
        """A device pointer to ``size`` bytes (at least one)."""
        return int(self._checked(self._runtime.cudaMalloc(max(1, size))))

    def free(self, pointer: int) -> None:
        """Give memory back."""
        self._checked(self._runtime.cudaFree(pointer))

    def with_own_stream(self) -> Cuda:
        """The same device with a stream of its own."""
        return Cuda(self._runtime)

    def close(self) -> None:
        """Give the stream back."""
        self._checked(self._runtime.cudaStreamDestroy(self.stream))

    def fill(self, pointer: int, byte: int, size: int) -> None:
        """Set memory to one byte's value, in the stream's order."""
        self._checked(self._runtime.cudaMemsetAsync(pointer, byte, size, self.stream))

    def upload(self, pointer: int, array: NDArray[Any]) -> None:
        """Copy a contiguous array to the device, in the stream's order."""
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._checked(
            self._runtime.cudaMemcpyAsync(
                pointer, array.ctypes.data, array.nbytes, kind, self.stream
            )
        )

    def download(self, pointer: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Copy an array from the device; complete when this returns."""
        array = np.empty(shape, dtype)
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        if array.nbytes:
            self._checked(
                self._runtime.cudaMemcpyAsync(
                    array.ctypes.data, pointer, array.nbytes, kind, self.stream
                )
            )
        self.synchronise()
        return array

    def synchronise(self) -> None:
        """Wait until the stream has done all it was given."""
        self._checked(self._runtime.cudaStreamSynchronize(self.stream))

    def event(self) -> Any:
        """A mark in time."""
        return self._checked(self._runtime.cudaEventCreate())

    def destroy(self, event: Any) -> None:
        """Give ``event`` back."""
        self._checked(self._runtime.cudaEventDestroy(event))

    def record(self, event: Any) -> None:
        """Put ``event`` into the stream."""
        self._checked(self._runtime.cudaEventRecord(event, self.stream))

    def elapsed_ms(self, begin: Any, end: Any) -> float:
        """Milliseconds between two recorded events, once the second has happened."""
        self._checked(self._runtime.cudaEventSynchronize(end))
        return float(self._checked(self._runtime.cudaEventElapsedTime(begin, end)))

    def device(self) -> dict[str, str]:
        """The GPU's name and compute capability, and the versions of driver and runtime."""
        number = self._checked(self._runtime.cudaGetDevice())
        properties = self._checked(self._runtime.cudaGetDeviceProperties(number))
        driver = self._checked(self._runtime.cudaDriverGetVersion())
        runtime = self._checked(self._runtime.cudaRuntimeGetVersion())
        return {
            "gpu": properties.name.decode()
            if isinstance(properties.name, bytes)
            else str(properties.name),
            "compute_capability": f"{properties.major}.{properties.minor}",
            "cuda_driver": f"{driver // 1000}.{driver % 1000 // 10}",
            "cuda_runtime": f"{runtime // 1000}.{runtime % 1000 // 10}",
        }


_MARGIN = 512
"""Bytes on either side: as much as CUDA aligns memory to, so that what lies between is aligned."""
_UNTOUCHED, _POISON = 0xA5, 0xFF
"""Patterns: of a margin, and of an output before the run (all bits set are NaN as a float)."""


class GuardedMemory:
    """``size`` bytes of device memory at ``pointer``, between two margins, filled with what nobody
    mistakes for an answer.
    """

    def __init__(self, cuda: Cuda, size: int) -> None:
        self._cuda, self._size = cuda, size
        self._base = cuda.allocate(size + 2 * _MARGIN)
        self.pointer = self._base + _MARGIN
        cuda.fill(self._base, _UNTOUCHED, size + 2 * _MARGIN)
        cuda.fill(self.pointer, _POISON, size)

    def intact(self) -> bool:
        """Whether nobody wrote to the margins."""
        margins = (self._base, self.pointer + self._size)
        read = (self._cuda.download(m, (_MARGIN,), np.dtype(np.uint8)) for m in margins)
        return all(bool((found == _UNTOUCHED).all()) for found in read)

    def free(self) -> None:
        """Give it back."""
        self._cuda.free(self._base)


class Buffers:
    """Memory for one sample, bound to a context's tensors while in use."""

    def __init__(
        self, trt: Any, cuda: Cuda, context: Any, arrays: Mapping[str, NDArray[Any]]
    ) -> None:
        self._trt, self._cuda, self._context, self._arrays = trt, cuda, context, arrays
        self._engine = context.engine
        self._inputs: dict[str, GuardedMemory] = {}
        self._host: list[NDArray[Any]] = []
        self._allocators: dict[str, Any] = {}

    def __enter__(self) -> Buffers:
        try:
            self._bind_all()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _bind_all(self) -> None:
        engine = self._engine
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        for name in names:
            if engine.get_tensor_mode(name) == self._trt.TensorIOMode.INPUT:
                self._bind_input(name)
                continue
            allocator = _output_allocator(self._trt, self._cuda)
            self._context.set_output_allocator(name, allocator)
            self._allocators[name] = allocator

    def fix(self) -> None:
        """Let outputs whose shapes follow from the inputs' lie from here on where they lie after a
        run: each inference would ask for their places, which takes 7 us an output (measured on an
        H100, where eight elementwise outputs take 9 us in all).
        """
        for name, allocator in self._allocators.items():
            if -1 not in tuple(self._context.get_tensor_shape(name)):
                self._context.set_output_allocator(name, None)
                self._context.set_tensor_address(name, allocator.memory[-1].pointer)

    def __exit__(self, *_: object) -> None:
        for memory in (
            *self._inputs.values(),
            *(m for a in self._allocators.values() for m in a.memory),
        ):
            memory.free()

    @property
    def failure(self) -> RunnerFailedError | None:
        """Why an output was given no memory, where it was not."""
        return next((a.failure for a in self._allocators.values() if a.failure is not None), None)

    def fetch_all(self) -> dict[str, NDArray[Any]]:
        """The outputs by name.

        Raises:
            RunnerFailedError: the engine wrote where none of its tensors lies.
        """
        outputs = {name: self._fetch(name) for name in self._allocators}
        lying = {**self._inputs, **{n: a.memory[-1] for n, a in self._allocators.items()}}
        for name, memory in lying.items():
            if not memory.intact():
                raise RunnerFailedError(
                    f"the engine wrote outside of its memory, beside tensor {name!r}",
                    Verdict.CRASHED,
                    lost=True,
                )
        return outputs

    def _fetch(self, name: str) -> NDArray[Any]:
        allocator = self._allocators[name]
        dtype = np_dtype(self._trt, self._engine.get_tensor_dtype(name))
        return self._cuda.download(allocator.memory[-1].pointer, allocator.shape, dtype)

    def _bind_input(self, name: str) -> None:
        engine, context = self._engine, self._context
        dtype = np_dtype(self._trt, engine.get_tensor_dtype(name))
        # ascontiguousarray would give a scalar an axis.
        array = np.asarray(self._arrays[name], dtype, order="C")
        if not context.set_input_shape(name, array.shape):
            raise RunnerFailedError(
                f"input {name!r} of shape {array.shape} is outside the engine's profile",
                Verdict.CRASHED,
            )
        self._host.append(array)
        if engine.get_tensor_location(name) == self._trt.TensorLocation.HOST:
            context.set_tensor_address(name, array.ctypes.data)
            return
        memory = self._inputs[name] = GuardedMemory(self._cuda, array.nbytes)
        self._cuda.upload(memory.pointer, array)
        context.set_tensor_address(name, memory.pointer)


def _output_allocator(trt: Any, cuda: Cuda) -> Any:
    class Allocator(trt.IOutputAllocator):  # type: ignore[misc]
        """Gives an output the memory it asks for, once its size is known; poisoned each time."""

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
                except RunnerFailedError as error:  # TensorRT calls this, and knows no exceptions
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


def np_dtype(trt: Any, dtype: Any) -> np.dtype[Any]:
    """NumPy's type for TensorRT's; BF16 is ml_dtypes'."""
    if dtype.name == "BF16":
        bf16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bf16
    plain: np.dtype[Any] = np.dtype(trt.nptype(dtype))
    return plain
