"""Writes the reverse model: what each layer's own error does to the outputs, to first order.

It takes the values of one forward pass and a weight for each output element. It gives, for each
layer, the sum over all output elements of weight times effect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from bisect_trt.base.plan import Precision
from bisect_trt.model.gradient_moves import RULES_OF_ALL
from bisect_trt.model.gradient_nodes import (
    REVERSE_OPSET,
    GradientWriter,
    NoRuleError,
    Shape,
    Site,
)
from bisect_trt.model.graph import Graph
from bisect_trt.model.precision_rules import CONTROL_FLOW, FLOAT, is_standard
from bisect_trt.model.walk import captured_names

SCALES_SIZE = 8
"""The most elements of a float constant whose values a rule may need."""


@dataclass(frozen=True)
class ForwardValues:
    """What the rules need to know of a forward pass.

    Args:
        shapes: the shape of every tensor, constants included.
        integers: the values of the integer tensors.
    """

    shapes: Mapping[str, Shape]
    integers: Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class ReverseModel:
    """A reverse model with what to feed it.

    Args:
        proto: the model.
        effects: its output, of shape (layers,).
        reads: the tensors of the forward pass that it takes, under their names.
        errors: by tensor that a layer gives, the input for the layer's own error of it.
        weights: by output of the forward model, the input for the weights of its elements.
        layers: the layers in the order of the output.
        uncovered: the layers whose effects pass through an operator without a rule.
    """

    proto: onnx.ModelProto
    effects: str
    reads: tuple[str, ...]
    errors: Mapping[str, str]
    weights: Mapping[str, str]
    layers: tuple[str, ...]
    uncovered: frozenset[str]


def to_reverse(
    graph: Graph, precision: Precision, known: ForwardValues, outputs: Sequence[str]
) -> ReverseModel:
    """The reverse model of ``graph`` for inputs of one shape.

    Args:
        graph: an FP32 model.
        precision: the layers are those that can run at it.
        known: the forward pass on one sample.
        outputs: the float outputs whose elements are weighed.
    """
    return _Sweep(graph, precision, known, outputs).run()


class _Sweep:
    """Walks a graph from its last node to its first, and writes each node's gradient."""

    def __init__(
        self, graph: Graph, precision: Precision, known: ForwardValues, outputs: Sequence[str]
    ) -> None:
        self._graph = graph
        constants = graph.float_constants
        scales = {n: constants[n] for n in constants if constants[n].size <= SCALES_SIZE}
        self._to = GradientWriter(known.shapes, known.integers, scales)
        self._layers = {layer.index: layer for layer in graph.layers_at(precision)}
        self._active = self._find_active()
        self._weights = {n: f"{self._to.prefix}weight_{place}" for place, n in enumerate(outputs)}
        self._parts: dict[str, list[str]] = {n: [w] for n, w in self._weights.items()}
        # Tensors with a reader whose gradient is not known.
        self._blocked: set[str] = set()
        self._errors: dict[str, str] = {}
        self._effects: dict[str, list[str]] = {}
        self._uncovered: set[str] = set()

    def _find_active(self) -> frozenset[str]:
        """The float tensors that a layer's error reaches."""
        active: set[str] = set()
        for index, node in enumerate(self._graph.proto.graph.node):
            reads = (*node.input, *captured_names(node))
            if index in self._layers or not active.isdisjoint(reads):
                active.update(o for o in node.output if self._is_float(o))
        return frozenset(active)

    def _is_float(self, name: str) -> bool:
        return bool(name) and self._graph.types.type_of(name) == FLOAT

    def run(self) -> ReverseModel:
        """Write all nodes."""
        nodes = self._graph.proto.graph.node
        for index in reversed(range(len(nodes))):
            node = nodes[index]
            gradients = {slot: g for slot, o in enumerate(node.output) if (g := self._total(o))}
            blocked = any(o in self._blocked for o in node.output)
            if index in self._layers:
                self._take(self._layers[index].name, node, gradients, blocked)
            self._back(node, gradients, blocked)
        return self._made()

    def _total(self, name: str) -> str:
        """The gradient of a tensor, summed over its readers; '' where there is none."""
        parts = self._parts.pop(name, [])
        if len(parts) > 1:
            return self._to.op("Sum", *parts)
        return parts[0] if parts else ""

    def _take(
        self, layer: str, node: onnx.NodeProto, gradients: Mapping[int, str], blocked: bool
    ) -> None:
        """Write a layer's effect: the product of its own errors with their gradients."""
        to, terms = self._to, []
        if blocked:
            self._uncovered.add(layer)
        for slot, gradient in gradients.items():
            tensor = node.output[slot]
            if self._is_float(tensor):
                error = self._errors[tensor] = f"{to.prefix}error_{len(self._errors)}"
                # ONNX Runtime is slow at the product of a row with a column.
                product = to.times(gradient, error)
                terms.append(to.reshaped(to.op("ReduceSum", product, keepdims=0), [1]))
        if terms:
            self._effects[layer] = terms

    def _back(self, node: onnx.NodeProto, gradients: Mapping[int, str], blocked: bool) -> None:
        """Write the gradients of what ``node`` reads."""
        reads = (*node.input, *captured_names(node))
        wanted = frozenset(s for s, n in enumerate(node.input) if n in self._active)
        if blocked:
            self._blocked.update(n for n in reads if n in self._active)
        if not gradients or self._active.isdisjoint(reads):
            return
        rule = RULES_OF_ALL.get(node.op_type) if is_standard(node) else None
        written = len(self._to.nodes)
        try:
            if rule is None or node.op_type in CONTROL_FLOW:
                raise NoRuleError
            site = Site(node, self._graph.opset, self._to, gradients, wanted)
            for slot, gradient in rule(site).items():
                self._parts.setdefault(node.input[slot], []).append(gradient)
        except NoRuleError:
            del self._to.nodes[written:]
            self._blocked.update(n for n in reads if n in self._active)

    def _made(self) -> ReverseModel:
        to = self._to
        totals = [
            to.op("Sum", *terms) if len(terms) > 1 else terms[0] for terms in self._effects.values()
        ]
        if not totals:
            totals = [to.constant(np.zeros(0, np.float32))]
        effects = f"{to.prefix}effects"
        to.nodes.append(helper.make_node("Concat", totals, [effects], axis=0))
        inputs = [
            helper.make_tensor_value_info(name, self._graph.types.type_of(name), to.shapes[name])
            for name in to.reads
        ]
        for names in (self._errors, self._weights):
            inputs += [
                helper.make_tensor_value_info(given, FLOAT, to.shapes[tensor])
                for tensor, given in names.items()
            ]
        output = helper.make_tensor_value_info(effects, TensorProto.FLOAT, None)
        made = helper.make_graph(to.nodes, "reverse", inputs, [output], to.constants)
        opset = [helper.make_opsetid("", REVERSE_OPSET)]
        return ReverseModel(
            helper.make_model(made, opset_imports=opset, ir_version=8),
            effects,
            tuple(to.reads),
            self._errors,
            self._weights,
            tuple(self._effects),
            frozenset(self._uncovered),
        )
