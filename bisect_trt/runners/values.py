"""ONNX Runtime's C values and its call on them: the one module that touches its private parts.

The public wrapper converts every value to a Python object and back, which for a small layer costs
more than the layer. The C values only borrow NumPy's memory: whoever feeds one keeps its owner.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

Value = Any
"""ONNX Runtime's C OrtValue, which has no public type."""


def owned(array: NDArray[Any], memory: str = "cpu", number: int = 0) -> ort.OrtValue:
    """``array`` as ONNX Runtime holds it; for the CPU a contiguous array of NumPy's own types is
    not copied.
    """
    return ort.OrtValue.ortvalue_from_numpy(np.asarray(array, order="C"), memory, number)


class _Borrowed:
    """A value's memory, for NumPy; keeps the value."""

    def __init__(self, value: Value, dtype: np.dtype[Any]) -> None:
        self._value = value
        self.__array_interface__ = {
            "version": 3,
            "typestr": dtype.str,
            "shape": tuple(value.shape()),
            "data": (value.data_ptr(), True),
        }


def viewed(value: Value) -> NDArray[Any]:
    """A tensor's values without a copy, read only; one of float32 alone, others are copied."""
    shape = value.shape()
    if value.data_type() != "tensor(float)" or 0 in shape:
        found: NDArray[Any] = value.numpy()
        return found
    return np.asarray(_Borrowed(value, np.dtype(np.float32)))


def value_of(owner: ort.OrtValue) -> Value:
    """The C value behind ``owner``, alive as long as that."""
    return owner._ortvalue


def bytes_of(value: Value) -> int:
    """What a C value's tensor holds; 0 for a sequence, an optional or strings, which do not say."""
    if not value.is_tensor() or value.data_type() == "tensor(string)":
        return 0
    return int(value.tensor_size_in_bytes())


def attach(session: ort.InferenceSession, borrowed: object) -> None:
    """Let ``borrowed`` live as long as ``session``, and free the serialised model.

    The wrapper keeps that to open the session again on other providers.
    """
    session._model_bytes = None
    session._borrowed = borrowed


def caller(session: ort.InferenceSession) -> Callable[..., Any]:
    """The session's call on C values: (feed by name, output names, run options).

    Read the answer by index: iterating that C++ vector to its end throws a slow C++ exception.
    """
    call: Callable[..., Any] = session._sess.run_with_ort_values
    return call
