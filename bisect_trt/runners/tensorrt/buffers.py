"""Memory on the GPU: poisoned buffers of inputs and outputs, between margins.

Polygraphy's buffers are not used: they have no margins, and its errors do not tell a full GPU from
a lost one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from bisect_trt.base.errors import RunnerFailedError, RunnerUnavailableError
from bisect_trt.base.outcomes import Verdict

MARGIN_BYTES = 512
"""On either side: as much as CUDA aligns memory to, so that what lies between is aligned."""
MARGIN_BYTE = 0xA5
POISON_BYTE = 0xFF
"""All bits set are NaN as a float."""


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
    """A stream and what is done on it.

    Every failure raises :class:`RunnerFailedError` with CUDA's name for it: there was no memory, or
    the process has lost its device for whatever comes next.
    """

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self.stream = int(self._call("cudaStreamCreate"))

    def _call(self, name: str, *arguments: Any) -> Any:
        code, *values = getattr(self._runtime, name)(*arguments)
        known = self._runtime.cudaError_t
        if code == known.cudaErrorMemoryAllocation:
            raise RunnerFailedError(
                f"the GPU's memory does not suffice ({code.name})", Verdict.CRASHED, machine=True
            )
        if code != known.cudaSuccess:
            raise RunnerFailedError(f"CUDA failed: {code.name}", Verdict.CRASHED, lost=True)
        return values[0] if len(values) == 1 else values

    def with_own_stream(self) -> Cuda:
        """The same device with a stream of its own."""
        return Cuda(self._runtime)

    def close(self) -> None:
        """Give the stream back."""
        self._call("cudaStreamDestroy", self.stream)

    def free_bytes(self) -> int:
        """What of the device's memory nobody has taken."""
        return int(self._call("cudaMemGetInfo")[0])

    def allocate(self, size: int) -> int:
        """A device pointer to ``size`` bytes (at least one)."""
        return int(self._call("cudaMalloc", max(1, size)))

    def free(self, pointer: int) -> None:
        """Give memory back."""
        self._call("cudaFree", pointer)

    def fill(self, pointer: int, byte: int, size: int) -> None:
        """Set memory to one byte's value, in the stream's order."""
        self._call("cudaMemsetAsync", pointer, byte, size, self.stream)

    def upload(self, pointer: int, array: NDArray[Any]) -> None:
        """Copy a contiguous array to the device, in the stream's order."""
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._call("cudaMemcpyAsync", pointer, array.ctypes.data, array.nbytes, kind, self.stream)

    def download(self, pointer: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Copy an array from the device; complete when this returns."""
        array = np.empty(shape, dtype)
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        if array.nbytes:
            self._call(
                "cudaMemcpyAsync", array.ctypes.data, pointer, array.nbytes, kind, self.stream
            )
        self.synchronise()
        return array

    def synchronise(self) -> None:
        """Wait until the stream has done all it was given."""
        self._call("cudaStreamSynchronize", self.stream)

    def elapsed_ms(self, enqueue: Callable[[], None]) -> float:
        """The device's milliseconds for what ``enqueue`` puts into the stream."""
        begin, end = self._call("cudaEventCreate"), self._call("cudaEventCreate")
        self._call("cudaEventRecord", begin, self.stream)
        enqueue()
        self._call("cudaEventRecord", end, self.stream)
        self._call("cudaEventSynchronize", end)
        elapsed = float(self._call("cudaEventElapsedTime", begin, end))
        for event in (begin, end):
            self._call("cudaEventDestroy", event)
        return elapsed

    def device(self) -> dict[str, str]:
        """The GPU's name and compute capability, and the versions of driver and runtime."""
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
    """``size`` bytes of device memory between two margins, poisoned."""

    def __init__(self, cuda: Cuda, size: int) -> None:
        self._cuda, self._size = cuda, size
        self._base = cuda.allocate(size + 2 * MARGIN_BYTES)
        self.pointer = self._base + MARGIN_BYTES
        cuda.fill(self._base, MARGIN_BYTE, size + 2 * MARGIN_BYTES)
        cuda.fill(self.pointer, POISON_BYTE, size)

    def intact(self) -> bool:
        """Whether nobody wrote to the margins."""
        margins = (self._base, self.pointer + self._size)
        read = (self._cuda.download(m, (MARGIN_BYTES,), np.dtype(np.uint8)) for m in margins)
        return all(bool((found == MARGIN_BYTE).all()) for found in read)

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
        self._host: list[NDArray[Any]] = []  # copies are made while these are held
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
        """Let outputs of known shape stay where they are after a run.

        Each inference would ask for their places, which takes longer than a small model's run.
        """
        for name, allocator in self._allocators.items():
            if -1 not in tuple(self._context.get_tensor_shape(name)):
                self._context.set_output_allocator(name, None)
                self._context.set_tensor_address(name, allocator.memory[-1].pointer)

    @property
    def failure(self) -> RunnerFailedError | None:
        """Why an output was given no memory, where it was not."""
        return next((a.failure for a in self._allocators.values() if a.failure is not None), None)

    def fetch_all(self) -> dict[str, NDArray[Any]]:
        """The outputs by name.

        Raises:
            RunnerFailedError: the engine wrote where none of its tensors lies.
        """
        outputs, lying = {}, dict(self._inputs)
        for name, allocator in self._allocators.items():
            lying[name] = allocator.memory[-1]
            dtype = _np_dtype(self._trt, self._engine.get_tensor_dtype(name))
            outputs[name] = self._cuda.download(lying[name].pointer, allocator.shape, dtype)
        for name, memory in lying.items():
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
        """Gives an output the memory it asks for, once its size is known."""

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


def _np_dtype(trt: Any, dtype: Any) -> np.dtype[Any]:
    """NumPy's type for TensorRT's; BF16 is ml_dtypes'."""
    found: np.dtype[Any] = np.dtype(
        ml_dtypes.bfloat16 if dtype.name == "BF16" else trt.nptype(dtype)
    )
    return found
