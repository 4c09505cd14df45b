"""Networks that several tests build."""

from __future__ import annotations

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from bisect_trt.model.graph import Graph


def convolutional(blocks: int = 3) -> tuple[onnx.ModelProto, dict[str, NDArray[np.float32]]]:
    """Convolutions that ONNX Runtime gives another layout, what it joins them with, and a squeeze
    and excite gate.
    """
    random = np.random.default_rng(0)
    nodes, stored, x = [], [], "x"

    def weight(name: str, *shape: int) -> str:
        stored.append(
            numpy_helper.from_array(
                (random.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32),
                name,
            )
        )
        return name

    for block in range(blocks):
        convolved, normed, gate = f"c{block}", f"n{block}", f"g{block}"
        nodes.append(
            helper.make_node(
                "Conv",
                [x, weight(f"w{block}", 16, 16, 3, 3)],
                [convolved],
                f"conv{block}",
                pads=[1, 1, 1, 1],
            )
        )
        scales = [weight(f"{k}{block}", 16) for k in ("scale", "shift", "mean")]
        stored.append(
            numpy_helper.from_array((random.random(16) + 0.5).astype(np.float32), f"var{block}")
        )
        nodes.append(
            helper.make_node(
                "BatchNormalization", [convolved, *scales, f"var{block}"], [normed], f"norm{block}"
            )
        )
        nodes.append(helper.make_node("HardSigmoid", [normed], [gate], f"gate{block}"))
        nodes.append(helper.make_node("Mul", [normed, gate], [f"m{block}"], f"swish{block}"))
        x = f"m{block}"
    nodes.append(helper.make_node("Conv", [x, weight("w_se", 16, 16, 1, 1)], ["se"], "conv_se"))
    nodes.append(helper.make_node("GlobalAveragePool", ["se"], ["pooled"], "pool"))
    nodes.append(helper.make_node("Mul", ["se", "pooled"], ["y"], "excite"))
    value = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 16, 12, 12]) for n in ("x", "y")
    ]
    graph = helper.make_graph(nodes, "g", value[:1], value[1:], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model, {"x": random.standard_normal((1, 16, 12, 12)).astype(np.float32)}


def branching(*, recurrent: bool = False) -> tuple[onnx.ModelProto, dict[str, NDArray[np.generic]]]:
    """An If, chosen by an input as in Silero VAD, whose bodies differ in rank, or hold LSTMs:
    TensorRT does not build it, ONNX Runtime runs it. Ten nodes stand before and behind.
    """
    random = np.random.default_rng(5)
    stored = [
        numpy_helper.from_array(np.asarray([0], np.int64), "axis"),
        numpy_helper.from_array(np.asarray(8000, np.int64), "rate"),
        numpy_helper.from_array(random.standard_normal((8, 8)).astype(np.float32), "w"),
    ]
    value = helper.make_tensor_value_info
    bodies = {
        "then_branch": [helper.make_node("Unsqueeze", ["h4", "axis"], ["then_out"], "raise")],
        "else_branch": [helper.make_node("Sub", ["h4", "x"], ["else_out"], "centre")],
    }
    if recurrent:
        for name in ("W", "R"):
            values = random.standard_normal((1, 32, 8)).astype(np.float32)
            stored.append(numpy_helper.from_array(values, name))
        bodies = {
            kind: [
                helper.make_node("Unsqueeze", ["h4", "axis"], [f"{kind}_in"], f"{kind}_raise"),
                helper.make_node(
                    "LSTM",
                    [f"{kind}_in", "W", "R"],
                    ["", f"{kind}_out", ""],
                    f"{kind}_lstm",
                    hidden_size=8,
                ),
            ]
            for kind in bodies
        }
    graphs = {
        kind: helper.make_graph(
            nodes, kind, [], [value(max(nodes[-1].output), TensorProto.FLOAT, None)]
        )
        for kind, nodes in bodies.items()
    }
    nodes = []
    x = "x"
    for i in range(5):
        op, more = (("MatMul", ["w"]), ("Tanh", []))[i % 2]
        nodes.append(helper.make_node(op, [x, *more], [f"h{i}"], f"before{i}"))
        x = f"h{i}"
    nodes.append(helper.make_node("Greater", ["sr", "rate"], ["fast"], "compare"))
    nodes.append(helper.make_node("If", ["fast"], ["chosen"], "choose", **graphs))
    x = "chosen"
    for i in range(5):
        op, more = (("MatMul", ["w"]), ("Sigmoid", []))[i % 2]
        nodes.append(helper.make_node(op, [x, *more], [f"a{i}"], f"after{i}"))
        x = f"a{i}"
    inputs = [value("x", TensorProto.FLOAT, [4, 8]), value("sr", TensorProto.INT64, [])]
    graph = helper.make_graph(
        nodes, "branching", inputs, [value(x, TensorProto.FLOAT, None)], stored
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    arrays = {
        "x": random.standard_normal((4, 8)).astype(np.float32),
        "sr": np.asarray(16000, np.int64),
    }
    return model, arrays


def asking_for_shapes() -> Graph:
    """As exporters write a ``reshape(batch, -1, 2)``: sizes of one tensor, in 32 bits, beside
    constants that are cast too; later layers ask for them again, and one gives them.
    """
    nodes = [
        helper.make_node("Mul", ["x", "gain"], ["loud"], "loud"),
        helper.make_node("Shape", ["loud"], ["shape"], "shape"),
        helper.make_node("Cast", ["shape"], ["shape_32"], "shape_32", to=TensorProto.INT32),
        helper.make_node("Slice", ["shape_32", "at_0", "at_1"], ["batch"], "batch"),
        helper.make_node("Constant", [], ["rest"], "rest", value_ints=[-1, 2]),
        helper.make_node("Cast", ["rest"], ["rest_32"], "rest_32", to=TensorProto.INT32),
        helper.make_node("Concat", ["batch", "rest_32"], ["to_32"], "to_32", axis=0),
        helper.make_node("Cast", ["to_32"], ["to"], "to", to=TensorProto.INT64),
        helper.make_node("Reshape", ["loud", "to"], ["pairs"], "pairs"),
        helper.make_node("MatMul", ["pairs", "turn"], ["turned"], "turned"),
        helper.make_node("Add", ["turned", "gain"], ["moved"], "moved"),
        helper.make_node("Cast", ["batch"], ["batch_64"], "batch_64", to=TensorProto.INT64),
        helper.make_node("Concat", ["batch_64", "minus"], ["flat_to"], "flat_to", axis=0),
        helper.make_node("Reshape", ["moved", "flat_to"], ["flat"], "flat"),
        helper.make_node("Sub", ["flat", "gain"], ["y"], "y"),
        helper.make_node("Identity", ["batch"], ["count"], "count"),
    ]
    constants = {
        "gain": np.float32([1.0009]),
        "turn": np.float32([[0.6, 0.8], [-0.8, 0.6]]),
        "at_0": np.int64([0]),
        "at_1": np.int64([1]),
        "minus": np.int64([-1]),
    }
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", "m"])],
        [
            helper.make_tensor_value_info("y", TensorProto.FLOAT, None),
            helper.make_tensor_value_info("count", TensorProto.INT32, None),
        ],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opset = [helper.make_opsetid("", 17)]
    return Graph(helper.make_model(graph, opset_imports=opset, ir_version=8))
