"""The list of roundings is what the emulated model makes, tensor by tensor."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto

from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.graph import Graph, to_emulated
from bisect_trt.model.roundings import is_rounded, list_roundings
from fixtures.encoders import encoder_decomposed
from fixtures.models import residual
from fixtures.subgraphs import branch

GRAPHS = {make.__name__: Graph(make().model) for make in (encoder_decomposed, residual)}


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(list(GRAPHS)), st.data())
def test_the_emulated_model_makes_the_roundings_of_its_plan(name: str, data: st.DataObject) -> None:
    graph = GRAPHS[name]
    names = [layer.name for layer in graph.layers]
    reduced = data.draw(st.sets(st.sampled_from(names)))
    expected = set()
    for node in list_roundings(graph, Precision.FP16):
        for rounding in node.operands.values():
            made = rounding.maker in reduced
            if rounding.layer in reduced and not rounding.constant and not made:
                expected.add(("read", rounding.tensor))
        for rounding in node.results.values():
            if rounding.layer in reduced:
                expected.add(("given", rounding.tensor))
    plan = PrecisionPlan("fp16", set(names) - reduced)
    nodes = to_emulated(graph, plan).graph.node
    down = [n for n in nodes if n.op_type == "Cast" and n.attribute[0].i == TensorProto.FLOAT16]
    sources = {n.input[0] for n in down}
    found = {("given", s.removesuffix("__raw")) for s in sources if s.endswith("__raw")}
    found |= {("read", s) for s in sources if not s.endswith("__raw")}
    assert found == expected and len(down) == len(expected)


@pytest.mark.parametrize("wanted", list(Precision))
def test_rounding_again_changes_nothing_where_it_is_left_out(wanted: Precision) -> None:
    import numpy as np

    from bisect_trt.metrics.rounding import rounded

    values = np.random.default_rng(0).normal(size=4096).astype(np.float32)
    for state in Precision:
        once = rounded(values, state)
        if is_rounded(state, wanted):
            assert np.array_equal(rounded(once, wanted), once)
        elif state is Precision.FP32:
            assert not np.array_equal(rounded(once, wanted), once)


def test_control_flow_is_one_layer_and_its_body_is_not_opened() -> None:
    graph = Graph(branch().model)
    index = next(i for i, n in enumerate(graph.proto.graph.node) if n.op_type == "If")
    assert list_roundings(graph, Precision.FP16)[index].results
