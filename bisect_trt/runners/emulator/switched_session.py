"""The probe's fast way: one session for all plans of a base precision, its roundings switched by
what is fed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.core.precision import Precision
from bisect_trt.graph.graph import Graph
from bisect_trt.graph.passes.switched import to_switched
from bisect_trt.runners.emulator.constant_store import ConstantStore
from bisect_trt.runners.emulator.device_constants import DeviceConstants
from bisect_trt.runners.ort_devices import CPU, Device
from bisect_trt.runners.ort_profiles import cpu_nodes
from bisect_trt.runners.ort_sessions import failure_of_session, switched_session
from bisect_trt.runners.ort_values import Value, caller, owned, value_of, viewed


class SwitchedSession:
    """Executes a model with any of its layers lowered to ``low`` and the others in ``pin``.

    ``constants`` are those of ``graph``, in the memory of ``device``. ``on_cpu`` names what the CPU
    ran in place of another device, known after the first inference.
    """

    def __init__(
        self,
        graph: Graph,
        constants: ConstantStore | DeviceConstants,
        low: Precision,
        pin: Precision,
        threads: int,
        device: Device = CPU,
    ) -> None:
        switched = to_switched(graph, low, pin)
        self._flags, self._weights = switched.flags, switched.weights
        self.on_cpu: tuple[str, ...] = ()
        self._profiles = None
        if device != CPU:
            self._profiles = tempfile.TemporaryDirectory(prefix="bisect-trt-")
        profile = None if self._profiles is None else str(Path(self._profiles.name) / "profile")
        self._session = switched_session(switched.model, threads, device, profile)
        self._call = caller(self._session)
        self._constants = constants
        self._outputs = graph.outputs
        # The values must outlive the call, and making one costs more than passing it.
        self._switch = {state: owned(np.array(state)) for state in (False, True)}

    def run(
        self, arrays: Mapping[str, NDArray[Any]], lowered: frozenset[str]
    ) -> dict[str, NDArray[Any]]:
        """The outputs by name for one sample.

        Raises:
            RunnerFailedError: with ONNX Runtime's words.
        """
        held = {name: owned(array) for name, array in arrays.items()}
        feed: dict[str, Value] = {name: value_of(owner) for name, owner in held.items()}
        off, on = (value_of(self._switch[state]) for state in (False, True))
        for name, flag in self._flags.items():
            asked = not lowered.isdisjoint(flag.on) and lowered.isdisjoint(flag.off)
            feed[name] = on if asked else off
        for name, weight in self._weights.items():
            precision = weight.lowered if weight.layer in lowered else weight.pinned
            feed[name] = self._constants.value(weight.tensor, precision)
        try:
            results = self._call(feed, self._outputs, None)
            found = {name: viewed(results[i]) for i, name in enumerate(self._outputs)}
        except Exception as error:
            raise failure_of_session("the emulated model", error) from error
        profiles, self._profiles = self._profiles, None
        if profiles is not None:
            self.on_cpu = tuple(cpu_nodes(self._session))
            profiles.cleanup()
        return found
