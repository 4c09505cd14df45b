"""What the typed and the emulated model share: node by node, body by body, one decision a node.

A subclass says what reducing a node means: another type, or explicit roundings. The rewriter owns
fresh names, scopes, constants, and that a tensor is converted once for each precision.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import onnx
from onnx import AttributeProto

from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.model.graph import Graph, drop_unread
from bisect_trt.model.inputs import name_placeholder_dims
from bisect_trt.model.layers import Kind, Role, node_names, role_of
from bisect_trt.model.precision_rules import FLOAT
from bisect_trt.model.tensor_types import Scope, subgraphs
from bisect_trt.model.tensor_values import Constants, rounded_tensor


@dataclass
class Frame:
    """One graph being written, and the versions of its tensors.

    ``state`` says at which precision a tensor already is; absent means FP32. ``versions`` maps
    (tensor, precision) to the name under which that version can be read.
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
        frame: Frame | None = self
        while frame is not None:
            if name in frame.scope.types:
                return frame
            frame = frame.parent
        return self


Chooser = Callable[[str], Precision]


class Rewriter(ABC):
    """Writes a new model under a plan; the source model is read only."""

    def __init__(self, graph: Graph, plan: PrecisionPlan) -> None:
        self.source = graph
        self.plan = plan
        self._used: set[str] = set()
        self._numbers: dict[str, int] = {}

    @abstractmethod
    def chosen(self, precision: Precision) -> Precision:
        """What a layer planned at ``precision`` runs in: types, for one, cannot express TF32."""

    @abstractmethod
    def convert(self, frame: Frame, name: str, precision: Precision) -> str:
        """Add the nodes that make another version of a tensor."""

    @abstractmethod
    def stored_as(self, precision: Precision) -> int:
        """ONNX's type of a constant that is rounded to ``precision``."""

    @abstractmethod
    def write(self, node: onnx.NodeProto, role: Role, precision: Precision, frame: Frame) -> None:
        """Append the reduced ``node`` to ``frame``."""

    @abstractmethod
    def enter_body(self, frame: Frame, precision: Precision) -> None:
        """Adapt the float inputs of a reduced body."""

    def rewrite(self) -> onnx.ModelProto:
        """The new model: names unique, stale shapes dropped, placeholder dimensions named."""
        source = self.source.proto
        target = onnx.ModelProto(ir_version=max(source.ir_version, 4))
        for name in ("producer_name", "producer_version", "domain", "doc_string"):
            setattr(target, name, getattr(source, name))
        target.model_version = source.model_version
        target.opset_import.extend(source.opset_import)
        target.functions.extend(source.functions)
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
        """Let :meth:`fresh` avoid every name of the model."""
        self._collect_names(self.source.proto.graph)

    def share_names(self, other: Rewriter) -> None:
        """Take fresh names from the same pool as ``other``, which writes into the same model."""
        self._used, self._numbers = other._used, other._numbers

    def rewrite_node(self, index: int, node: onnx.NodeProto, name: str, frame: Frame) -> None:
        """Append what one node becomes to ``frame``."""
        self._node(index, node, name, frame, self.plan.precision_of)

    def read(self, frame: Frame, name: str, precision: Precision) -> str:
        """The name under which the FP32 source tensor ``name`` can be read at ``precision``."""
        owner = frame.owner(name)
        known = owner.versions.get((name, precision))
        if known is not None:
            return known
        if owner.state.get(name, Precision.FP32) is precision:
            return name
        if name in owner.constants:
            version = self.fresh(f"{name}__{precision}")
            # Of a body's weights ONNX Runtime cannot be handed the values apart.
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
        owner.versions[(name, precision)] = version
        return version

    def fresh(self, stem: str) -> str:
        """A tensor or node name that nothing in the model uses yet."""
        # Thousands of nodes may read one constant, and each has a version of its own.
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
        initialised = {t.name for t in source.initializer}
        target.input.extend(i for i in source.input if i.name not in initialised)
        target.output.extend(source.output)
        target.initializer.extend(source.initializer)
        target.sparse_initializer.extend(source.sparse_initializer)
        target.quantization_annotation.extend(source.quantization_annotation)
        target.metadata_props.extend(source.metadata_props)
        frame = Frame(scope, target, parent, outputs=frozenset(o.name for o in source.output))
        main = parent is None
        frame.constants = self.source.float_constants if main else Constants(source).of_type(FLOAT)
        if body_precision is not None:
            self.enter_body(frame, body_precision)
        names = self.source.names if main else node_names(source.node)
        for index, (node, name) in enumerate(zip(source.node, names, strict=True)):
            self._node(index, node, name, frame, choose)
        if body_precision is not None:
            self._leave_body(frame, body_precision)
        drop_unread(target, frame.converted)

    def _node(
        self, index: int, node: onnx.NodeProto, name: str, frame: Frame, choose: Chooser
    ) -> None:
        precision = self.chosen(choose(name))
        role = (
            self.source.role(index, precision)
            if frame.parent is None
            else role_of(node, frame.scope, self.source.opset, precision)
        )
        reduced = role.kind is Kind.LAYER
        new = onnx.NodeProto()
        new.CopyFrom(node)
        new.name = name
        for slot in role.float_in:
            wanted = precision if reduced and slot in role.reduced_in else Precision.FP32
            new.input[slot] = self.read_slot(frame, new, slot, wanted)
        inner = precision if reduced else Precision.FP32
        # Bodies of control flow, of SequenceMap and of custom operators.
        for attribute in new.attribute:
            if attribute.type == AttributeProto.GRAPH:
                self._body(index, attribute, frame, inner, bool(role.reduced_out))
        if reduced:
            self.write(new, role, precision, frame)
        else:
            self.append(new, role, frame)

    def append(self, node: onnx.NodeProto, role: Role, frame: Frame) -> None:
        """Append a node with its final inputs and outputs to ``frame``."""
        frame.graph.node.append(node)

    def read_slot(self, frame: Frame, node: onnx.NodeProto, slot: int, wanted: Precision) -> str:
        """What ``node`` reads at ``slot``; slots whose type does not matter may be left alone."""
        return self.read(frame, node.input[slot], wanted)

    def _body(
        self,
        index: int,
        attribute: AttributeProto,
        frame: Frame,
        precision: Precision,
        reduces_borders: bool,
    ) -> None:
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

    def _leave_body(self, frame: Frame, precision: Precision) -> None:
        for output in frame.graph.output:
            if frame.scope.type_of(output.name) == FLOAT:
                self.leave_output(frame, output, precision)

    def leave_output(self, frame: Frame, output: onnx.ValueInfoProto, precision: Precision) -> None:
        """Let a reduced body give ``output`` at ``precision``."""
        output.name = self.read(frame, output.name, precision)

    def _collect_names(self, graph: onnx.GraphProto) -> None:
        self._used.update(i.name for i in graph.input)
        self._used.update(t.name for t in graph.initializer)
        for node in graph.node:
            self._used.add(node.name)
            self._used.update(node.output)
            for _, body in subgraphs(node):
                self._collect_names(body)
