"""The graph that passes read: nodes, tensors, types, layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from sys import intern
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from bisect_trt.base.errors import BadInputError
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.model.layers import Kind, Layer, Role, node_names, role_of
from bisect_trt.model.lookups import Lookup, after_lookups, discrete_inputs, list_lookups
from bisect_trt.model.opsets import raised
from bisect_trt.model.precision_rules import FLOAT, QUANTISES
from bisect_trt.model.tensor_types import Scope, infer_types
from bisect_trt.model.tensor_values import Constants
from bisect_trt.model.walk import operators, opset_of

_REDUCED = (Precision.FP16, Precision.BF16, Precision.TF32)


@dataclass(frozen=True)
class ExactConstant:
    """The FP32 ``values`` of a constant that was rounded to fit, together with ``layer``."""

    layer: str
    values: NDArray[np.float32] = field(repr=False, compare=False)


@dataclass(frozen=True, eq=False)
class Graph:
    """A model with what is derived from it; ``proto`` must not change any more.

    For a lifted model, ``stored_inputs`` are the FP32 casts of its reduced inputs and
    ``stored_outputs`` its reduced outputs with their types. ``exact_constants`` are what constants
    rounded to fit were before, by name: where their layer stays in FP32, these values are read.
    ``derived`` is a memo of other modules.
    """

    proto: onnx.ModelProto
    stored_inputs: frozenset[str] = frozenset()
    stored_outputs: Mapping[str, int] = field(default_factory=dict)
    exact_constants: Mapping[str, ExactConstant] = field(default_factory=dict, repr=False)
    derived: dict[str, Any] = field(default_factory=dict, init=False, repr=False)
    _roles: dict[tuple[int, Precision], Role] = field(default_factory=dict, init=False, repr=False)
    _raised: dict[int, Graph] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The unique id of each node of the main graph, in the file's order."""
        return tuple(node_names(self.proto.graph.node))

    def named_nodes(self) -> Iterator[tuple[onnx.NodeProto, str]]:
        """The nodes of the main graph with their ids, in the file's order."""
        return zip(self.proto.graph.node, self.names, strict=True)

    @cached_property
    def types(self) -> Scope:
        """The element type of every tensor, bodies included."""
        return infer_types(self.proto)

    @cached_property
    def opset(self) -> int:
        """The version of the standard operators."""
        return opset_of(self.proto)

    @cached_property
    def constants(self) -> Constants:
        """Every constant tensor of the main graph by name: initialisers and Constant nodes."""
        return Constants(self.proto.graph)

    @cached_property
    def float_constants(self) -> Constants:
        """The constants of type FP32."""
        return self.constants.of_type(FLOAT)

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The nodes that can run at FP16, BF16 or TF32, in the file's order."""
        found = []
        for index, (node, name) in enumerate(self.named_nodes()):
            precisions = frozenset(p for p in _REDUCED if self.role(index, p).kind is Kind.LAYER)
            if precisions:
                # Interned, because each access to a message makes a new string.
                outputs = tuple(
                    intern(o) for o in node.output if o and self.types.type_of(o) == FLOAT
                )
                inputs = tuple(intern(i) for i in node.input if i)
                found.append(Layer(name, node.op_type, index, outputs, inputs, precisions))
        return tuple(found)

    @cached_property
    def lookups(self) -> tuple[Lookup, ...]:
        """The first float tensors computed from integer inputs."""
        return list_lookups(self.proto, self.layers, self.float_constants)

    @cached_property
    def discrete(self) -> frozenset[str]:
        """The float inputs that become integers or truth values."""
        return discrete_inputs(self.proto.graph, self.types)

    @cached_property
    def after_lookups(self) -> Graph:
        """The same model with :attr:`lookups` as further inputs."""
        proto = after_lookups(self.proto, self.lookups)
        return Graph(proto, exact_constants=self.exact_constants)

    def taking(self, inputs: Iterable[str]) -> Graph:
        """The form of the model that takes ``inputs``: itself, or :attr:`after_lookups`."""
        sources = {lookup.source for lookup in self.lookups}
        return self if sources.isdisjoint(inputs) else self.after_lookups

    @cached_property
    def quantised(self) -> bool:
        """Whether a node, in a body too, quantises or dequantises."""
        return not QUANTISES.isdisjoint(operators(self.proto.graph.node))

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """The names of the graph's outputs."""
        return tuple(o.name for o in self.proto.graph.output)

    def layers_at(self, precision: Precision) -> tuple[Layer, ...]:
        """The layers that can run at ``precision``."""
        return tuple(layer for layer in self.layers if precision in layer.precisions)

    def role(self, index: int, precision: Precision) -> Role:
        """What node ``index`` of the main graph may do at ``precision``."""
        # Asked for every plan: schemas are looked up once.
        key = (index, precision)
        if key not in self._roles:
            node = self.proto.graph.node[index]
            if node.op_type == "Cast" and node.output[0] in self.stored_inputs:
                precision = Precision.FP32  # its values come from a reduced input
            self._roles[key] = role_of(node, self.types, self.opset, precision)
        return self._roles[key]

    def raised(self, target: int) -> Graph:
        """The same model at opset ``target``.

        Raises:
            BadInputError: ONNX's converter cannot do it.
        """
        if target not in self._raised:
            self._raised[target] = Graph(
                raised(self.proto, target),
                stored_inputs=self.stored_inputs,
                stored_outputs=self.stored_outputs,
                exact_constants=self.exact_constants,
            )
        return self._raised[target]

    def with_constants(self, constants: Mapping[str, NDArray[np.float32]]) -> Graph:
        """The same model with other values of some constants, under the same names."""
        model = onnx.ModelProto()
        model.CopyFrom(self.proto)
        for tensor in model.graph.initializer:
            if tensor.name in constants:
                tensor.CopyFrom(numpy_helper.from_array(constants[tensor.name], tensor.name))
        for node in model.graph.node:
            if node.op_type == "Constant" and node.output[0] in constants:
                del node.attribute[:]
                value = numpy_helper.from_array(constants[node.output[0]])
                node.attribute.append(onnx.helper.make_attribute("value", value))
        return replace(self, proto=model)

    def settled(self, plan: PrecisionPlan) -> Graph:
        """The same model with the constants that ``plan`` asks for, and no other values of them."""
        if not self.exact_constants:
            return self
        exact = {
            name: constant.values
            for name, constant in self.exact_constants.items()
            if not plan.precision_of(constant.layer).is_storage
        }
        return replace(self.with_constants(exact), exact_constants={})

    def check_plan(self, plan: PrecisionPlan) -> None:
        """Refuses a plan of another model."""
        unknown = sorted(plan.pinned.difference(self.names))
        if unknown:
            raise BadInputError(
                f"plan: pins layer {unknown[0]!r}, which the model does not have "
                f"({len(unknown)} such); `bisect-trt inspect` lists the layers"
            )


def as_graph(model: onnx.ModelProto | Graph) -> Graph:
    """``model`` as a :class:`Graph`."""
    return model if isinstance(model, Graph) else Graph(model)


def list_layers(model: onnx.ModelProto | Graph) -> list[Layer]:
    """The layers of ``model`` in the file's order, which is topological.

    A layer is a node with an FP32 output that can run at FP16, BF16 or TF32. Integer nodes, custom
    domains, Q/DQ and operators that are never reduced are none.
    """
    return list(as_graph(model).layers)
