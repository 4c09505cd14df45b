"""One session executes every plan: its switches branch on the CPU, and select on a GPU."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from bisect_trt.base.plan import Precision
from bisect_trt.base.sample import Sample
from bisect_trt.model.graph import Graph
from bisect_trt.runners.constants import ConstantStore
from bisect_trt.runners.device import Device
from bisect_trt.runners.emulator import SwitchedSession

BLOCKS, WIDTH = 24, 16
PAIRS = [
    (Precision.FP16, Precision.FP32),
    (Precision.FP16, Precision.TF32),
    (Precision.BF16, Precision.FP32),
    (Precision.TF32, Precision.FP32),
]


@cache
def network(blocks: int = BLOCKS) -> Graph:
    """Residual blocks with a skip over all of them, a shape that follows from the input, a constant
    that all read, an If that captures a tensor of an earlier block, and an input that nobody reads.
    """
    random = np.random.default_rng(0)
    nodes: list[onnx.NodeProto] = []
    weights = [numpy_helper.from_array(np.float32([1.5]), "shared")]

    def add(op: str, *inputs: str, **attributes: object) -> str:
        name = f"t{len(nodes)}"
        nodes.append(helper.make_node(op, inputs, [name], f"/n{len(nodes)}", **attributes))
        return name

    def weight(*shape: int) -> str:
        array = random.standard_normal(shape).astype(np.float32) * np.float32(0.3)
        weights.append(numpy_helper.from_array(array, f"w{len(weights)}"))
        return weights[-1].name

    x = first = add("Add", "x", weight(WIDTH))
    shape = add("Shape", "x")
    for block in range(blocks):
        y = add("Mul", add("Tanh", add("MatMul", x, weight(WIDTH, WIDTH))), "shared")
        x = add("Reshape", add("Add", x, y), shape)
        if block == blocks // 2:
            branch = [helper.make_node("Mul", [x, first], ["inside"], "inner")]
            outputs = [helper.make_tensor_value_info("inside", TensorProto.FLOAT, None)]
            body = helper.make_graph(branch, "b", [], outputs)
            other = helper.make_graph(
                [helper.make_node("Identity", [x], ["outside"])],
                "c",
                [],
                [helper.make_tensor_value_info("outside", TensorProto.FLOAT, None)],
            )
            x = add("If", "flag", then_branch=body, else_branch=other)
    last = add("Concat", x, first, axis=1)
    info = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", WIDTH]),
        helper.make_tensor_value_info("flag", TensorProto.BOOL, []),
        helper.make_tensor_value_info("unread", TensorProto.INT64, [1]),
    ]
    given_out = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in (last, y)]
    graph = helper.make_graph(nodes, "g", info, given_out, weights)
    opset = [helper.make_opsetid("", 17)]
    return Graph(helper.make_model(graph, opset_imports=opset, ir_version=8))


def sample(seed: int) -> Sample:
    random = np.random.default_rng(seed)
    x = random.standard_normal((3, WIDTH)).astype(np.float32)
    return Sample(f"s{seed}", {"x": x, "flag": np.array(seed % 2 == 0), "unread": np.array([1])})


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return {n: a.tobytes() for n, a in one.items()} == {n: a.tobytes() for n, a in other.items()}


def layers() -> list[str]:
    return [layer.name for layer in network().layers]


@pytest.mark.parametrize(("low", "pin"), PAIRS)
def test_switches_that_select_give_what_those_that_branch_give(
    low: Precision, pin: Precision
) -> None:
    """As on a GPU."""
    graph = network()
    device = Device(name="planted")
    selects = SwitchedSession(graph, ConstantStore(graph, device), low, pin, device=device)
    branches = SwitchedSession(graph, ConstantStore(graph), low, pin)
    for reduced in (frozenset(layers()[::2]), frozenset(layers()), frozenset[str]()):
        assert same(selects.run(sample(7), reduced), branches.run(sample(7), reduced))


@pytest.mark.parametrize("precisions", PAIRS, ids=str)
@pytest.mark.parametrize("between", [TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.INT32])
def test_casts_that_undo_each_other_are_read_by_bodies(
    precisions: tuple[Precision, Precision], between: int
) -> None:
    """ONNX Runtime takes the second away where the first reads an input of its session."""
    text = f"""
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[n, 4] x) => (float[n, 4] y) {{
            there = Cast <to = {between}> (x)
            back = Cast <to = 1> (there)
            y = Tanh(back)
        }}
    """
    graph = Graph(onnx.parser.parse_model(text))
    x = Sample("s", {"x": np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)})
    device = Device(name="planted")
    selects = SwitchedSession(graph, ConstantStore(graph, device), *precisions, device=device)
    branches = SwitchedSession(graph, ConstantStore(graph), *precisions)
    back = x.arrays["x"].astype(helper.tensor_dtype_to_np_dtype(between)).astype(np.float32)
    exact = branches.run(x, frozenset())["y"]
    assert np.allclose(exact, np.tanh(back), atol=1e-3)
    for reduced in (frozenset[str](), frozenset(layer.name for layer in graph.layers)):
        assert same(selects.run(x, reduced), branches.run(x, reduced))
