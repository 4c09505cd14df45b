"""A model's weights in the memory of a device: fed from there, a probe copies none of them."""

from __future__ import annotations

from weakref import WeakValueDictionary

import numpy as np
import onnxruntime as ort

from bisect_trt.core.precision import Precision
from bisect_trt.graph.model.graph import Graph
from bisect_trt.graph.tensors.mapped_files import let_go
from bisect_trt.graph.tensors.tensor_values import rounded_values
from bisect_trt.runners.emulator.constants.constant_store import Lent
from bisect_trt.runners.ort.devices import Device
from bisect_trt.runners.ort.values import owned


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
