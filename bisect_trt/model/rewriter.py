"""The base class of the writers of typed and emulated models.

It walks nodes and bodies, and owns fresh names, scopes, constants, and the rule that a tensor is
converted once for each precision. A subclass says what reducing a node means.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import onnx
from onnx import AttributeProto

from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.model.graph import Graph
from bisect_trt.model.inputs import name_placeholder_dims
from bisect_trt.model.layers import Kind, Role, node_names, role_of
from bisect_trt.model.precision_rules import FLOAT, TYPE_AGNOSTIC, is_standard
from bisect_trt.model.tensor_types import Scope
from bisect_trt.model.tensor_values import Constants, rounded_tensor
from bisect_trt.model.walk import drop_unread, every_node, fed_inputs, tensor_names, without_graph


@dataclass
class Frame:
    """One graph being written, and the versions of its tensors.

    ``state`` holds the precision of each tensor that is not FP32, ``versions`` the name of each
    converted (tensor, precision), ``converted`` the constants that have versions.
    """

    scope: Scope
    graph: onnx.GraphProto
    parent: Frame | None
    state: dict[str, Precision] = field(default_factory=dict)
    versions: dict[tuple[str, Precision], str] = field(default_factory=dict)
    constants: Constants = field(default_factory=lambda: Constants(onnx.GraphProto()))
    outputs: frozenset[str] = frozenset()
    converted: set[str] = field(default_factory=set)

    def owner(self, name: str) -> Frame:
        """The frame that defines ``name``."""
        # A body may use a name of an outer tensor for its own, which hides it from there on.
        frame: Frame | None = self
        while frame is not None:
            if name in frame.scope.types:
                return frame
            frame = frame.parent
        return self


Chooser = Callable[[str], Precision]


class Rewriter(ABC):
    """Writes a new model under a plan; the source model stays unchanged."""

    def __init__(self, graph: Graph, plan: PrecisionPlan) -> None:
        self.source = graph
        self.plan = plan
        self._used: set[str] = set()
        self._numbers: dict[str, int] = {}

    @abstractmethod
    def convert(self, frame: Frame, name: str, precision: Precision) -> str:
        """Adds the nodes that convert a tensor to ``precision``, and returns the new name."""

    @abstractmethod
    def stored_as(self, precision: Precision) -> int:
        """The element type of a constant that is rounded to ``precision``."""

    @abstractmethod
    def write(self, node: onnx.NodeProto, role: Role, precision: Precision, frame: Frame) -> None:
        """Appends the reduced ``node`` to ``frame``."""

    def rewrite(self) -> onnx.ModelProto:
        """The new model, with unique names, named dimensions, and no value_info."""
        source = self.source.proto
        # Before version 4 of the format, every initialiser had to be an input too.
        target = without_graph(source, min_ir_version=4)
        for name in ("producer_name", "producer_version", "domain", "doc_string"):
            setattr(target, name, getattr(source, name))
        target.model_version = source.model_version
        target.metadata_props.extend(source.metadata_props)
        self.claim_names()
        self._graph(
            source.graph,
            target.graph,
            self.source.types,
            parent=None,
            choose=self.plan.precision_of,
            body_precision=None,
        )
        name_placeholder_dims(target.graph)
        return target

    def claim_names(self) -> None:
        """Makes :meth:`fresh` avoid every name of the model."""
        graph = self.source.proto.graph
        self._used = tensor_names(graph).union(node.name for node in every_node(graph.node))

    def rewrite_node(
        self, index: int, node: onnx.NodeProto, name: str, frame: Frame, precision: Precision
    ) -> None:
        """Appends one node, rewritten to ``precision``, to ``frame``."""
        self._node(index, node, name, frame, lambda _: precision)

    def read(self, frame: Frame, name: str, precision: Precision) -> str:
        """The name of the source tensor ``name`` at ``precision``, which is converted if needed."""
        # The owner converts its tensors, so that several bodies share one version.
        owner = frame.owner(name)
        existing = owner.versions.get((name, precision))
        if existing is not None:
            return existing
        if owner.state.get(name, Precision.FP32) is precision:
            return name
        if name in owner.constants:
            version = self.fresh(f"{name}__{precision}")
            # ONNX Runtime takes external values for initialisers of the main graph only.
            tensor = owner.constants.tensor(name) if owner.parent is None else None
            stored = self.stored_as(precision)
            owner.graph.initializer.append(
                rounded_tensor(
                    tensor,
                    owner.constants,
                    source=name,
                    name=version,
                    precision=precision,
                    elem_type=stored,
                )
            )
            owner.converted.add(name)
        else:
            version = self.convert(owner, name, precision)
        # Each tensor is converted at most once for each precision.
        owner.versions[(name, precision)] = version
        return version

    def fresh(self, stem: str) -> str:
        """A tensor or node name that nothing in the model uses yet."""
        # Continues the numbers of each stem: one constant may have thousands of versions.
        name, number = stem, self._numbers.get(stem, 0)
        while name in self._used:
            number += 1
            name = f"{stem}_{number}"
        self._numbers[stem] = number
        self._used.add(name)
        return name

    def _graph(
        self,
        source: onnx.GraphProto,
        target: onnx.GraphProto,
        scope: Scope,
        *,
        parent: Frame | None,
        choose: Chooser,
        body_precision: Precision | None,
    ) -> None:
        target.name, target.doc_string = source.name or "graph", source.doc_string
        target.input.extend(fed_inputs(source))
        target.output.extend(source.output)
        target.initializer.extend(source.initializer)
        target.sparse_initializer.extend(source.sparse_initializer)
        target.metadata_props.extend(source.metadata_props)
        frame = Frame(scope, target, parent, outputs=frozenset(o.name for o in source.output))
        # Constants of the main graph are unpacked once for all plans; bodies rarely have any.
        main = parent is None
        frame.constants = self.source.float_constants if main else Constants(source).of_type(FLOAT)
        if body_precision is not None:
            for value in target.input:
                if scope.type_of(value.name) == FLOAT:
                    self.enter_input(frame, value, body_precision)
        names = self.source.names if main else node_names(source.node)
        for index, (node, name) in enumerate(zip(source.node, names, strict=True)):
            self._node(index, node, name, frame, choose)
        if body_precision is not None:
            for output in target.output:
                if scope.type_of(output.name) == FLOAT:
                    self.leave_output(frame, output, body_precision)
        # The FP32 form of a constant goes if only its other versions are read.
        drop_unread(target, frame.converted)

    def _node(
        self, index: int, node: onnx.NodeProto, name: str, frame: Frame, choose: Chooser
    ) -> None:
        precision = choose(name)
        role = (
            self.source.role(index, precision)
            if frame.parent is None
            else role_of(node, frame.scope, self.source.opset, precision)
        )
        reduced = role.kind is Kind.LAYER
        new = onnx.NodeProto()
        new.CopyFrom(node)
        # Under its unique id, because engines report layers by the names of nodes.
        new.name = name
        reads_values = node.op_type not in TYPE_AGNOSTIC or not is_standard(node)
        for slot in role.float_in if reads_values else ():
            wanted = precision if reduced and slot in role.reduced_in else Precision.FP32
            new.input[slot] = self.read(frame, new.input[slot], wanted)
        inner = precision if reduced else Precision.FP32
        # Control flow, SequenceMap and custom operators have bodies.
        for attribute in new.attribute:
            if attribute.type == AttributeProto.GRAPH:
                self._body(index, attribute, frame, inner, bool(role.reduced_out))
        if reduced:
            self.write(new, role, precision, frame)
        else:
            self.append(new, role, frame)

    def append(self, node: onnx.NodeProto, role: Role, frame: Frame) -> None:
        """Appends a node with its final inputs and outputs to ``frame``."""
        frame.graph.node.append(node)

    def _body(
        self,
        index: int,
        attribute: AttributeProto,
        frame: Frame,
        precision: Precision,
        reduces_borders: bool,
    ) -> None:
        # ``attribute`` belongs to the new node, whose body is written from a copy of the old one.
        source = onnx.GraphProto()
        source.CopyFrom(attribute.g)
        attribute.g.Clear()
        scope = frame.scope.body(index, attribute.name)
        self._graph(
            source,
            attribute.g,
            scope,
            parent=frame,
            choose=lambda _: precision,
            body_precision=precision if reduces_borders else None,
        )

    def enter_input(self, frame: Frame, value: onnx.ValueInfoProto, precision: Precision) -> None:
        """Makes a reduced body take its input ``value`` at ``precision``."""
        frame.state[value.name] = precision

    def leave_output(self, frame: Frame, output: onnx.ValueInfoProto, precision: Precision) -> None:
        """Makes a reduced body return ``output`` at ``precision``."""
        output.name = self.read(frame, output.name, precision)
