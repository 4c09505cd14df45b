"""The probe's fast way: one session for all plans of a base precision, its roundings switched by
what is fed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from bisect_trt.core.errors import RunnerFailedError, one_line
from bisect_trt.core.precision import Precision
from bisect_trt.graph.load import loadable
from bisect_trt.graph.passes.switched import to_switched
from bisect_trt.runners.emulator.constant_store import ConstantStore, Value
from bisect_trt.runners.ort_sessions import switched_session


class SwitchedSession:
    """Executes ``model`` with any of its layers lowered to ``low`` and the others in ``pin``."""

    def __init__(
        self,
        model: onnx.ModelProto,
        constants: ConstantStore,
        low: Precision,
        pin: Precision,
        threads: int,
    ) -> None:
        switched = to_switched(model, low, pin)
        self._flags, self._weights = switched.flags, switched.weights
        with loadable(switched.model) as source:
            self._session = switched_session(source, threads)
        self._constants = constants
        self._outputs = [o.name for o in model.graph.output]
        # The values must outlive the call, and making one costs more than passing it.
        self._switch = {
            state: ort.OrtValue.ortvalue_from_numpy(np.array(state)) for state in (False, True)
        }

    def run(
        self, arrays: Mapping[str, NDArray[Any]], lowered: frozenset[str]
    ) -> dict[str, NDArray[Any]]:
        """The outputs by name for one sample. Raises :class:`RunnerFailedError` with ONNX Runtime's
        words.
        """
        held = {
            name: ort.OrtValue.ortvalue_from_numpy(np.asarray(a, order="C"))
            for name, a in arrays.items()
        }
        feed: dict[str, Value] = {name: value._ortvalue for name, value in held.items()}
        off, on = (self._switch[state]._ortvalue for state in (False, True))
        for name, flag in self._flags.items():
            feed[name] = (
                on if not lowered.isdisjoint(flag.on) and lowered.isdisjoint(flag.off) else off
            )
        for name, weight in self._weights.items():
            precision = weight.lowered if weight.layer in lowered else weight.pinned
            feed[name] = self._constants.value(weight.tensor, precision)
        try:
            results = self._session._sess.run_with_ort_values(feed, self._outputs, None)
            # By index: iterating this C++ vector to its end throws a C++ exception, which is slow.
            return {name: results[i].numpy() for i, name in enumerate(self._outputs)}
        except Exception as error:
            raise RunnerFailedError(f"ONNX Runtime failed ({one_line(error)})") from error
