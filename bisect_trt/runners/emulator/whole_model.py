"""The ``emulated-whole`` runner: ``to_emulated``'s model in one optimised ONNX Runtime session.

It makes a session for each plan, so it is no runner to search with. It is the second opinion on an
answer: it fuses and orders FP32 operations differently from the node-by-node emulator, and a plan
whose verdict turns on that is too close.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, groupby, islice
from typing import Any

import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from bisect_trt.core.machine.memory import give_back
from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.core.sample import Sample
from bisect_trt.graph.model.graph import Graph, as_graph
from bisect_trt.graph.passes.capable import with_roundings
from bisect_trt.graph.passes.emulated import to_emulated
from bisect_trt.runners.emulator.by_parts import (
    Parts,
    at_a_time,
    in_parts,
    is_parted,
    run_parts,
)
from bisect_trt.runners.ort.sessions import reference_session, run_all
from bisect_trt.runners.ort.side_by_side import Room, side_by_side, until_failed
from bisect_trt.runners.ort.turns import Sessions, Turns
from bisect_trt.runners.ort.weights import RoundedConstants

_SWALLOW_CASTS = (
    "LayerNormFusion",  # of older ONNX Runtimes
    "LayerNormFusionL1",
    "LayerNormFusionL2",
    "SimplifiedLayerNormFusion",
)
"""Fusions that take the casts around a normalisation into it: their node has no kernel for BF16 on
a CPU, and may read two types (a written-out LayerNorm that is pinned as a whole)."""


class WholeModelRunner:
    """Executes a model in a fresh session for each plan; the last plan's is kept until another's
    turn comes (see ``turns``), and if the weights are large no longer than a call. With a hundred
    thousand nodes it is run by parts (see ``by_parts``).

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
        self._cut: tuple[PrecisionPlan, Graph, Parts] | None = None
        self._room = Room(self._graph)

    def outputs(
        self, plan: PrecisionPlan, samples: Sequence[Sample]
    ) -> Iterator[Mapping[str, NDArray[Any]]]:
        try:
            # Before a session of the other form is opened, nothing runs in this one.
            for graph, few in groupby(samples, lambda s: self._graph.taking(s.arrays)):
                yield from self._outputs(plan, graph, few)
        finally:
            if self._turns.is_large:
                self.release()
            self._turns.trim()  # of 20,000 nodes each call leaves 10 MB in pieces

    def release(self) -> None:
        """Let the session, or the parts, and their memory go."""
        if self._kept is not None or self._cut is not None:
            self._kept = self._cut = None
            give_back()

    def _outputs(
        self, plan: PrecisionPlan, graph: Graph, samples: Iterator[Sample]
    ) -> Iterator[Mapping[str, NDArray[Any]]]:
        """Of samples that are run in one form of the model, ``graph``."""
        is_new = not self._has_session(plan, graph)
        first = next(samples)
        its = chain([first], samples)
        parts = self._make_ready(plan, graph, first)
        if parts is not None:
            opened = partial(self._opened, plan, graph)
            failed: list[Exception] = []
            stream = until_failed(its, failed)
            for sample in stream:
                several = [sample, *islice(stream, at_a_time(graph, sample) - 1)]
                yield from run_parts(parts, several, graph.outputs, opened, self._room.at_once)
            if failed:
                raise failed[0]
            return
        ready = ((self._session_of(plan, graph), sample) for sample in its)
        for asked in islice(ready, int(is_new)):  # a plan that fails, fails on the first
            yield _run(asked)
        yield from side_by_side(_run, ready, lambda s: self._room.at_once(s[1]))

    def _has_session(self, plan: PrecisionPlan, graph: Graph) -> bool:
        kept = self._kept  # whoever takes the turn may let it go at any time
        return kept is not None and kept[:2] == (plan, graph)

    def _make_ready(self, plan: PrecisionPlan, graph: Graph, sample: Sample) -> Parts | None:
        """The parts by which the model is run; None where it has a session, which then is open."""
        known = self._cut
        if known is not None and known[:2] == (plan, graph):
            return known[2]
        if self._has_session(plan, graph):
            return None
        self._make_room()
        made = [to_emulated(graph, plan)]
        if is_parted(made[0], graph, sample):
            parts = in_parts(made.pop(), with_roundings(graph, plan.base))
            if len(parts) > 1:
                self._cut = (plan, graph, parts)
                self._turns.trim()
                return parts
            made = [parts[0].unpacked().model]
            del parts
        self._kept = (plan, graph, self._opened(plan, graph, made.pop))
        return None

    def _session_of(self, plan: PrecisionPlan, graph: Graph) -> ort.InferenceSession:
        kept = self._kept  # whoever takes the turn may let it go at any time
        if kept is None or kept[:2] != (plan, graph):
            self._make_room()
            session = self._opened(plan, graph, lambda: to_emulated(graph, plan))
            kept = self._kept = (plan, graph, session)
        return kept[2]

    def _make_room(self) -> None:
        """Before a plan is emulated: two sessions of one model would be in memory for a moment."""
        self.release()
        self._turns.take(self)
        self._turns.make_room(Sessions.SECOND)

    def _opened(
        self, plan: PrecisionPlan, graph: Graph, made: Callable[[], onnx.ModelProto]
    ) -> ort.InferenceSession:
        """A session over what ``made`` makes, ``graph`` under ``plan`` or a part of it."""
        self._turns.take(self)
        session = reference_session(
            made,
            quantised=graph.quantised,
            constants=self._constants,
            without=_SWALLOW_CASTS,
        )
        self._turns.trim()
        return session

    def facts(self, plan: PrecisionPlan) -> Mapping[str, Any]:
        return {}


def _run(asked: tuple[ort.InferenceSession, Sample]) -> Mapping[str, NDArray[Any]]:
    session, sample = asked
    return run_all(session, sample.arrays, sample.name)
