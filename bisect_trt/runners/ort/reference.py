"""The reference: ONNX Runtime's CPU provider at FP32, never the CUDA provider, which uses TF32."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock
from typing import Any

import onnxruntime as ort
from numpy.typing import NDArray

from bisect_trt.core.sample import Sample
from bisect_trt.graph.model.decided import list_decisions
from bisect_trt.graph.model.graph import Graph
from bisect_trt.graph.model.layers import with_outputs, with_unique_names
from bisect_trt.numerics.requirements.decisions import gaps
from bisect_trt.numerics.requirements.requirements import ReferenceOutputs
from bisect_trt.runners.ort.sessions import reference_session, run_all
from bisect_trt.runners.ort.side_by_side import Room
from bisect_trt.runners.ort.turns import Sessions, Turns


class Reference:
    """A model's FP32 outputs, also on samples that bring what it would look up.

    The session is opened at once, so that a model which ONNX Runtime cannot load is refused before
    anything is written, and again when it is needed after :meth:`release`. ``is_large`` says that
    the weights are used where they lie, without a copy.

    Args:
        graph: the model.
        where: what an error names.

    Raises:
        BadInputError: ONNX Runtime cannot load the model.
    """

    def __init__(self, graph: Graph, where: str = "model") -> None:
        self._graph = graph
        self._where = where
        self._decisions = list_decisions(graph.proto)
        self.turns = Turns(graph)
        self.is_large = self.turns.is_large
        self.turns.introduce(self, Sessions.REFERENCE)
        self._sessions: dict[Graph, ort.InferenceSession] = {graph: self._open(graph)}
        self._lock = Lock()
        self._room = Room(graph)

    def at_once(self, sample: Sample) -> int:
        """How many threads gain from asking at a time for samples like ``sample``."""
        return self._room.at_once(sample)

    def outputs(self, sample: Sample) -> Mapping[str, NDArray[Any]]:
        """The outputs of one sample, arrays by output name, with the gaps of those that an ArgMax
        makes; several threads may ask.

        Raises:
            RunnerFailedError: ONNX Runtime cannot compute them; names the sample.
        """
        graph = self._graph.taking(sample.arrays)
        with self._lock:
            session = self._sessions.get(graph)
            if session is None:
                session = self._sessions[graph] = self._open(graph)
        found = run_all(session, sample.arrays, sample.name)
        if not self._decisions:
            return found
        outputs = {name: found[name] for name in self._graph.outputs}
        return ReferenceOutputs(
            outputs,
            {
                name: gaps(found[d.tensor], d.axis, smallest=d.smallest).reshape(found[name].shape)
                for name, d in self._decisions.items()
            },
        )

    def release(self) -> None:
        """Let the sessions and their memory go, that of mapped weights too; one that is being
        opened in another thread, when it is there.
        """
        with self._lock:
            self._sessions.clear()
        if self.is_large:
            self._graph.constants.let_go()

    def _open(self, graph: Graph) -> ort.InferenceSession:
        proto = graph.proto
        self.turns.take(self)
        self.turns.make_room(Sessions.REFERENCE)
        named = [n.name for n in proto.graph.node if n.name]
        unique = len(set(named)) == len(named)
        # ONNX Runtime refuses two nodes of one name, which other engines accept.
        proto = proto if unique else with_unique_names(proto)
        session = reference_session(
            with_outputs(proto, [d.tensor for d in self._decisions.values()]),
            self._where,
            quantised=graph.quantised,
            shares_weights=self.is_large,
        )
        self.turns.trim()
        return session
