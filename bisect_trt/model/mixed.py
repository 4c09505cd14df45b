"""Reads a mixed model: one that another tool made of an FP32 model, with FP16 or BF16 types.

What it computes is written as an FP32 graph and a plan, which emulators execute. The types also
say which layers of the FP32 model it keeps in FP32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from bisect_trt.base.display import counted, some_of
from bisect_trt.base.errors import BadInputError
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.model.graph import Graph, as_graph
from bisect_trt.model.inputs import input_specs
from bisect_trt.model.layers import Layer
from bisect_trt.model.lifted import Lifted, lift, types_made
from bisect_trt.model.load import load_model
from bisect_trt.model.precision_rules import (
    FLOAT,
    STORAGE_TYPE,
    is_standard,
    reducible_slots,
)
from bisect_trt.model.tensor_types import infer_types
from bisect_trt.model.tensor_values import Constants
from bisect_trt.model.walk import opset_of, replace_nodes, subgraphs, tensor_names, unused

_NAME_A_TYPE = frozenset({"dtype", "output_dtype"})
"""Attributes that name the type of what a node gives, but for a Cast's."""

_ROUNDING = {Precision.FP16: (2.0**-10, 1.2e-7), Precision.BF16: (2.0**-7, 1e-37)}
"""By precision, what a stored weight may be off: relatively, and absolutely near zero."""

_CLIPPED_ABOVE = 9984.0
"""Converters clip weights at 10,000, rounded to FP16, or at the largest FP16 number."""


class Match(StrEnum):
    """How a node of the FP32 model was found in the mixed one."""

    NAME = "same name"
    OUTPUT = "same output"
    FUSED = "fused"
    MISSING = "missing"
    ADDED = "added"


@dataclass(frozen=True, slots=True)
class MappedNode:
    """A ``layer`` or other node of the FP32 model, and the ``node`` that stands for it.

    ``layer`` is empty for a node that the tool added, ``node`` for one that is missing.
    """

    how: Match
    layer: str
    node: str


@dataclass(frozen=True)
class MixedModel:
    """A mixed model, ready to be judged against its FP32 model.

    ``graph`` in FP32 with the roundings of ``exact`` computes what the types of ``proto`` say. It
    has the inputs and outputs of the FP32 model. ``plan`` is the same for the FP32 model's layers,
    as far as ``nodes`` maps them. ``notes`` are sentences for users.
    """

    name: str
    proto: onnx.ModelProto
    graph: Graph
    exact: PrecisionPlan
    plan: PrecisionPlan
    nodes: tuple[MappedNode, ...]
    notes: tuple[str, ...]

    @property
    def precision(self) -> Precision:
        """What the reduced nodes run in."""
        return self.exact.base


def load_mixed(source: str | Path | onnx.ModelProto, original: Graph, of: str) -> MixedModel:
    """Reads the mixed model that a tool made of ``original``, which is called ``of``.

    Raises:
        BadInputError: it cannot be read, has no reduced node, or is of another model.
    """
    loaded = load_model(source)
    proto, name = loaded.proto, loaded.name
    _check_interface(proto, original, name, of)
    lifted = _lifted(proto, name)
    precision = lifted.precision
    plan, nodes = plan_of_mixed(original, proto)
    if not any(found.how in (Match.NAME, Match.OUTPUT) for found in nodes):
        raise BadInputError(
            f"{name}: no node of it is one of {of}; give a model that was made from that one"
        )
    clipped = _check_weights(original, Graph(proto), nodes, precision, name)
    written, apart = _roles_kept(proto, precision)
    if apart:
        lifted = _lifted(written, name)
    return MixedModel(
        name=name,
        proto=proto,
        graph=Graph(_as_fp32_outside(lifted, precision)),
        exact=PrecisionPlan(precision, frozenset(_in_fp32(written, precision))),
        plan=plan,
        nodes=nodes,
        notes=tuple(_notes(original, proto, lifted, plan, nodes, clipped, name)),
    )


def plan_of_mixed(
    fp32_model: onnx.ModelProto | Graph, mixed_model: onnx.ModelProto
) -> tuple[PrecisionPlan, tuple[MappedNode, ...]]:
    """The plan that the types of a mixed model say, and the mapping of its nodes.

    A layer is in FP32 if its node gives FLOAT. A fused one has the type of the node that gives its
    output. A missing one is in FP32 if all its mapped neighbours are.

    Args:
        fp32_model: the model that the mixed one was made from.
        mixed_model: the model with FP16 or BF16 tensors; its functions are written out.

    Returns:
        The plan for the layers of ``fp32_model``. The mapping lists its nodes without constants in
        order, then the nodes that the tool added.

    Raises:
        BadInputError: no node of ``mixed_model`` is reduced, or both FP16 and BF16 are there.
    """
    original, mixed = as_graph(fp32_model), Graph(mixed_model)
    precision = _precision(mixed_model, "the mixed model")
    matches = _matches(original, mixed)
    layers = original.layers_at(precision)
    in_fp32: dict[str, bool] = {}
    for layer in layers:
        how, index, tensors = matches[layer.index]
        if how is Match.MISSING:
            continue
        if how is not Match.FUSED and index is not None:
            node = mixed.proto.graph.node[index]
            slots = original.role(layer.index, precision).reduced_out
            tensors = tuple(node.output[slot] for slot in slots if slot < len(node.output))
        types = {mixed.types.type_of(tensor) for tensor in tensors}
        in_fp32[layer.name] = STORAGE_TYPE[precision] not in types
    pinned = {name for name, is_fp32 in in_fp32.items() if is_fp32}
    for name, near in _neighbours(layers).items():
        placed = [in_fp32[other] for other in near if other in in_fp32]
        if name not in in_fp32 and placed and all(placed):
            pinned.add(name)
    return PrecisionPlan(precision, frozenset(pinned)), tuple(_mapped(original, mixed, matches))


def _neighbours(layers: Sequence[Layer]) -> dict[str, list[str]]:
    """By layer, those that give what it reads, and those that read what it gives."""
    near: dict[str, list[str]] = {layer.name: [] for layer in layers}
    maker = {tensor: layer.name for layer in layers for tensor in layer.outputs}
    for layer in layers:
        for tensor in layer.inputs:
            if tensor in maker:
                near[layer.name].append(maker[tensor])
                near[maker[tensor]].append(layer.name)
    return near


_Found = tuple[Match, int | None, tuple[str, ...]]
"""How a node was found, the place of the mixed node, and the tensors that stand for its outputs."""


def _matches(original: Graph, mixed: Graph) -> dict[int, _Found]:
    """How each node of ``original``, constants apart, was found in ``mixed``."""
    nodes = mixed.proto.graph.node
    by_name = {name: index for index, (_, name) in enumerate(mixed.named_nodes())}
    maker = {tensor: index for index, node in enumerate(nodes) for tensor in node.output if tensor}
    found: dict[int, _Found] = {}
    taken = set[int]()
    for index, (node, name) in enumerate(original.named_nodes()):
        if node.op_type == "Constant":
            continue
        place = by_name.get(name)
        if place is not None and _same_operator(nodes[place], node) and place not in taken:
            found[index] = (Match.NAME, place, ())
            taken.add(place)
            continue
        place, tensor = _maker_before_casts(node, nodes, maker)
        if place is None:
            found[index] = (Match.MISSING, None, ())
        elif _same_operator(nodes[place], node) and place not in taken:
            found[index] = (Match.OUTPUT, place, ())
            taken.add(place)
        else:
            found[index] = (Match.FUSED, place, (tensor,))
    return found


def _same_operator(one: onnx.NodeProto, other: onnx.NodeProto) -> bool:
    return (one.op_type, one.domain) == (other.op_type, other.domain)


def _maker_before_casts(
    node: onnx.NodeProto, nodes: Sequence[onnx.NodeProto], maker: Mapping[str, int]
) -> tuple[int | None, str]:
    """The place of the node that gives the first output of ``node``, and the tensor it gives.

    Casts that the tool put behind it are passed over.
    """
    tensor = next((name for name in node.output if name), "")
    place = maker.get(tensor)
    while place is not None and nodes[place].op_type == "Cast" != node.op_type:
        tensor = nodes[place].input[0]
        place = maker.get(tensor)
    return place, tensor


def _mapped(original: Graph, mixed: Graph, matches: Mapping[int, _Found]) -> Iterator[MappedNode]:
    """The nodes of ``original`` as they were found, then the nodes that were added."""
    names, taken = mixed.names, set[int]()
    for index, (how, place, _) in matches.items():
        yield MappedNode(how, original.names[index], "" if place is None else names[place])
        if place is not None:
            taken.add(place)
    for place, (node, name) in enumerate(mixed.named_nodes()):
        if place not in taken and node.op_type != "Constant":
            yield MappedNode(Match.ADDED, "", name)


def _precision(model: onnx.ModelProto, where: str) -> Precision:
    """What the reduced nodes of ``model`` run in."""
    return _lifted(model, where).precision


def _lifted(model: onnx.ModelProto, where: str) -> Lifted:
    """``model`` in FP32.

    Raises:
        BadInputError: none of its nodes is reduced, or both FP16 and BF16 are there.
    """
    lifted = lift(model, where)
    if lifted is None:
        raise BadInputError(
            f"{where}: no node of it gives FP16 or BF16 tensors, so there is nothing to judge; "
            "give the model that the tool converted"
        )
    return lifted


def _check_interface(model: onnx.ModelProto, original: Graph, name: str, of: str) -> None:
    """Refuses other inputs, outputs or an older opset than those of the FP32 model."""
    made_from = f"give a model that was made from {of}"
    wanted, found = ({s.name: s for s in input_specs(m)} for m in (original.proto, model))
    for missing in wanted.keys() - found.keys():
        raise BadInputError(f"{name}: has no input {missing!r}; {made_from}")
    for more in found.keys() - wanted.keys():
        raise BadInputError(f"{name}: has another input, {more!r}; {made_from}")
    for spec in wanted.values():
        its = found[spec.name]
        both = None if spec.shape is None or its.shape is None else (spec.shape, its.shape)
        fits = both is None or (
            len(both[0]) == len(both[1])
            and all(
                a == b or not (isinstance(a, int) and isinstance(b, int))
                for a, b in zip(*both, strict=True)
            )
        )
        if not fits:
            shapes = f"{list(its.shape or ())}, not {list(spec.shape or ())}"
            raise BadInputError(f"{name}: input {spec.name!r} has the shape {shapes}; {made_from}")
    _check_types(model, original, name, made_from)
    if opset_of(model) < original.opset:
        raise BadInputError(
            f"{name}: has opset {opset_of(model)}, older than {original.opset} of {of}; {made_from}"
        )


def _check_types(model: onnx.ModelProto, original: Graph, name: str, made_from: str) -> None:
    """Refuses other outputs, and types that differ by more than float precision."""
    outputs = {o.name: o for o in model.graph.output}
    for output in original.proto.graph.output:
        if output.name not in outputs:
            raise BadInputError(f"{name}: has no output {output.name!r}; {made_from}")
    for more in outputs.keys() - set(original.outputs):
        raise BadInputError(f"{name}: has another output, {more!r}; {made_from}")
    inputs = {i.name: i for i in model.graph.input}
    for value in (*original.proto.graph.input, *original.proto.graph.output):
        its = outputs.get(value.name) or inputs.get(value.name)
        if its is None:  # an initialiser that is declared as an input
            continue
        wanted, found = (v.type.tensor_type.elem_type for v in (value, its))
        if wanted != found and not (wanted == FLOAT and found in STORAGE_TYPE.values()):
            raise BadInputError(
                f"{name}: {value.name!r} is {TensorProto.DataType.Name(found)} and "
                f"{TensorProto.DataType.Name(wanted)} in the FP32 model; {made_from}"
            )


def _check_weights(
    original: Graph, mixed: Graph, nodes: Sequence[MappedNode], precision: Precision, name: str
) -> list[str]:
    """The weights that the tool has clipped; refuses those that are more than a rounding apart."""
    changed = {m.layer for m in nodes if m.how in (Match.FUSED, Match.MISSING)}
    same = {m.layer: m.node for m in nodes if m.how in (Match.NAME, Match.OUTPUT)}
    ids, places = _by_id(original), _by_id(mixed)
    touched = {t for n in changed for t in (*ids[n].input, *ids[n].output)}
    stored = _StoredWeights(mixed)
    clipped = dict[str, None]()
    for layer, place in same.items():
        node, its = ids[layer], places[place]
        if not touched.isdisjoint((*node.input, *node.output)):
            continue  # a fusion may have changed its weights
        for slot, tensor in enumerate(node.input):
            if tensor not in original.float_constants or slot >= len(its.input):
                continue
            found = stored.of(its.input[slot])
            if found is None:
                continue
            how = _difference(original.float_constants[tensor], found, precision)
            if how is None:
                raise BadInputError(
                    f"{name}: weight {tensor!r} of {layer!r} is more than a rounding apart from "
                    "the FP32 model's; give the FP32 model that it was made from"
                )
            if how:
                clipped[tensor] = None
    return list(clipped)


def _by_id(graph: Graph) -> dict[str, onnx.NodeProto]:
    return {name: node for node, name in graph.named_nodes()}


class _StoredWeights:
    """The constants of a mixed model as FP32, also behind Casts."""

    def __init__(self, mixed: Graph) -> None:
        self._constants: Constants = mixed.constants
        self._casts = {
            node.output[0]: node.input[0]
            for node in mixed.proto.graph.node
            if node.op_type == "Cast"
        }

    def of(self, tensor: str) -> NDArray[np.float32] | None:
        """The values of ``tensor``; None if it is no constant."""
        while tensor in self._casts:
            tensor = self._casts[tensor]
        if tensor not in self._constants:
            return None
        return np.asarray(self._constants[tensor]).astype(np.float32)


def _difference(
    exact: NDArray[np.float32], found: NDArray[np.float32], precision: Precision
) -> bool | None:
    """Whether large weights are clipped; None if values are more than a rounding apart."""
    if exact.size != found.size:
        return None
    exact, found = exact.reshape(-1), found.reshape(-1)
    relative, absolute = _ROUNDING[precision]
    with np.errstate(invalid="ignore"):  # infinities of both are equal
        near = np.abs(found - exact) <= np.abs(exact) * relative + absolute
    near |= (found == exact) | (np.isnan(exact) & np.isnan(found))
    if near.all():
        return False
    # Converters clip what exceeds their limit, or let it become infinite.
    size = np.abs(found)
    clipped = (np.sign(found) == np.sign(exact)) & (np.abs(exact) > _CLIPPED_ABOVE)
    clipped &= (size >= _CLIPPED_ABOVE) & ((size <= np.abs(exact)) | np.isinf(size))
    return True if (near | clipped).all() else None


def _roles_kept(model: onnx.ModelProto, precision: Precision) -> tuple[onnx.ModelProto, list[str]]:
    """``model`` whose nodes read and give one float type each, and the nodes that did not.

    A plan reduces all float inputs and outputs of a node that can be. Another one becomes an FP32
    node between Casts, which computes the same: sums are FP32, its output is rounded.
    """
    kind, scope = STORAGE_TYPE[precision], infer_types(model)
    apart = [
        index
        for index, node in enumerate(model.graph.node)
        if not _is_one_type(
            node,
            [scope.type_of(name) if name else 0 for name in node.input],
            [scope.type_of(name) if name else 0 for name in node.output],
            precision,
            opset_of(model),
        )
    ]
    if not apart:
        return model, []
    written = onnx.ModelProto()
    written.CopyFrom(model)
    graph, taken = written.graph, tensor_names(model.graph)
    nodes: list[onnx.NodeProto] = []
    for index, node in enumerate(graph.node):
        if index not in apart:
            nodes.append(node)
            continue
        after = []
        for slot, name in enumerate(node.input):
            if name and scope.type_of(name) == kind:
                node.input[slot] = unused(f"{name}__wide", taken)
                nodes.append(helper.make_node("Cast", [name], [node.input[slot]], to=FLOAT))
        for slot, name in enumerate(node.output):
            if name and scope.type_of(name) == kind:
                node.output[slot] = unused(f"{name}__wide", taken)
                after.append(helper.make_node("Cast", [node.output[slot]], [name], to=kind))
        for attribute in node.attribute:
            if attribute.name in _NAME_A_TYPE and attribute.i == kind:
                attribute.i = FLOAT
        nodes += [node, *after]
    replace_nodes(graph, nodes)
    del graph.value_info[:]  # it may hold the former types
    names = Graph(model).names
    return written, [names[index] for index in apart]


def _is_one_type(
    node: onnx.NodeProto,
    inputs: Sequence[int],
    outputs: Sequence[int],
    precision: Precision,
    opset: int,
) -> bool:
    """Whether a plan can say the types of ``node``: what is reducible is all reduced, or not."""
    kind = STORAGE_TYPE[precision]
    given = {slot for slot, found in enumerate(outputs) if found == kind}
    if not given or node.op_type in ("Constant", "Cast") or not is_standard(node):
        return True
    if any(subgraphs(node)):  # a body is reduced as a whole
        return True
    ins, outs = reducible_slots(node.op_type, opset, len(inputs), len(outputs), precision)
    floats = {slot for slot, found in enumerate(outputs) if found in (kind, FLOAT)}
    reads = {slot for slot, found in enumerate(inputs) if found == kind}
    exact = {slot for slot, found in enumerate(inputs) if found == FLOAT}
    return given == outs & floats and bool(reads & ins) and exact.isdisjoint(ins)


def _in_fp32(model: onnx.ModelProto, precision: Precision) -> Iterator[str]:
    """The nodes of ``model`` that give nothing in ``precision``."""
    # What is lifted keeps the names; its own islands are empty where only Casts are reduced.
    graph, kind = Graph(model), STORAGE_TYPE[precision]
    for index, (node, name) in enumerate(graph.named_nodes()):
        made = types_made(node, index, graph.types)
        if made and kind not in made:
            yield name


def _as_fp32_outside(lifted: Lifted, precision: Precision) -> onnx.ModelProto:
    """The lifted model with FP32 inputs, which are rounded at its border."""
    model, kind = lifted.model, STORAGE_TYPE[precision]
    taken, borders = tensor_names(model.graph), []
    for node in model.graph.node:
        if node.op_type == "Cast" and node.output[0] in lifted.inputs:
            name, node.input[0] = node.input[0], unused(f"{node.input[0]}__stored", taken)
            borders.append(helper.make_node("Cast", [name], [node.input[0]], to=kind))
    if borders:
        for value in model.graph.input:
            if value.type.tensor_type.elem_type == kind:
                value.type.tensor_type.elem_type = FLOAT
        replace_nodes(model.graph, [*borders, *model.graph.node])
    return model


def _notes(
    original: Graph,
    model: onnx.ModelProto,
    lifted: Lifted,
    plan: PrecisionPlan,
    nodes: Sequence[MappedNode],
    clipped: Sequence[str],
    name: str,
) -> Iterator[str]:
    """What a user should know of the mixed model before it is judged."""
    layers, base = original.layers_at(plan.base), plan.base.value.upper()
    count = Counter(found.how for found in nodes)
    yield (
        f"{name}: {len(plan.pinned)} of {counted(len(layers), 'layer')} in FP32, the others in "
        f"{base}; of its nodes {count[Match.NAME] + count[Match.OUTPUT]} are the FP32 model's and "
        f"{count[Match.ADDED]} were added"
    )
    for how, words in ((Match.FUSED, "fused into others"), (Match.MISSING, "not found")):
        gone = [found.layer for found in nodes if found.how is how]
        if gone:
            yield f"{name}: {counted(len(gone), 'node')} of the FP32 model {words}: {some_of(gone)}"
    if clipped:
        yield (
            f"{name}: the tool has clipped values of {counted(len(clipped), 'weight')}: "
            f"{some_of(clipped)}; what that changes is judged too"
        )
    if opset_of(model) != original.opset:
        yield f"{name}: opset {opset_of(model)}, raised from {original.opset} of the FP32 model"
    outside = [
        value.name
        for value in (*model.graph.input, *model.graph.output)
        if value.type.tensor_type.elem_type == STORAGE_TYPE[plan.base]
    ]
    if outside:
        yield f"{name}: {some_of(outside)} are {base} there, and are rounded at the border"
    if any(any(subgraphs(node)) for node in model.graph.node) and lifted.reduced:
        yield f"{name}: an If, Loop or Scan with reduced nodes is judged as reduced as a whole"
