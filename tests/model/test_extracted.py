"""A piece of a model, fed with what was recorded, gives what the whole gave: bit for bit, since
ONNX Runtime runs both as written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from bisect_trt.base.errors import RunnerFailedError
from bisect_trt.base.sample import Sample
from bisect_trt.model.graph import Graph
from bisect_trt.model.subgraph import Extractor, declare_shapes
from bisect_trt.runners.reference import Recorded, outputs_of
from fixtures.models import ALL
from tests.conftest import same
from tests.model.node_models import cases, feed_of

FLOAT = TensorProto.FLOAT
_REDUCED = {TensorProto.FLOAT16, TensorProto.BFLOAT16}


def check_piece(
    extractor: Extractor, recorded: Recorded, subgraph: frozenset[str]
) -> tuple[onnx.ModelProto, dict[str, NDArray[Any]]]:
    """The piece's model and outputs, which must be the recorded tensors."""
    border = extractor.border(subgraph)
    values = recorded.of([*border.inputs, *border.constants])
    model = extractor.extract(subgraph, values)
    found = outputs_of(model, values, "subgraph")
    declare_shapes(model, found)
    onnx.checker.check_model(model)
    taken = {v.name for v in model.graph.input}
    if not subgraph.issuperset(extractor.nodes):
        assert taken == set(border.inputs) and set(found) == set(border.outputs)
    return model, found


def check(extractor: Extractor, recorded: Recorded, kept: frozenset[str]) -> None:
    _, found = check_piece(extractor, recorded, kept)
    expected = recorded.of(found)
    for name, array in found.items():
        assert same(array, expected[name]), name


@st.composite
def graphs(draw: st.DrawFn) -> onnx.ModelProto:
    """Up to 12 nodes over tensors of one shape, with shared tensors, weights, Constants, bodies
    that capture, shape arithmetic, and outputs anywhere.
    """
    random = np.random.default_rng(draw(st.integers(0, 2**31)))
    tensors, nodes, stored = ["x", "y"], [], []
    for index in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from(["Add", "Mul", "Relu", "MatMul", "Constant", "If", "shape"]))
        a, b = draw(st.sampled_from(tensors)), draw(st.sampled_from(tensors))
        out = f"t{index}"
        if kind in ("Add", "Mul"):
            nodes.append(helper.make_node(kind, [a, b], [out], draw(st.sampled_from([out, ""]))))
        elif kind == "Relu":
            nodes.append(helper.make_node(kind, [a], [out]))
        elif kind == "MatMul":
            weight = random.standard_normal((4, 4)).astype(np.float32)
            stored.append(numpy_helper.from_array(weight, f"w{index}"))
            nodes.append(helper.make_node(kind, [a, f"w{index}"], [out], f"matmul{index}"))
        elif kind == "Constant":
            value = numpy_helper.from_array(random.standard_normal((4, 4)).astype(np.float32))
            nodes.append(helper.make_node(kind, [], [out], value=value))
        elif kind == "If":
            bodies = [
                helper.make_graph(
                    [helper.make_node(op, [name, b], [f"{out}_{op}"])],
                    op,
                    [],
                    [helper.make_tensor_value_info(f"{out}_{op}", FLOAT, [4, 4])],
                )
                for op, name in (("Sub", a), ("Add", "x"))
            ]
            nodes.append(helper.make_node("ReduceSum", [a], [f"{out}_sum"], keepdims=0))
            nodes.append(helper.make_node("Greater", [f"{out}_sum", "zero"], [f"{out}_c"]))
            nodes.append(
                helper.make_node(
                    "If", [f"{out}_c"], [out], then_branch=bodies[0], else_branch=bodies[1]
                )
            )
        else:
            nodes.append(helper.make_node("Shape", [a], [f"{out}_shape"]))
            nodes.append(helper.make_node("Identity", [f"{out}_shape"], [f"{out}_same"]))
            nodes.append(helper.make_node("Reshape", [b, f"{out}_same"], [out]))
        tensors.append(out)
    stored.append(numpy_helper.from_array(np.float32(0.0), "zero"))
    given = sorted({tensors[-1], draw(st.sampled_from(tensors[2:]))})
    values = [helper.make_tensor_value_info(n, FLOAT, [4, 4]) for n in ("x", "y")]
    results = [helper.make_tensor_value_info(n, FLOAT, [4, 4]) for n in given]
    graph = helper.make_graph(nodes, "g", values, results, stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(graphs(), st.data())
def test_pieces_of_random_graphs(
    tmp_path: Path, model: onnx.ModelProto, data: st.DataObject
) -> None:
    random = np.random.default_rng(7)
    sample = Sample("s", {n: random.standard_normal((4, 4)).astype(np.float32) for n in "xy"})
    extractor = Extractor(Graph(model))
    if not extractor.nodes:
        return
    recorded = Recorded(extractor, sample, tmp_path)
    kept = data.draw(st.sets(st.sampled_from(extractor.nodes), min_size=1))
    check(extractor, recorded, frozenset(kept))
    check(extractor, recorded, frozenset(extractor.nodes))


@pytest.mark.parametrize("make", ALL, ids=lambda f: f.__name__)
def test_pieces_of_the_fixtures(make: Any, tmp_path: Path) -> None:
    fixture = make()
    extractor = Extractor(Graph(fixture.model))
    recorded = Recorded(extractor, Sample("s", fixture.inputs), tmp_path)
    nodes = extractor.nodes
    half = len(nodes) // 2
    for kept in (nodes[:half], nodes[half:], nodes[::2], nodes[1::2], nodes[half : half + 1]):
        if kept:
            check(extractor, recorded, frozenset(kept))


@pytest.mark.slow
def test_single_nodes_of_onnx_s_backend_models(tmp_path: Path) -> None:
    """Models of several nodes, some of which are cut out alone; a node whose border is no tensor
    (sequences, optionals) cannot be.
    """
    subgraphs = refused = 0
    for problem in cases().values():
        if len(problem.model.graph.node) < 2:
            continue
        arrays = {n: a for n, a in feed_of(problem).items() if isinstance(a, np.ndarray)}
        extractor = Extractor(Graph(problem.model))
        if len(extractor.nodes) < 2 or len(arrays) < len(problem.model.graph.input):
            continue
        if _REDUCED.intersection(extractor.graph.types.types.values()):
            continue  # ONNX Runtime's CPU provider drops roundings between such nodes
        folder = tmp_path / problem.name
        folder.mkdir()
        recorded = Recorded(extractor, Sample(problem.name, arrays), folder)
        try:
            outputs_of(problem.model, arrays, problem.name)
        except RunnerFailedError:
            continue  # nothing that ONNX Runtime can run
        for node in extractor.nodes[:: max(1, len(extractor.nodes) // 3)]:
            try:
                check(extractor, recorded, frozenset({node}))
                subgraphs += 1
            except RunnerFailedError:
                refused += 1
    assert subgraphs >= 1000 and refused <= subgraphs // 50, (subgraphs, refused)


def chain() -> Extractor:
    """relu -> cast away and back -> a sum with relu's; ``count`` follows from a shape."""
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], "relu"),
        helper.make_node("Neg", ["a"], ["b"], "neg"),
        helper.make_node("Abs", ["b"], ["c"], "abs"),
        helper.make_node("Shape", ["x"], ["shape"], "shape"),
        helper.make_node("Reshape", ["c", "shape"], ["d"], "reshape"),
        helper.make_node("Add", ["d", "a"], ["e"], "add"),
    ]
    value = [helper.make_tensor_value_info(n, FLOAT, [2, 3]) for n in "xe"]
    graph = helper.make_graph(nodes, "g", value[:1], value[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return Extractor(Graph(model))


def test_the_border_of_a_piece() -> None:
    extractor = chain()
    border = extractor.border(frozenset({"neg", "abs", "reshape"}))
    assert border.inputs == ("a",) and border.constants == ("shape",) and border.outputs == ("d",)
    inner = extractor.border(frozenset({"relu", "neg"}))
    assert inner.inputs == ("x",) and inner.outputs == ("a", "b")


def test_recorded_inputs_have_concrete_shapes_and_shapes_become_constants(tmp_path: Path) -> None:
    extractor = chain()
    x = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
    recorded = Recorded(extractor, Sample("s", {"x": x}), tmp_path)
    model, found = check_piece(extractor, recorded, frozenset({"neg", "reshape"}))
    assert [v.name for v in model.graph.input] == ["a", "c"]
    assert [t.name for t in model.graph.initializer] == ["shape"]
    dims = [d.dim_value for v in model.graph.input for d in v.type.tensor_type.shape.dim]
    assert dims == [2, 3, 2, 3] and set(found) == {"b", "d"}


def test_what_bodies_read_is_an_input(tmp_path: Path) -> None:
    body = helper.make_graph(
        [helper.make_node("Sub", ["b", "x"], ["inside"])],
        "body",
        [],
        [helper.make_tensor_value_info("inside", FLOAT, [2])],
    )
    other = onnx.GraphProto.FromString(body.SerializeToString().replace(b"inside", b"beside"))
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], "relu"),
        helper.make_node("Neg", ["a"], ["b"], "neg"),
        helper.make_node("If", ["c"], ["y"], "if", then_branch=body, else_branch=other),
    ]
    inputs = [
        helper.make_tensor_value_info("x", FLOAT, [2]),
        helper.make_tensor_value_info("c", TensorProto.BOOL, []),
    ]
    result = [helper.make_tensor_value_info("y", FLOAT, [2])]
    graph = helper.make_graph(nodes, "g", inputs, result)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    extractor = Extractor(Graph(model))
    x = np.asarray([-1.0, 2.0], np.float32)
    recorded = Recorded(extractor, Sample("s", {"x": x, "c": np.asarray(True)}), tmp_path)
    assert extractor.border(frozenset({"if"})).inputs == ("c", "b", "x")
    check(extractor, recorded, frozenset({"if"}))
