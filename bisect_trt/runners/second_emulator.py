"""The ``emulated-whole`` runner: ``to_emulated``'s model in one optimised ONNX Runtime session.

It makes a session for each plan, so it is no runner to search with. It is the second opinion on an
answer: it fuses and orders FP32 operations differently from the first emulator, and a plan whose
verdict turns on that is too close.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import onnx
import onnxruntime as ort

from bisect_trt.base.limits import give_back
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.metrics.arrays import Arrays
from bisect_trt.model.emulated import to_emulated
from bisect_trt.model.graph import Graph, as_graph
from bisect_trt.runners.concurrency import Headroom, Turns, side_by_side
from bisect_trt.runners.ort_session import RoundedConstants, reference_session, run_all

_SWALLOW_CASTS = (
    "LayerNormFusion",  # of older ONNX Runtimes
    "LayerNormFusionL1",
    "LayerNormFusionL2",
    "SimplifiedLayerNormFusion",
)
"""Fusions that take the casts around a normalisation into it: their node has no kernel for BF16 on
a CPU, and may read two types (a written-out LayerNorm that is pinned as a whole)."""


class WholeModelRunner:
    """Executes a model in a fresh session for each plan.

    The last plan's session is kept until another plan is asked for, or of a large model until the
    call ends.
    """

    name = "emulated-whole"

    def __init__(
        self,
        model: onnx.ModelProto | Graph,
        constants: RoundedConstants | None = None,
        turns: Turns | None = None,
    ) -> None:
        self.versions: Mapping[str, str] = {
            "onnxruntime": ort.__version__,
            "onnx": onnx.__version__,
        }
        self._graph = as_graph(model)
        self._constants = constants
        self._turns = turns or Turns(self._graph)
        self._kept: tuple[PrecisionPlan, Graph, ort.InferenceSession] | None = None
        self._headroom = Headroom(self._graph)

    def outputs(self, plan: PrecisionPlan, samples: Sequence[Sample]) -> Iterator[Arrays]:
        try:
            # Before a session of the other form is opened, nothing runs in this one.
            for graph, few in groupby(samples, lambda s: self._graph.taking(s.arrays)):
                asked = ((self._session_of(plan, graph), sample) for sample in few)
                yield from side_by_side(_run, asked, lambda a: self._headroom.at_once(a[1]))
        finally:
            if self._turns.is_large:
                self.release()

    def release(self) -> None:
        """Close the session."""
        if self._kept is not None:
            self._kept = None
            give_back()

    def facts(self, plan: PrecisionPlan) -> Mapping[str, Any]:
        return {}

    def _session_of(self, plan: PrecisionPlan, graph: Graph) -> ort.InferenceSession:
        kept = self._kept  # whoever takes the turn may let it go at any time
        if kept is None or kept[:2] != (plan, graph):
            self.release()  # two sessions of one model would be in memory for a moment
            self._turns.take(self)
            session = reference_session(
                lambda: to_emulated(graph, plan),
                quantised=graph.quantised,
                constants=self._constants,
                without=_SWALLOW_CASTS,
            )
            kept = self._kept = (plan, graph, session)
        return kept[2]


def _run(asked: tuple[ort.InferenceSession, Sample]) -> Arrays:
    session, sample = asked
    return run_all(session, sample.arrays, sample.name)
