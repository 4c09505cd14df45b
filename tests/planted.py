"""Engines that are wrong where we say so: ONNX Runtime, with a pattern of the model rewritten.

They stand in for an engine whose fused kernel is wrong: the pattern is fused only where nothing
looks at the tensors inside it, as an engine's optimiser would.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.model.graph import Graph
from bisect_trt.runners.base import Repeated
from bisect_trt.runners.reference import outputs_of

PATTERN = ("Conv", "Relu", "Add")
RUNS = 6


def fused(model: onnx.ModelProto) -> list[list[onnx.NodeProto]]:
    """Each chain of ``PATTERN`` whose inner tensors have one reader and are no outputs."""
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in model.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    outputs = {o.name for o in model.graph.output}
    found = []
    for node in model.graph.node:
        chain = [node]
        while len(chain) < len(PATTERN) and chain[-1].op_type == PATTERN[len(chain) - 1]:
            given = chain[-1].output[0]
            if given in outputs or len(readers.get(given, [])) != 1:
                break
            chain.append(readers[given][0])
        if tuple(n.op_type for n in chain) == PATTERN:
            found.append(chain)
    return found


def with_wrong_kernel(model: onnx.ModelProto, by: float) -> onnx.ModelProto:
    """A copy in which each fused chain's convolution is off by a factor of 1 + ``by``."""
    wrong = onnx.ModelProto()
    wrong.CopyFrom(model)
    chains = fused(wrong)
    if not chains:
        return wrong
    wrong.graph.initializer.append(numpy_helper.from_array(np.float32(1.0 + by), "planted"))
    for number, (conv, _, _) in enumerate(chains):
        right = f"planted_{number}"
        scaled = helper.make_node("Mul", [right, "planted"], [conv.output[0]])
        place = list(wrong.graph.node).index(conv)
        conv.output[0] = right
        wrong.graph.node.insert(place + 1, scaled)
    return wrong


class PlantedRunner:
    """Wrong in every run, wherever the pattern is fused; each object is a fresh process.

    Args:
        graph: an FP32 model.
        samples: not looked at before they are run.
    """

    name = "planted"
    versions: Mapping[str, str] = {"planted": "1"}
    opened = 0
    error = 0.05

    def __init__(self, graph: Graph, samples: Sequence[Sample]) -> None:
        type(self).opened += 1
        self._graph = graph

    def outputs(
        self, plan: PrecisionPlan, samples: Sequence[Sample]
    ) -> Iterator[Mapping[str, NDArray[Any]]]:
        for sample in samples:
            wrong = with_wrong_kernel(self._graph.proto, self.error)
            yield Repeated(outputs_of(wrong, sample.arrays, "planted"), RUNS)

    def takes(self, sample: Sample) -> bool:
        return True

    def facts(self, plan: PrecisionPlan) -> Mapping[str, Any]:
        return {}

    def close(self) -> None:
        pass


def not_reproducible(share: float, seed: int) -> type[PlantedRunner]:
    """A runner whose fused kernel is wrong in ``share`` of the processes, there in 2 runs of 6."""
    chance = random.Random(seed)

    class Unsteady(PlantedRunner):
        opened = 0

        def outputs(
            self, plan: PrecisionPlan, samples: Sequence[Sample]
        ) -> Iterator[Mapping[str, NDArray[Any]]]:
            bad_process = chance.random() < share
            for sample in samples:
                right = outputs_of(self._graph.proto, sample.arrays, "planted")
                wrong = outputs_of(
                    with_wrong_kernel(self._graph.proto, 0.05), sample.arrays, "planted"
                )
                differs = any(not np.array_equal(right[n], wrong[n]) for n in right)
                yield Repeated(right, RUNS, [(wrong, 2)] if bad_process and differs else ())

    return Unsteady


def residual(
    blocks: int, planted: Sequence[int], *, channels: int = 4, size: int = 6
) -> tuple[onnx.ModelProto, dict[str, NDArray[np.float32]]]:
    """A network of ``blocks``, four nodes each; Conv, Relu, Add stand together in the ``planted``
    ones, elsewhere Conv, Add, Relu.
    """
    copied = np.random.default_rng(blocks)
    nodes, stored, x = [], [], "x"
    for b in range(blocks):
        shape = (channels, channels, 3, 3)
        weight = copied.standard_normal(shape) / np.sqrt(9 * channels)
        stored.append(numpy_helper.from_array(weight.astype(np.float32), f"w{b}"))
        order = ("Relu", "Add") if b in planted else ("Add", "Relu")
        nodes.append(
            helper.make_node("Conv", [x, f"w{b}"], [f"c{b}"], f"conv{b}", pads=[1, 1, 1, 1])
        )
        given = f"c{b}"
        for op in order:
            taken = [given, x] if op == "Add" else [given]
            given = f"{op.lower()}{b}_out"
            nodes.append(helper.make_node(op, taken, [given], f"{op.lower()}{b}"))
        nodes.append(helper.make_node("Tanh", [given], [f"t{b}"], f"tanh{b}"))
        x = f"t{b}"
    value = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, channels, size, size])
        for n in ("x", x)
    ]
    graph = helper.make_graph(nodes, "residual", value[:1], value[1:], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return model, {"x": copied.standard_normal((1, channels, size, size)).astype(np.float32)}
