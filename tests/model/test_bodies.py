"""Bodies of control flow: whose type is whose, and what they hold while they run."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.graph import to_emulated, to_typed
from bisect_trt.model.graph import Graph
from bisect_trt.model.shapes import inference_bytes, live_bytes

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
OPSETS = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]


def untyped(name: str) -> onnx.ValueInfoProto:
    return onnx.ValueInfoProto(name=name)


def model(nodes: list[onnx.NodeProto], wide: int, *weights: TensorProto) -> onnx.ModelProto:
    shape = [1, wide]
    info = [helper.make_tensor_value_info(name, FLOAT, shape) for name in ("x", "y")]
    condition = [
        helper.make_node("ReduceSum", ["x"], ["sum"], "sum", keepdims=0),
        helper.make_node("Greater", ["sum", "low"], ["positive"], "positive"),
    ]
    low = numpy_helper.from_array(np.float32(-1e9), "low")
    graph = helper.make_graph(condition + nodes, "g", info[:1], info[1:], [low, *weights])
    return helper.make_model(graph, opset_imports=OPSETS, ir_version=8)


def branch(name: str, last: str, **attributes: int) -> onnx.GraphProto:
    """A custom operator, so that nothing behind it is typed, and an output of no declared type,
    which has one name in all bodies.
    """
    nodes = [
        helper.make_node("Gelu", ["x"], ["a"], f"{name}/gelu", domain="com.microsoft"),
        helper.make_node("Add", ["a", "x"], ["b"], f"{name}/add"),
        helper.make_node(last, ["b"], ["out"], f"{name}/{last}", **attributes),
    ]
    return helper.make_graph(nodes, name, [], [untyped("out")])


@pytest.mark.parametrize("order", ["number first", "number last"])
def test_each_if_has_the_type_of_its_own_bodies(order: str) -> None:
    places = [branch(name, "ArgMax", axis=1, keepdims=0) for name in ("t", "e")]
    values = [branch(name, "Tanh") for name in ("t", "e")]
    ifs = [
        helper.make_node("If", ["positive"], [out], out, then_branch=then, else_branch=other)
        for out, (then, other) in (("place", places), ("value", values))
    ]
    if order == "number last":
        ifs.reverse()
    weight = numpy_helper.from_array(np.eye(8, dtype=np.float32), "w")
    after = [
        helper.make_node("MatMul", ["value", "w"], ["product"], "product"),
        helper.make_node("Gather", ["product", "place"], ["one"], "gather", axis=1),
        helper.make_node("Add", ["product", "one"], ["y"], "add"),
    ]
    graph = Graph(model([*ifs, *after], 8, weight))
    assert graph.types.type_of("place") == INT64 and graph.types.type_of("value") == FLOAT
    assert {"value", "product", "gather", "add"} <= {layer.name for layer in graph.layers}


def test_one_branch_knows_what_the_other_does_not() -> None:
    unknown = helper.make_graph(
        [helper.make_node("Gelu", ["x"], ["out"], "gelu", domain="com.microsoft")],
        "t",
        [],
        [untyped("out")],
    )
    known = helper.make_graph(
        [helper.make_node("Tanh", ["x"], ["out"], "tanh")], "e", [], [untyped("out")]
    )
    node = helper.make_node("If", ["positive"], ["y"], "if", then_branch=unknown, else_branch=known)
    assert Graph(model([node], 8)).types.type_of("y") == FLOAT


def test_a_tensor_of_a_body_is_not_a_later_one_of_its_name_outside() -> None:
    def body(name: str) -> onnx.GraphProto:
        nodes = [
            helper.make_node("Gelu", ["x"], ["v"], f"{name}/gelu", domain="com.microsoft"),
            helper.make_node("MatMul", ["v", "w"], ["o"], f"{name}/product"),
        ]
        out = helper.make_tensor_value_info("o", FLOAT, [1, 8])
        return helper.make_graph(nodes, name, [], [out])

    weight = numpy_helper.from_array(np.eye(8, dtype=np.float32), "w")
    nodes = [
        helper.make_node(
            "If", ["positive"], ["h"], "if", then_branch=body("t"), else_branch=body("e")
        ),
        helper.make_node("ArgMax", ["h"], ["v"], "place", axis=1, keepdims=0),
        helper.make_node("Gather", ["h", "v"], ["one"], "gather", axis=1),
        helper.make_node("Add", ["h", "one"], ["y"], "add"),
    ]
    made = model(nodes, 8, weight)
    graph = Graph(made)
    assert graph.types.type_of("v") == INT64
    assert graph.types.body(2, "then_branch").type_of("v") == FLOAT
    for write in (to_typed, to_emulated):
        written = write(made, PrecisionPlan(Precision.FP16))
        onnxruntime.InferenceSession(written.SerializeToString())


def test_what_a_body_computes_is_counted() -> None:
    """The same, flat and in an If: a row made into a square twice, and back into a row."""
    wide = 512

    def square(prefix: str, first: str, last: str) -> list[onnx.NodeProto]:
        p = prefix
        return [
            helper.make_node("Transpose", [first], [f"{p}c"], f"{p}transpose", perm=[1, 0]),
            helper.make_node("MatMul", [f"{p}c", first], [f"{p}s"], f"{p}outer"),
            helper.make_node("MatMul", [f"{p}s", f"{p}s"], [f"{p}q"], f"{p}square"),
            helper.make_node("MatMul", [first, f"{p}q"], [last], f"{p}back"),
        ]

    out = [helper.make_tensor_value_info(name, FLOAT, [1, wide]) for name in ("ty", "ey")]
    then = helper.make_graph(square("t", "x", "ty"), "t", [], out[:1])
    small = helper.make_graph([helper.make_node("Relu", ["x"], ["ey"], "relu")], "e", [], out[1:])
    node = helper.make_node("If", ["positive"], ["y"], "if", then_branch=then, else_branch=small)
    inside, flat = Graph(model([node], wide)), Graph(model(square("", "x", "y"), wide))
    shapes = {"x": (1, wide)}
    told = live_bytes(flat, shapes)
    assert told >= 2 * 4 * wide * wide
    assert live_bytes(inside, shapes) == pytest.approx(told, rel=0.01)
    nested = helper.make_graph([node], "n", [], [helper.make_tensor_value_info("y", FLOAT, None)])
    again = helper.make_node("If", ["positive"], ["y"], "n", then_branch=nested, else_branch=nested)
    assert inference_bytes(Graph(model([again], wide)), shapes) >= told
