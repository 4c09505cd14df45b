"""The ``emulated-whole`` runner: ``to_emulated``'s model in one optimised ONNX Runtime session.

It makes a session for each plan, so it is no runner to search with. It is the second opinion on an
answer: it fuses and orders FP32 operations differently from the node-by-node emulator, and a plan
whose verdict turns on that is too close.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import Any

import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from bisect_trt.core.machine.memory import give_back
from bisect_trt.core.precision import Precision, PrecisionPlan
from bisect_trt.core.sample import Sample
from bisect_trt.graph.model.graph import Graph, as_graph
from bisect_trt.graph.passes.emulated import to_emulated
from bisect_trt.runners.ort.sessions import reference_session, run_all
from bisect_trt.runners.ort.side_by_side import Room, side_by_side
from bisect_trt.runners.ort.turns import Sessions, Turns
from bisect_trt.runners.ort.weights import RoundedConstants

_SWALLOW_CASTS = (
    "LayerNormFusion",  # of older ONNX Runtimes
    "LayerNormFusionL1",
    "LayerNormFusionL2",
    "SimplifiedLayerNormFusion",
)
"""Fusions that take the casts around a normalisation into it, and whose node has no kernel for BF16
on a CPU: a model whose written-out LayerNorm is pinned as a whole was refused. FP16 has one."""


class WholeModelRunner:
    """Executes a model in a fresh session for each plan; the last plan's is kept until another's
    turn comes (see ``turns``), and if the weights are large no longer than a call.

    Args:
        model: an FP32 model, or its :class:`Graph`.
        constants: gives rounded constants that another emulator has; without it they are computed.
        turns: shared with the reference and the emulator that searches.
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
        self._turns.introduce(self, Sessions.SECOND)
        self._kept: tuple[PrecisionPlan, Graph, ort.InferenceSession] | None = None
        self._room = Room(self._graph)

    def outputs(
        self, plan: PrecisionPlan, samples: Sequence[Sample]
    ) -> Iterator[Mapping[str, NDArray[Any]]]:
        try:
            # Before a session of the other form is opened, nothing runs in this one.
            for graph, few in groupby(samples, lambda s: self._graph.taking(s.arrays)):
                ready = ((self._session_of(plan, graph), sample) for sample in few)
                kept = self._kept  # whoever takes the turn may let it go at any time
                if kept is None or kept[:2] != (plan, graph):
                    for asked in islice(ready, 1):  # a plan that fails, fails on the first
                        yield _run(asked)
                yield from side_by_side(_run, ready, lambda s: self._room.at_once(s[1]))
        finally:
            if self._turns.is_large:
                self.release()
            self._turns.trim()  # of 20,000 nodes each call leaves 10 MB in pieces

    def release(self) -> None:
        """Let the session and its memory go."""
        if self._kept is not None:
            self._kept = None
            give_back()

    def _session_of(self, plan: PrecisionPlan, graph: Graph) -> ort.InferenceSession:
        kept = self._kept  # whoever takes the turn may let it go at any time
        if kept is None or kept[:2] != (plan, graph):
            self.release()  # two sessions of one model would be in memory for a moment
            self._turns.take(self)
            self._turns.make_room(Sessions.SECOND)
            session = reference_session(
                lambda: to_emulated(graph, plan),
                quantised=graph.quantised,
                constants=self._constants,
                without=_SWALLOW_CASTS if plan.base is Precision.BF16 else (),
            )
            kept = self._kept = (plan, graph, session)
            self._turns.trim()
        return kept[2]

    def facts(self, plan: PrecisionPlan) -> Mapping[str, Any]:
        return {}


def _run(asked: tuple[ort.InferenceSession, Sample]) -> Mapping[str, NDArray[Any]]:
    session, sample = asked
    return run_all(session, sample.arrays, sample.name)
