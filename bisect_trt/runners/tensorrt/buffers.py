"""Device memory for one sample, so that a fault of ours is never taken for one of the engine's.

Outputs are filled with NaN before each run, so that what an engine leaves unwritten shows; inputs
and outputs lie between margins that nobody may write to, and these are looked at after each run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from bisect_trt.core.errors import RunnerFailedError
from bisect_trt.core.verdict import Verdict
from bisect_trt.runners.tensorrt.cuda import Cuda

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
    """Memory for one sample, bound to a context's tensors while in use.

    Args:
        trt: the TensorRT module.
        cuda: the device, with the context's stream.
        context: what will run.
        arrays: the inputs by name.
    """

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
