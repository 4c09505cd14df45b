"""ONNX Runtime's C values and the call on them; no other module uses its private parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

# The public wrapper converts every value to a Python object and back, which takes longer than a
# small layer. A C value only borrows NumPy's memory: who feeds it must keep its owner.
Value = Any
"""ONNX Runtime's C OrtValue, which has no public type."""


def owned(array: NDArray[Any], memory: str = "cpu", number: int = 0) -> ort.OrtValue:
    """``array`` as a value of ONNX Runtime; on the CPU a contiguous array is not copied."""
    return ort.OrtValue.ortvalue_from_numpy(np.asarray(array, order="C"), memory, number)


class _Borrowed:
    """A value's memory as NumPy's array interface; keeps the value alive."""

    def __init__(self, value: Value, dtype: np.dtype[Any]) -> None:
        self._value = value
        self.__array_interface__ = {
            "version": 3,
            "typestr": dtype.str,
            "shape": tuple(value.shape()),
            "data": (value.data_ptr(), True),
        }


def viewed(value: Value) -> NDArray[Any]:
    """A tensor's values, read-only; float32 without a copy, other types copied."""
    if value.data_type() != "tensor(float)" or 0 in value.shape():
        copied: NDArray[Any] = value.numpy()
        return copied
    return np.asarray(_Borrowed(value, np.dtype(np.float32)))


def value_of(owner: ort.OrtValue) -> Value:
    """The C value of ``owner``, valid as long as ``owner`` lives."""
    return owner._ortvalue


def attach(session: ort.InferenceSession, borrowed: object) -> None:
    """Keeps ``borrowed`` alive as long as ``session``, and frees the serialised model."""
    # The wrapper keeps the bytes only to open the session again with other providers.
    session._model_bytes = None
    session._borrowed = borrowed


def caller(session: ort.InferenceSession) -> Callable[..., Any]:
    """The session's call on C values: (feed by name, output names, run options)."""
    # Read the answer by index: iterating the C++ vector ends with a slow C++ exception.
    call: Callable[..., Any] = session._sess.run_with_ort_values
    return call
