"""The reference: ONNX Runtime's CPU provider at FP32, never the CUDA provider, which uses TF32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnxruntime as ort
from numpy.typing import NDArray

from bisect_trt.core.sample import Sample
from bisect_trt.graph.graph import Graph
from bisect_trt.graph.layers import with_unique_names
from bisect_trt.graph.load import loadable
from bisect_trt.runners.ort_sessions import reference_session, run_all


class Reference:
    """A model's FP32 outputs, also on samples that bring what it would look up.

    The session is opened at once, so that a model which ONNX Runtime cannot load is refused before
    anything is written, and again when it is needed after :meth:`release`.

    Args:
        graph: the model.
        path: its file where it is the user's own, so that it need not be serialised again.

    Raises:
        BadInputError: ONNX Runtime cannot load the model.
    """

    def __init__(self, graph: Graph, path: str | None) -> None:
        self._graph = graph
        self._path = path
        self._sessions: dict[Graph, ort.InferenceSession] = {graph: self._open(graph)}

    def outputs(self, sample: Sample) -> Mapping[str, NDArray[Any]]:
        """The outputs of one sample, arrays by output name.

        Raises:
            RunnerFailedError: ONNX Runtime cannot compute them; names the sample.
        """
        graph = self._graph.taking(sample.arrays)
        if graph not in self._sessions:
            self._sessions[graph] = self._open(graph)
        return run_all(self._sessions[graph], sample.arrays, sample.name)

    def release(self) -> None:
        """Let the sessions and their memory go."""
        self._sessions.clear()

    def _open(self, graph: Graph) -> ort.InferenceSession:
        proto = graph.proto
        named = [n.name for n in proto.graph.node if n.name]
        unique = len(set(named)) == len(named)
        # ONNX Runtime takes a path as text, which the bytes of a file's name need not be.
        path = self._path if graph is self._graph else None
        if unique and path is not None and path.isprintable():
            return reference_session(path, quantised=graph.quantised)
        # ONNX Runtime refuses two nodes of one name, which other engines accept.
        with loadable(proto if unique else with_unique_names(proto)) as source:
            return reference_session(source, quantised=graph.quantised)
