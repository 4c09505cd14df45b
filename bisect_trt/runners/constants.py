"""The constants of a model as ONNX Runtime's values, exact and rounded, shared by all sessions."""

from __future__ import annotations

from threading import RLock
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from bisect_trt.base.errors import BadInputError, one_line
from bisect_trt.base.plan import Precision
from bisect_trt.metrics.arrays import flat
from bisect_trt.model.graph import Graph
from bisect_trt.model.tensor_values import PACKED, let_go, rounded_values
from bisect_trt.runners.device import CPU, Device
from bisect_trt.runners.values import owned


def before_fitting(name: str) -> str:
    """The name under which a store has constant ``name`` as it was before its rounding to fit."""
    return f"{name} before fitting"


class ConstantStore:
    """The constants of one graph on a device, each exact and in one rounded version.

    Weights are in memory twice at most, or three times while a call still uses a replaced version.
    On a device other than the CPU they are placed at their first use.

    Raises:
        BadInputError: names a constant that cannot be emulated.
    """

    def __init__(self, graph: Graph, device: Device = CPU) -> None:
        self._arrays = graph.constants
        exact = graph.exact_constants.items()
        self._before_fitting = {before_fitting(name): c.values for name, c in exact}
        self._device = device
        self._lock = RLock()
        self._exact: dict[str, ort.OrtValue] = {}
        self._rounded: dict[str, tuple[Precision, ort.OrtValue]] = {}
        if device == CPU:
            self._exact = {name: _ort_value(name, a) for name, a in self._arrays.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def owner(self, name: str, precision: Precision = Precision.FP32) -> ort.OrtValue:
        """Returns constant ``name``, rounded; keep it while in use, since it may be replaced.
        Thread-safe.
        """
        with self._lock:
            if precision is Precision.FP32:
                if name not in self._exact:
                    self._exact[name] = self._placed(self._array(name))
                return self._exact[name]
            version = self._rounded.get(name)
            if version is None or version[0] is not precision:
                version = None
                self._rounded.pop(name, None)  # freed first: two would be in memory for a moment
                exact = self._array(name)
                array = rounded_values(exact, precision, np.dtype(np.float32))
                version = self._rounded[name] = (precision, self._placed(array))
                let_go(exact)
            return version[1]

    def forget_rounded(self) -> None:
        """Frees the rounded versions, which are made again when they are asked for."""
        with self._lock:
            self._rounded.clear()

    def _array(self, name: str) -> NDArray[Any]:
        return self._before_fitting[name] if name in self._before_fitting else self._arrays[name]

    def _placed(self, array: NDArray[Any]) -> ort.OrtValue:
        return owned(array, self._device.memory, self._device.number)


def _as_packed(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Returns bytes of ``array``'s shape that begin with its values as ONNX packs them."""
    # ONNX Runtime takes the shape from the array, and reads only as many bytes as it needs.
    packed = np.frombuffer(numpy_helper.from_array(array).raw_data, np.uint8)
    padded = np.zeros(array.shape, np.uint8)
    flat(padded)[: packed.size] = packed
    return padded


def _ort_value(name: str, array: NDArray[Any]) -> ort.OrtValue:
    """A constant as ONNX Runtime's value; NumPy's own types are not copied."""
    try:
        # Kind V is a type of ml_dtypes (bfloat16, 8-bit floats): ONNX Runtime takes its raw bits.
        if array.dtype.kind == "V":
            elem_type = helper.np_dtype_to_tensor_dtype(array.dtype)
            bits = array.view(np.uint16 if array.dtype.itemsize == 2 else np.uint8)
            if elem_type in PACKED:
                bits = _as_packed(array)
            return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, elem_type)
        return owned(array)
    except Exception as error:
        raise BadInputError(
            f"model: constant {name!r} ({array.dtype}) cannot be emulated ({one_line(error, 80)})"
        ) from error
