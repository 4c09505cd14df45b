"""The ``emulated-kernels`` runner: the network with the FP16 sums of TensorRT for RTX, as far as
they are known.

It takes several times as long as the plain emulator, so it is no runner to search with. It is the
second opinion on an answer before an engine is built: a set that only passes with sums in FP32
would come back from the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from threading import Lock
from typing import Any

from numpy.typing import NDArray

from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.core.sample import Sample
from bisect_trt.runners.emulator.runner import EmulatedRunner


class RtxRunner:
    """Executes the model of ``emulator``."""

    name = "emulated-kernels"

    def __init__(self, emulator: EmulatedRunner) -> None:
        self.versions: Mapping[str, str] = emulator.versions
        self._emulator = emulator
        # A history borrows the constants that its emulator keeps, at one precision at a time: two
        # histories would free each other's.
        self._alone = Lock()

    def outputs(
        self, plan: PrecisionPlan, samples: Sequence[Sample]
    ) -> Iterator[Mapping[str, NDArray[Any]]]:
        with self._alone:
            for sample in samples:
                yield self._emulator.outputs_by_node(plan, sample, rtx_sums=True)

    def facts(self, plan: PrecisionPlan) -> Mapping[str, Any]:
        return {}
