"""Weights rounded once, and lent to every session."""

from __future__ import annotations

from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from bisect_trt.base.errors import BadInputError, one_line
from bisect_trt.base.plan import Precision
from bisect_trt.metrics.arrays import flat
from bisect_trt.model.graph import Graph
from bisect_trt.model.tensor_values import PACKED, let_go, rounded_values
from bisect_trt.runners.device import Device
from bisect_trt.runners.values import owned


class Lent:
    """Who was given which of a graph's constants: a rounded version that gives way to another must
    outlive the calls that are fed with it, and no more than those.

    ``lock`` is held by whoever asks for constants from several threads. ``by`` has the owners of
    what each borrower was fed with last, until a version gives way: a call in work holds its own
    list, and who finds none here asks again.
    """

    def __init__(self) -> None:
        self.lock = RLock()
        self.by: WeakKeyDictionary[object, list[ort.OrtValue]] = WeakKeyDictionary()


class ConstantStore:
    """The constants of one graph; of each, one rounded version is kept: weights are held twice at
    most, and a third time only while a call is fed with a version that gave way.

    Raises:
        BadInputError: names a constant that cannot be emulated.
    """

    def __init__(self, graph: Graph) -> None:
        self._arrays = graph.constants
        self._exact = {name: _ort_value(name, array) for name, array in graph.constants.items()}
        self._rounded: dict[str, tuple[Precision, ort.OrtValue]] = {}
        self.lent = Lent()

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def owner(self, name: str, precision: Precision = Precision.FP32) -> ort.OrtValue:
        """The constant ``name``, rounded to ``precision``; several threads may ask. Who feeds it
        holds it meanwhile: it may be let go, or give way to another version.
        """
        with self.lent.lock:
            if precision is Precision.FP32:
                if name not in self._exact:
                    self._exact[name] = _ort_value(name, self._arrays[name])
                return self._exact[name]
            held = self._rounded.get(name)
            if held is None or held[0] is not precision:
                if held is not None:
                    held = None
                    del self._rounded[name]  # two would be in memory for a moment
                    self.lent.by.clear()
                exact = self._arrays[name]
                held = (precision, owned(rounded_values(exact, precision, np.dtype(np.float32))))
                let_go(exact)
                self._rounded[name] = held
            return held[1]

    def release(self) -> None:
        """Let go what is made again when it is asked for: of tens of thousands of small constants
        the objects take more than the numbers.
        """
        with self.lent.lock:
            self._exact.clear()
            self._rounded.clear()
            self.lent.by.clear()


def _as_packed(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Bytes of ``array``'s shape that begin with its values as ONNX packs them: ONNX Runtime takes
    the shape, and reads no further than it has to.
    """
    packed = np.frombuffer(numpy_helper.from_array(array).raw_data, np.uint8)
    found = np.zeros(array.shape, np.uint8)
    flat(found)[: packed.size] = packed
    return found


def _ort_value(name: str, array: NDArray[Any]) -> ort.OrtValue:
    """A constant as ONNX Runtime holds it; NumPy's own types go without a copy."""
    try:
        # ml_dtypes: bfloat16 and the 8-bit floats, which ONNX Runtime takes as raw bits.
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


class DeviceConstants:
    """The float constants of ``graph`` on ``device``; of each, the exact and one rounded version
    are kept, placed when they are first read, and others as long as someone holds them. Rounded by
    NumPy, as they are for the CPU.
    """

    def __init__(self, graph: Graph, device: Device) -> None:
        self._arrays = graph.float_constants
        self._device = device
        self._placed: dict[tuple[str, bool], tuple[Precision, ort.OrtValue]] = {}
        self._alive: WeakValueDictionary[tuple[str, Precision], ort.OrtValue] = (
            WeakValueDictionary()
        )
        self.lent = Lent()

    def owner(self, name: str, precision: Precision = Precision.FP32) -> ort.OrtValue:
        """The constant ``name``, rounded to ``precision``; called under ``lent.lock``."""
        key = (name, precision is Precision.FP32)
        held = self._placed.get(key)
        if held is None or held[0] is not precision:
            if held is not None:
                held = None
                del self._placed[key]  # not both rounded versions in the device's memory
                self.lent.by.clear()
            alive = self._alive.get((name, precision))
            if alive is not None:  # a captured session has it
                self._placed[key] = (precision, alive)
                return alive
            exact = self._arrays[name]
            array = exact
            if precision is not Precision.FP32:
                array = rounded_values(exact, precision, np.dtype(np.float32))
            held = (precision, owned(array, self._device.memory, self._device.number))
            let_go(exact)
            self._placed[key] = held
            self._alive[name, precision] = held[1]
        return held[1]
