"""Networks that several tests build."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper


def parsed(
    body: str,
    inputs: str = "float[1, 16] x",
    outputs: str = "float[1, 16] y",
    constants: str = "",
    opset: int = 17,
    **weights: NDArray[Any] | np.generic,
) -> onnx.ModelProto:
    """A model in ONNX's text form; ``weights`` are more of its ``constants``."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 9, opset_import: ["" : {opset}]>
        g ({inputs}) => ({outputs}) <{constants}> {{ {body} }}"""
    )
    stored = [numpy_helper.from_array(np.asarray(a), name) for name, a in weights.items()]
    model.graph.initializer.extend(stored)
    return model


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
