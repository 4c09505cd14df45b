"""What an engine is given, without an engine: the shapes that the caller's arrays have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from bisect_trt.runners.tensorrt.buffers import Buffers

NAMES = ("scale", "turned")


class Engine:
    """Inputs alone, in the GPU's memory."""

    num_io_tensors = len(NAMES)

    def get_tensor_name(self, number: int) -> str:
        return NAMES[number]

    def get_tensor_mode(self, name: str) -> int:
        return 0

    def get_tensor_location(self, name: str) -> int:
        return 1

    def get_tensor_dtype(self, name: str) -> Any:
        return SimpleNamespace(name="FLOAT")


class Context:
    """Notes the shapes that it is told, and takes all."""

    engine = Engine()

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, address: int) -> None:
        pass


class Memory:
    """CUDA, as far as inputs need it."""

    def __init__(self) -> None:
        self.uploaded: list[np.ndarray[Any, Any]] = []

    def allocate(self, size: int) -> int:
        return 4096

    def fill(self, *_: object) -> None:
        pass

    def free(self, *_: object) -> None:
        pass

    def upload(self, pointer: int, array: np.ndarray[Any, Any]) -> None:
        self.uploaded.append(array)


def test_a_scalar_input_stays_one_and_rows_lie_behind_each_other() -> None:
    enum = SimpleNamespace(INPUT=0, OUTPUT=1, HOST=0, DEVICE=1)
    trt = SimpleNamespace(TensorIOMode=enum, TensorLocation=enum, nptype=lambda _: np.float32)
    context, memory = Context(), Memory()
    arrays = {"scale": np.array(0.5, np.float32), "turned": np.ones((3, 2), np.float32).T}
    with Buffers(trt, memory, context, arrays):  # type: ignore[arg-type]
        assert context.shapes == {"scale": (), "turned": (2, 3)}
        assert all(array.flags.c_contiguous for array in memory.uploaded)
