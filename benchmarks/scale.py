"""Does the graph stage grow linearly? A generated stack of nodes, once and doubled."""

from __future__ import annotations

import time

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.graph import list_layers, to_emulated, to_typed


def stack(nodes: int) -> onnx.ModelProto:
    """``nodes`` alternating Add, Relu and Mul, every third with a weight of its own."""
    made, weights, last = [], [], "x"
    for index in range(nodes):
        op = ("Add", "Relu", "Mul")[index % 3]
        inputs = [last]
        if op != "Relu":
            weights.append(numpy_helper.from_array(np.full(8, 0.999, np.float32), f"w{index}"))
            inputs.append(f"w{index}")
        last = f"t{index}"
        made.append(helper.make_node(op, inputs, [last], f"/block{index // 9}/{op}_{index}"))
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 8]) for n in ("x", last)]
    graph = helper.make_graph(made, "stack", info[:1], info[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def seconds_for(nodes: int) -> float:
    """Seconds of the processor, of which one core is used, for list_layers, to_typed and
    to_emulated with half of the layers pinned.
    """
    model = stack(nodes)
    began = time.process_time()
    layers = [layer.name for layer in list_layers(model)]
    plan = PrecisionPlan("fp16", layers[::2])
    to_typed(model, plan)
    to_emulated(model, plan)
    return time.process_time() - began


def report() -> list[str]:
    """20,000 nodes under 60 s, twice the nodes at most 2.2 times as long; the best of three runs
    each, in turn.
    """
    seconds_for(1000)
    sizes = (20_000, 40_000)
    small, large = map(min, zip(*([seconds_for(n) for n in sizes] for _ in range(3)), strict=True))
    return [
        "## The graph stage grows linearly (limits: 60 s, ratio 2.2)",
        "",
        "| nodes | list_layers + to_typed + to_emulated, s |",
        "| --- | --- |",
        f"| 20,000 | {small:.2f} |",
        f"| 40,000 | {large:.2f} |",
        f"| ratio | {large / small:.2f} |",
    ]
