"""What a sample's integers look up: the first float tensors of the model, in FP32."""

from __future__ import annotations

from typing import Any

import onnxruntime as ort
from numpy.typing import NDArray

from bisect_trt.core.sample import Sample
from bisect_trt.graph.model.graph import Graph
from bisect_trt.graph.model.lookups import lookup_model
from bisect_trt.runners.ort.sessions import reference_session, run_all


class Lookups:
    """Looks up in ``graph``; its session, which holds the tables, is opened when it is needed."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._session: ort.InferenceSession | None = None

    def of(self, sample: Sample) -> dict[str, NDArray[Any]]:
        """Float32 arrays by the names of the inputs of :attr:`Graph.after_lookups` that they may be
        given as; empty where the model looks nothing up.

        Raises:
            RunnerFailedError: ONNX Runtime cannot compute them; names the sample.
        """
        if not self._graph.lookups:
            return {}
        if self._session is None:
            model = lookup_model(self._graph.proto, self._graph.lookups)
            self._session = reference_session(model)
        return run_all(self._session, sample.arrays, sample.name)
