"""A model as every pass and station reads it: what can be known of its graph, found out once.

Types are inferred, names made unique and constants unpacked when first asked for, and kept: a probe
that writes a plan as another model infers nothing again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from sys import intern

import onnx

from bisect_trt.core.errors import BadInputError
from bisect_trt.core.precision import Precision, PrecisionPlan
from bisect_trt.graph.model.discrete import discrete_inputs
from bisect_trt.graph.model.layers import (
    FloatSlots,
    Kind,
    Layer,
    Role,
    float_slots,
    node_names,
    role_of,
)
from bisect_trt.graph.model.lookups import Lookup, after_lookups, list_lookups
from bisect_trt.graph.model.opset import operators, raised
from bisect_trt.graph.tensors.constants import Constants
from bisect_trt.graph.tensors.operator_rules import FLOAT, QUANTISES
from bisect_trt.graph.tensors.tensor_types import Scope, infer_types, opset_of

_REDUCED = (Precision.FP16, Precision.BF16, Precision.TF32)


@dataclass(frozen=True, eq=False)
class Graph:
    """``proto`` is read only from here on: what is derived from it is remembered.
    Of a lifted source ``stored_inputs`` are what is cast from its reduced inputs, and
    ``stored_outputs`` the outputs, with their types, that it gives reduced.
    """

    proto: onnx.ModelProto
    _roles: dict[Precision, list[Role | None]] = field(default_factory=dict, init=False, repr=False)
    _slots: list[FloatSlots | None] = field(default_factory=list, init=False, repr=False)
    _raised: dict[int, Graph] = field(default_factory=dict, init=False, repr=False)
    stored_inputs: frozenset[str] = frozenset()
    stored_outputs: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The unique id of each node of the main graph, in the file's order."""
        return tuple(node_names(self.proto.graph.node))

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
        """The FP32 ones among :attr:`constants`."""
        return self.constants.of_type(FLOAT)

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The nodes that can run at FP16, BF16 or TF32, in the file's (topological) order."""
        found = []
        same: dict[frozenset[Precision], frozenset[Precision]] = {}
        for index, (node, name) in enumerate(zip(self.proto.graph.node, self.names, strict=True)):
            precisions = frozenset(p for p in _REDUCED if self.role(index, p).kind is Kind.LAYER)
            precisions = same.setdefault(precisions, precisions)
            if precisions:
                # Each access to a message makes a new string.
                outputs = tuple(
                    intern(o) for o in node.output if o and self.types.type_of(o) == FLOAT
                )
                inputs = tuple(intern(i) for i in node.input if i)
                found.append(Layer(name, node.op_type, index, outputs, inputs, precisions))
        return tuple(found)

    @cached_property
    def lookups(self) -> tuple[Lookup, ...]:
        """The first float tensors where the inputs are integers (see ``lookups``)."""
        return list_lookups(self.proto, self.layers, self.float_constants)

    @cached_property
    def discrete(self) -> frozenset[str]:
        """The float inputs that are taken for integers or truth values (see ``discrete``)."""
        return discrete_inputs(self.proto.graph, self.types)

    @cached_property
    def after_lookups(self) -> Graph:
        """The same model with :attr:`lookups` as further inputs."""
        return Graph(after_lookups(self.proto, self.lookups))

    def taking(self, inputs: Iterable[str]) -> Graph:
        """The form of the model that takes ``inputs``: itself, or where what it looks up is among
        them, :attr:`after_lookups`.
        """
        sources = {lookup.source for lookup in self.lookups}
        return self if sources.isdisjoint(inputs) else self.after_lookups

    @cached_property
    def quantised(self) -> bool:
        """Whether some node quantises or dequantises, in a body too."""
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
        roles = self._roles.get(precision)
        if roles is None:
            roles = self._roles.setdefault(precision, [None] * len(self.names))
        role = roles[index]
        if role is None:
            node = self.proto.graph.node[index]
            slots = self._slots_of(index, node)
            if node.op_type == "Cast" and node.output[0] in self.stored_inputs:
                precision = Precision.FP32  # it gives what was rounded already
            role = role_of(node, self.types, self.opset, precision, slots)
            roles[index] = role
        return role

    def _slots_of(self, index: int, node: onnx.NodeProto) -> FloatSlots:
        """The :func:`float_slots` of node ``index``, for all precisions."""
        if not self._slots:
            self._slots.extend([None] * len(self.names))
        slots = self._slots[index]
        if slots is None:
            slots = self._slots[index] = float_slots(node, self.types)
        return slots

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
            )
        return self._raised[target]

    def check_plan(self, plan: PrecisionPlan) -> None:
        """Refuse a plan of another model.

        Raises:
            BadInputError: names the first pin that is no node here.
        """
        unknown = sorted(plan.pinned.difference(self.names))
        if unknown:
            raise BadInputError(
                f"plan: pins layer {unknown[0]!r}, which the model does not have "
                f"({len(unknown)} such); `bisect-trt inspect` lists the layers"
            )


def as_graph(model: onnx.ModelProto | Graph) -> Graph:
    """``model`` itself where it is one already."""
    return model if isinstance(model, Graph) else Graph(model)


def list_layers(model: onnx.ModelProto | Graph) -> list[Layer]:
    """The layers of ``model`` in the file's order, which ONNX requires to be a topological one.

    A layer is a node with an FP32 output that can run at FP16, BF16 or TF32. Nodes that already run
    in FP16 or BF16 in the source, integer and boolean nodes, custom domains, Q/DQ and the operators
    of ``STAYS_FP32`` are none.
    """
    return list(as_graph(model).layers)
