"""The ``emulated-whole`` runner: ``to_emulated``'s model in one optimised ONNX Runtime session.

It opens a session for each plan, so it judges answers and does not search. Its FP32 operations are
fused and ordered otherwise: a plan whose outcome depends on that is too close.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import onnx
import onnxruntime as ort

from bisect_trt.base.limits import Limits, give_back
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.metrics.arrays import Arrays
from bisect_trt.model.emulated import to_emulated
from bisect_trt.model.graph import Graph, as_graph
from bisect_trt.runners.concurrency import Headroom, is_large, side_by_side
from bisect_trt.runners.ort_session import RoundedConstants, reference_session, run_all

# They take casts into the fused normalisation, which then reads BF16 or two types at once. The CPU
# provider has no kernel for either.
_CAST_FUSIONS = (
    "LayerNormFusion",  # of older ONNX Runtimes
    "LayerNormFusionL1",
    "LayerNormFusionL2",
    "SimplifiedLayerNormFusion",
)


class WholeModelRunner:
    """Executes a model in a session for each plan.

    It is closed after each call if the model's weights take ``large_bytes`` or more.
    """

    name = "emulated-whole"

    def __init__(
        self,
        model: onnx.ModelProto | Graph,
        constants: RoundedConstants | None = None,
        threads: int = 0,
        large_bytes: int = Limits.large_bytes,
    ) -> None:
        self.versions: Mapping[str, str] = {
            "onnxruntime": ort.__version__,
            "onnx": onnx.__version__,
        }
        self._graph = as_graph(model)
        self._constants = constants
        self._threads = threads
        self._is_large = is_large(self._graph, large_bytes)
        self._kept: tuple[PrecisionPlan, Graph, ort.InferenceSession] | None = None
        self._headroom = Headroom(self._graph, threads, large_bytes=large_bytes)

    def outputs(self, plan: PrecisionPlan, samples: Sequence[Sample]) -> Iterator[Arrays]:
        try:
            # In groups: no session may still run when one of the other graph is opened.
            for graph, group in groupby(samples, lambda s: self._graph.taking(s.arrays)):
                runs = ((self._session_of(plan, graph), sample) for sample in group)
                yield from side_by_side(_run, runs, lambda run: self._headroom.at_once(run[1]))
        finally:
            if self._is_large:
                self.release()

    def release(self) -> None:
        """Closes the session, and frees the memory of mapped weights."""
        self._kept = None
        self._graph.constants.let_go()
        give_back()

    def facts(self, plan: PrecisionPlan) -> Mapping[str, Any]:
        return {}

    def _session_of(self, plan: PrecisionPlan, graph: Graph) -> ort.InferenceSession:
        if self._kept is None or self._kept[:2] != (plan, graph):
            self.release()  # first: two sessions would be in memory for a moment
            session = reference_session(
                lambda: to_emulated(graph, plan),
                quantised=graph.quantised,
                constants=self._constants,
                without=_CAST_FUSIONS,
                threads=self._threads,
            )
            self._kept = (plan, graph, session)
        return self._kept[2]


def _run(run: tuple[ort.InferenceSession, Sample]) -> Arrays:
    session, sample = run
    return run_all(session, sample.arrays, sample.name)
