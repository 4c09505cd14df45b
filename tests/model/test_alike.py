"""Places of a model that look like given ones."""

from __future__ import annotations

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from bisect_trt.model.graph import Graph
from bisect_trt.model.patterns import nodes_alike


def model(*nodes: tuple[str, str, list[str]]) -> Graph:
    """Nodes as name, operator and inputs; each gives a tensor of its own name."""
    made = [helper.make_node(op, inputs, [name], name=name) for name, op, inputs in nodes]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])
    last = helper.make_tensor_value_info(nodes[-1][0], TensorProto.FLOAT, [2])
    graph = helper.make_graph(made, "g", [x], [last])
    opset = [helper.make_opsetid("", 17)]
    return Graph(helper.make_model(graph, opset_imports=opset, ir_version=9))


def blocks(shortcuts: list[bool]) -> Graph:
    """Residual blocks; a block adds its Tanh to another Tanh, its shortcut, or to what it got."""
    nodes: list[tuple[str, str, list[str]]] = []
    x = "x"
    for i, shortcut in enumerate(shortcuts):
        nodes += [(f"r{i}", "Relu", [x]), (f"t{i}", "Tanh", [f"r{i}"])]
        other = x
        if shortcut:
            nodes.append((f"s{i}", "Tanh", [x]))
            other = f"s{i}"
        nodes.append((f"a{i}", "Add", [f"t{i}", other]))
        x = f"a{i}"
    return model(*nodes)


def test_every_block_with_a_shortcut_is_like_the_first() -> None:
    graph = blocks([True, False, True, False])
    assert nodes_alike(graph, {"t0", "s0", "a0"}) == ("t0", "s0", "a0", "t2", "s2", "a2")


def test_a_node_alone_is_like_all_of_its_operator() -> None:
    assert nodes_alike(blocks([True, False]), {"r0"}) == ("r0", "r1")


def test_a_sum_of_the_same_twice_is_no_sum_of_two() -> None:
    graph = model(
        ("p", "Relu", ["x"]), ("q", "Relu", ["x"]), ("a", "Add", ["p", "q"]),
        ("n", "Neg", ["a"]), ("b", "Add", ["n", "a"]), ("c", "Add", ["p", "b"]),
    )  # fmt: skip
    assert nodes_alike(graph, {"p", "q", "a"}) == ("p", "q", "a")


def test_nothing_is_like_nothing() -> None:
    assert nodes_alike(blocks([True]), set()) == ()


@given(st.lists(st.booleans(), min_size=1, max_size=6), st.data())
def test_what_was_asked_about_is_found_again(shortcuts: list[bool], data: st.DataObject) -> None:
    """Whatever part it is; and asked of all that was found, no node is lost."""
    graph = blocks(shortcuts)
    names = data.draw(st.sets(st.sampled_from(graph.names)))
    found = nodes_alike(graph, names)
    assert names <= set(found)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(KeyError):
        nodes_alike(blocks([True]), {"nobody"})


def test_the_proto_is_only_read() -> None:
    graph = blocks([True, True])
    before = graph.proto.SerializeToString()
    nodes_alike(graph, {"t0", "a0"})
    assert onnx.ModelProto.FromString(before) == graph.proto
