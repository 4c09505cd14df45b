"""Without names a segment computes the same, and two that differ in names alone are the same."""

from __future__ import annotations

import re

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from bisect_trt.base.plan import Precision
from bisect_trt.model.segment_forms import nameless
from bisect_trt.model.segments import cut
from bisect_trt.model.switched import Segment, to_switched
from bisect_trt.runners.ort_session import switched_session
from tests.runners.test_segments import network, sample

BODY = """
    <ir_version: 8, opset_import: ["" : 17]>
    g (float[N] x, bool c) => (float[N] y)
    <int64[1] one = {1}> {
        a = Tanh(x)
        b = If (c) <
            then_branch = t () => (float[N] p) { p = Mul(a, x) },
            else_branch = e () => (float[N] q) { r = Identity(a)  q = Add(r, a) }
        >
        s = ReduceSum <keepdims = 1> (b)
        y = Add(b, s)
    }
"""


def segment(text: str, **renamed: str) -> Segment:
    for name, other in renamed.items():
        text = re.sub(rf"\b{name}\b", other, text)
    model = onnx.parser.parse_model(text)
    graph = model.graph
    takes = tuple(i.name for i in graph.input)
    return Segment(model, takes, tuple(o.name for o in graph.output), {}, {})


def content(of: Segment) -> bytes:
    return nameless(of)[0].model.SerializeToString(deterministic=True)


def test_names_are_all_that_is_lost() -> None:
    plain = segment(BODY)
    other = segment(BODY, x="input", a="A", p="b_1", r="t", c="C", y="Y", one="axes")
    assert {n for node in other.model.graph.node for n in node.output} == {"A", "b", "s", "Y"}
    assert content(plain) == content(other)
    assert content(plain) == content(segment(BODY.replace("float[N] x", "float[3] x")))
    for changed in (
        BODY.replace("Mul(a, x)", "Mul(x, a)"),
        BODY.replace("Add(b, s)", "Add(s, b)"),
        BODY.replace("keepdims = 1", "keepdims = 0"),
        BODY.replace("one = {1}", "one = {2}"),
        BODY.replace("bool c", "int64 c"),
        BODY.replace("Tanh", "Sin"),
    ):
        assert content(segment(changed)) != content(plain), changed


def test_documentation_is_no_difference() -> None:
    plain, told = segment(BODY), segment(BODY)
    graph = told.model.graph
    graph.name, graph.doc_string = "another", "line 7"
    for node in graph.node:
        node.name, node.doc_string = f"n{node.output[0]}", "exported from here"
        node.metadata_props.add(key="where", value="there")
    graph.value_info.append(helper.make_tensor_value_info("a", TensorProto.FLOAT, [3]))
    graph.initializer[0].doc_string = "a constant"
    assert content(told) == content(plain)
    assert told.model.graph.node[0].doc_string, "the source stays as it is"


@pytest.mark.parametrize("low", [Precision.FP16, Precision.BF16, Precision.TF32])
def test_segments_without_names_compute_the_same(low: Precision) -> None:
    graph, given = network(), sample(3).arrays
    tensors = dict(given)
    for part in cut(to_switched(graph, low, Precision.FP32), graph, 16, alike=True):
        own, names = nameless(part)
        feed = {name: tensors[name] for name in part.takes}
        feed |= {flag: np.array(number % 3 > 0) for number, flag in enumerate(part.flags)}
        feed |= {name: graph.constants[w.tensor] for name, w in part.weights.items()}
        renamed = {names.inside[name]: array for name, array in feed.items()}
        found = switched_session(part.model, 1).run(list(part.gives), feed)
        again = switched_session(own.model, 1).run(list(own.gives), renamed)
        for one, other in zip(found, again, strict=True):
            assert one.tobytes() == other.tobytes()
        assert own.gives == tuple(names.inside[name] for name in part.gives)
        tensors.update(zip(part.gives, found, strict=True))


def test_a_scan_is_told_what_it_goes_over() -> None:
    """Of a body whose outputs have no shape ONNX Runtime derives them from what is scanned."""
    text = """
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[2] start, float[3, 2] x) => (float[2] end, float[3, 2] y) {
            end, y = Scan <num_scan_inputs = 1, body = b (float[2] s, float[2] e)
                => (t, u) { t = Add(s, e)  u = Identity(t) }> (start, x)
        }
    """
    own, names = nameless(segment(text))
    feed = {"start": np.zeros(2, np.float32), "x": np.ones((3, 2), np.float32)}
    found = switched_session(own.model, 1).run(None, {names.inside[n]: a for n, a in feed.items()})
    assert np.array_equal(found[0], [3, 3]) and found[1].shape == (3, 2)


def test_a_message_gets_the_nodes_own_names_back() -> None:
    plain = segment(BODY)
    for node in plain.model.graph.node:
        node.name = f"layer {node.op_type}"
    own, names = nameless(plain)
    add = own.model.graph.node[-1].name
    said = f"Non-zero status code while running Add node. Name:'{add}' of @node0"
    assert names.own(said) == (
        "Non-zero status code while running Add node. Name:'layer Add' of layer Tanh"
    )
    x = names.inside["x"]
    assert names.own(f"input {x}, @999, @node999") == "input x, @999, @node999"
