"""Lifts a model that is FP16 or BF16 already to FP32, so that its own roundings can be judged.

ONNX Runtime's CPU provider drops the roundings between FP16 nodes. In the lifted model every tensor
is FP32 with the values as stored; graph inputs keep their type and are followed by a Cast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from bisect_trt.base.display import counted
from bisect_trt.base.errors import BadInputError
from bisect_trt.base.plan import Precision
from bisect_trt.model.graph import Graph
from bisect_trt.model.layers import node_names
from bisect_trt.model.load import LoadedModel, load_model
from bisect_trt.model.precision_rules import FLOAT, MOVES, STORAGE_TYPE, is_standard
from bisect_trt.model.tensor_types import Scope, infer_types
from bisect_trt.model.tensor_values import all_tensors, array_of
from bisect_trt.model.walk import fed_inputs, replace_nodes, subgraphs, tensor_names, unused

_NAME_A_TYPE = frozenset({"to", "dtype", "output_dtype", "output_datatype", "softmax_precision"})
"""Attributes that name an element type."""


@dataclass(frozen=True)
class Lifted:
    """``model`` in FP32, and facts on its source.

    The source runs ``reduced`` nodes in ``precision`` and keeps ``islands`` in FP32. ``inputs`` are
    the casts of its reduced inputs, ``outputs`` its reduced outputs. ``sentence`` is for users.
    """

    model: onnx.ModelProto
    precision: Precision
    reduced: int
    islands: frozenset[str]
    inputs: frozenset[str] = frozenset()
    outputs: Mapping[str, int] = field(default_factory=dict)
    sentence: str = ""


@dataclass(frozen=True)
class SourceModel:
    """A model as a run takes it; ``lifted`` is None if the source is FP32."""

    model: LoadedModel
    lifted: Lifted | None

    @property
    def graph(self) -> Graph:
        """The model as a graph that remembers the types of the source's inputs and outputs."""
        if self.lifted is None:
            return Graph(self.model.proto)
        lifted = self.lifted
        return Graph(lifted.model, stored_inputs=lifted.inputs, stored_outputs=lifted.outputs)


def load_source(source: str | Path | onnx.ModelProto) -> SourceModel:
    """Loads a model, lifted to FP32 if it is reduced already."""
    return lifted_form(load_model(source))


def lifted_form(model: LoadedModel) -> SourceModel:
    """``model``, lifted to FP32 if it is reduced already."""
    lifted = lift(model.proto, model.name)
    return SourceModel(model if lifted is None else replace(model, proto=lifted.model), lifted)


def lift(model: onnx.ModelProto, where: str = "model") -> Lifted | None:
    """``model`` lifted to FP32; None if no node gives reduced tensors."""
    scope = infer_types(model)
    nodes = model.graph.node
    made = [types_made(node, index, scope) for index, node in enumerate(nodes)]
    # Only computed tensors count: FP16 weights that are cast to FP32 are storage.
    found = [p for p, kind in STORAGE_TYPE.items() if any(kind in kinds for kinds in made)]
    if not found:
        return None
    if len(found) > 1:
        raise BadInputError(
            f"{where}: the model mixes {' and '.join(p.value.upper() for p in found)} nodes, which "
            "is not judged; give the FP32 model that it was made from"
        )
    kind = STORAGE_TYPE[found[0]]
    _check_declared(nodes, scope, kind, where)
    computing = [
        (name, kind in kinds, node)
        for name, kinds, node in zip(node_names(nodes), made, nodes, strict=True)
        if kinds
    ]
    reduced = [node for _, is_reduced, node in computing if is_reduced]
    changed = [node for node in reduced if node.op_type not in _CHANGES_NONE]
    islands = frozenset(name for name, is_reduced, _ in computing if not is_reduced and changed)
    new = onnx.ModelProto()
    new.CopyFrom(model)
    lifting = _Lift(kind, where)
    inputs = lifting.graph(new.graph, scope)
    return Lifted(
        model=new,
        precision=found[0],
        reduced=len(reduced) if changed else 0,
        islands=islands,
        inputs=inputs,
        outputs=dict.fromkeys(lifting.outputs, kind),
        sentence=_sentence(changed and reduced, len(computing), len(islands), found[0]),
    )


def _sentence(
    reduced: Sequence[onnx.NodeProto], computing: int, islands: int, precision: Precision
) -> str:
    """The sentence for users on a model of ``computing`` nodes that is lifted."""
    name = precision.value.upper()
    if not reduced:
        return (
            f"inputs or outputs are {name} in the source, whose nodes compute in FP32: judged "
            "as those of an FP32 model"
        )
    has_bodies = any(any(subgraphs(node)) for node in reduced)
    return (
        f"{counted(len(reduced), 'node')} of {computing} run in {name} in the source already, and "
        f"{counted(islands, 'node')} stay in FP32. The reference runs all of them in FP32, with "
        "the weights as stored"
        f"{'; an If, Loop or Scan is reduced as a whole' if has_bodies else ''}"
    )


def _check_declared(nodes: Sequence[onnx.NodeProto], scope: Scope, kind: int, where: str) -> None:
    """Refuses a tensor that is declared reduced although its node reads FP32 only."""
    for node in nodes:
        read = {scope.type_of(name) for name in node.input if name}
        free = any(a.name in _NAME_A_TYPE for a in node.attribute) or any(subgraphs(node))
        if FLOAT not in read or kind in read or free or not is_standard(node):
            continue
        for name in node.output:
            if name and scope.type_of(name) == kind:
                raise BadInputError(
                    f"{where}: tensor {name!r} is declared {TensorProto.DataType.Name(kind)}, and "
                    f"{node.op_type} {node.name!r} makes FLOAT of what it reads; declare that"
                )


_CHANGES_NONE = MOVES | {"Cast"}
"""Operators that compute nothing: a model that reduces only these computes in FP32."""


def types_made(node: onnx.NodeProto, index: int, scope: Scope) -> frozenset[int]:
    """The float types of the outputs of ``node`` and of its bodies' nodes; none for a constant."""
    if node.op_type == "Constant":
        return frozenset()
    kinds = {scope.type_of(o) for o in node.output if o}
    for attribute, body in subgraphs(node):
        inner = scope.body(index, attribute)
        for place, within in enumerate(body.node):
            kinds |= types_made(within, place, inner)
    return frozenset(kinds & {FLOAT, *STORAGE_TYPE.values()})


class _Lift:
    """Turns the type ``kind`` into FP32 in place, except at inputs and custom operators."""

    def __init__(self, kind: int, where: str) -> None:
        self._kind = kind
        self._where = where
        self._used: set[str] = set()
        self.outputs: list[str] = []

    def graph(self, graph: onnx.GraphProto, scope: Scope) -> frozenset[str]:
        """Lifts the main graph, sets ``outputs``, and returns the names of the inputs' casts."""
        self._used = tensor_names(graph)
        for tensor in all_tensors(graph):
            if tensor.data_type == self._kind:
                values = np.asarray(array_of(tensor)).astype(np.float32).reshape(tensor.dims)
                tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
        fed = {
            value.name: self._fresh(f"{value.name}__fp32")
            for value in fed_inputs(graph)
            if value.type.tensor_type.elem_type == self._kind
        }
        # An output that is an input too keeps its type.
        kept = onnx.GraphProto()
        kept.output.extend(o for o in graph.output if o.name in fed)
        low_outputs = (o for o in graph.output if o.type.tensor_type.elem_type == self._kind)
        self.outputs = [o.name for o in low_outputs if o.name not in fed]
        renamed = dict(fed)
        for tensor in graph.initializer:  # the typed writer needs a node that makes the output
            if tensor.name in self.outputs:
                renamed[tensor.name] = tensor.name = self._fresh(f"{tensor.name}__fp32")
        self._body(graph, scope, renamed)
        passed = [o for o in graph.output if o.name in fed]
        for value, original in zip(passed, kept.output, strict=True):
            value.CopyFrom(original)
        for name in self.outputs:
            if name in renamed:
                graph.node.append(helper.make_node("Identity", [renamed[name]], [name]))
        casts = [
            helper.make_node("Cast", [name], [lifted], self._fresh(f"lift_{name}"), to=FLOAT)
            for name, lifted in fed.items()
        ]
        replace_nodes(graph, [*casts, *graph.node])
        for value in graph.input:
            if value.name not in fed:
                self._retype(value.type)
        return frozenset(fed.values())

    def _body(self, graph: onnx.GraphProto, scope: Scope, fed: Mapping[str, str]) -> None:
        """Lifts the nodes and types of a graph or body; ``fed`` maps reduced inputs to casts."""
        nodes: list[onnx.NodeProto] = []
        for index, node in enumerate(graph.node):
            for slot, name in enumerate(node.input):
                node.input[slot] = fed.get(name, name)
            for attribute in node.attribute:
                if attribute.name in _NAME_A_TYPE and attribute.i == self._kind:
                    attribute.i = FLOAT
            for attribute, body in subgraphs(node):
                inner = scope.body(index, attribute)
                shadowed = {v.name for v in body.input}
                visible = {k: v for k, v in fed.items() if k not in shadowed}
                self._body(body, inner, visible)
                for value in body.output:  # a body may return a tensor of the outer graph
                    value.name = visible.get(value.name, value.name)
                for value in body.input:
                    self._retype(value.type)
            nodes += [node] if is_standard(node) else self._around(node, scope, fed)
        if len(nodes) > len(graph.node):
            replace_nodes(graph, nodes)
        for value in (*graph.output, *graph.value_info):
            self._retype(value.type)

    def _around(
        self, node: onnx.NodeProto, scope: Scope, fed: Mapping[str, str]
    ) -> list[onnx.NodeProto]:
        """``node``, of a custom domain, between Casts that keep the types of its export."""
        # A kernel or plugin of another domain may exist for the reduced type alone.
        source = {lifted: name for name, lifted in fed.items()}
        before, after = [], []
        for slot, name in enumerate(node.input):
            if name and scope.type_of(source.get(name, name)) == self._kind:
                node.input[slot] = self._fresh(f"{name}__stored")
                before.append(helper.make_node("Cast", [name], [node.input[slot]], to=self._kind))
        for slot, name in enumerate(node.output):
            given = scope.type_of(name) if name else FLOAT
            if given == self._kind:
                node.output[slot] = self._fresh(f"{name}__stored")
                after.append(helper.make_node("Cast", [node.output[slot]], [name], to=FLOAT))
            elif given == TensorProto.UNDEFINED and before:
                raise BadInputError(
                    f"{self._where}: node {node.name!r} ({node.domain}.{node.op_type}) reads "
                    "reduced tensors and nothing says what it gives; give the FP32 model that this "
                    "one was made from"
                )
        return [*before, node, *after]

    def _retype(self, kind: onnx.TypeProto) -> None:
        if kind.HasField("sequence_type"):
            self._retype(kind.sequence_type.elem_type)
        elif kind.HasField("optional_type"):
            self._retype(kind.optional_type.elem_type)
        elif kind.tensor_type.elem_type == self._kind:
            kind.tensor_type.elem_type = FLOAT

    def _fresh(self, stem: str) -> str:
        return unused(stem, self._used)
