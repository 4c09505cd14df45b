"""Executes every plan of a base precision in one session, whose inputs switch the roundings."""

from __future__ import annotations

from collections.abc import Set

import numpy as np

from bisect_trt.base.plan import Precision
from bisect_trt.base.sample import Sample
from bisect_trt.metrics.arrays import Arrays
from bisect_trt.model.graph import Graph
from bisect_trt.model.switched import to_switched
from bisect_trt.runners.concurrency import Headroom
from bisect_trt.runners.constants import ConstantStore
from bisect_trt.runners.device import CPU, Device
from bisect_trt.runners.ort_session import failure_of_session, session_as_written
from bisect_trt.runners.values import caller, owned, value_of, viewed

_WHERE = "the emulated model"


class SwitchedSession:
    """Executes a model with any of its layers reduced to ``low``, and the others in ``pin``."""

    def __init__(
        self,
        graph: Graph,
        constants: ConstantStore,
        low: Precision,
        pin: Precision,
        *,
        threads: int = 0,
        device: Device = CPU,
    ) -> None:
        self._constants, self._device = constants, device
        self._headroom = Headroom(graph, threads)
        switched = to_switched(graph, low, pin, selects=device != CPU)
        self._takes, self._gives = switched.takes, graph.outputs
        self._flags, self._weights = switched.flags, switched.weights
        self._call = caller(session_as_written(switched.model, _WHERE, threads, device))
        self._states = [
            owned(np.array(state), device.memory, device.number) for state in (False, True)
        ]

    def at_once(self, sample: Sample) -> int:
        """Returns how many inferences on samples like ``sample`` fit side by side."""
        return self._headroom.at_once(sample) if self._device == CPU else 1

    def run(self, sample: Sample, reduced: Set[str]) -> Arrays:
        """Returns one sample's outputs with the layers ``reduced``; thread-safe.

        Raises:
            RunnerFailedError: ONNX Runtime cannot run the model.
        """
        # The values borrow the memory of their owners, which must live until the call is done.
        owners = {name: owned(sample.arrays[name]) for name in self._takes}
        for name, flag in self._flags.items():
            is_on = any(n in reduced for n in flag.on) and not any(n in reduced for n in flag.off)
            owners[name] = self._states[is_on]
        for name, weight in self._weights.items():
            precision = weight.reduced if weight.layer in reduced else weight.pinned
            owners[name] = self._constants.owner(weight.tensor, precision)
        feed = {name: value_of(owner) for name, owner in owners.items()}
        try:
            results = self._call(feed, self._gives, None)
        except Exception as error:
            raise failure_of_session(_WHERE, error) from error
        outputs = {name: viewed(results[i]) for i, name in enumerate(self._gives)}
        # An input that is also an output is the caller's memory, which may be freed: copied.
        return outputs | {n: outputs[n].copy() for n in self._takes if n in outputs}
