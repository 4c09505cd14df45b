"""The outputs of a model: decisions, tensors to judge it at, and tensors that are marked."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import onnx
from onnx import helper

from bisect_trt.base.display import some_of
from bisect_trt.base.errors import BadInputError
from bisect_trt.model.graph import Graph, as_graph
from bisect_trt.model.layers import node_names
from bisect_trt.model.patterns import find_patterns
from bisect_trt.model.precision_rules import (
    FLOAT,
    FLOATS,
    STORAGE_TYPE,
    TYPE_AGNOSTIC,
    is_standard,
    schema_of,
)
from bisect_trt.model.tensor_types import UNKNOWN, Scope, infer_types
from bisect_trt.model.walk import opset_of, part_of, tensors_read


def decided_outputs(graph: Graph, layers: Collection[str]) -> frozenset[str]:
    """The outputs of integers or truth values that depend on one of ``layers``."""
    behind = set[str]()
    for node, name in graph.named_nodes():
        follows = not behind.isdisjoint(tensors_read(node)) and node.op_type not in TYPE_AGNOSTIC
        if follows or name in layers:
            behind.update(filter(None, node.output))
    return frozenset(
        o for o in graph.outputs if o in behind and graph.types.type_of(o) not in FLOATS
    )


_KEEP_ORDER = frozenset({"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
"""Operators that keep the elements and their order."""


@dataclass(frozen=True)
class Decision:
    """An output that is the index of the largest or smallest value of ``tensor`` along ``axis``."""

    tensor: str
    axis: int
    smallest: bool


def list_decisions(model: onnx.ModelProto) -> dict[str, Decision]:
    """The outputs of ``model`` that an ArgMax or ArgMin computes, by name."""
    makers = {name: node for node in model.graph.node for name in node.output if name}
    found = {}
    for output in model.graph.output:
        node = makers.get(output.name)
        while node is not None and node.op_type in _KEEP_ORDER:
            node = makers.get(node.input[0])
        if node is not None and node.op_type in ("ArgMax", "ArgMin"):
            axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
            found[output.name] = Decision(node.input[0], axis, node.op_type == "ArgMin")
    return found


def unreached(graph: Graph) -> frozenset[str]:
    """The ids of the nodes that no output depends on."""
    live, found = set(graph.outputs), set[str]()
    for node, name in zip(reversed(graph.proto.graph.node), reversed(graph.names), strict=True):
        if live.isdisjoint(node.output):
            found.add(name)
        else:
            live.update(tensors_read(node))
    return frozenset(found)


_KNOWN_DOMAINS = frozenset({"ai.onnx.ml", "com.microsoft", "com.microsoft.nchwc"})
"""Custom domains for which ONNX Runtime's CPU provider has kernels."""


def names_of(texts: Iterable[str], model: onnx.ModelProto) -> list[str]:
    """The tensors that the values of ``--outputs`` name, separated by commas."""
    made = {name for node in model.graph.node for name in node.output if name}
    found: list[str] = []
    for text in texts:
        # A tensor's name may itself hold commas.
        for name in [text] if text in made else filter(None, text.split(",")):
            if name.strip() not in made:
                raise BadInputError(
                    f"--outputs {name.strip()}: no node of the model gives such a tensor; "
                    "`bisect-trt inspect` lists the layers"
                )
            found.append(name.strip())
    return list(dict.fromkeys(found))


def tail_outputs(model: onnx.ModelProto, *, of_rows: bool) -> tuple[list[str], list[str]]:
    """The tensors to judge in place of outputs that cannot be compared, and the nodes at fault.

    Such nodes are plugins, and with ``of_rows`` NonMaxSuppression. Both lists are empty if a model
    is judged as a whole.
    """
    opset, nodes, names = opset_of(model), model.graph.node, node_names(model.graph.node)
    behind: set[str] = set()  # tensors that depend on a node at fault
    first: list[int] = []
    for index, node in enumerate(nodes):
        follows = not behind.isdisjoint(tensors_read(node))
        selects_rows = of_rows and node.op_type == "NonMaxSuppression" and is_standard(node)
        # Rows that an NMS selects change places when a score changes by a last bit.
        at_fault = selects_rows or _is_unknown(node, opset)
        if at_fault and not follows:
            first.append(index)
        if at_fault or follows:
            behind.update(o for o in node.output if o)
    if not first or behind.isdisjoint(o.name for o in model.graph.output):
        return [], []
    graph = Graph(model)
    made = {o for node in nodes for o in node.output if o} - behind
    # In a lifted model a plugin reads Casts to its own type: their FP32 inputs are judged.
    casts = {
        node.output[0]: node.input[0]
        for node in nodes
        if node.op_type == "Cast" and graph.types.type_of(node.output[0]) in STORAGE_TYPE.values()
    }
    # Only floats are judged: the other inputs of an NMS are limits and counts.
    wanted = [
        name
        for index in first
        for name in (casts.get(given, given) for given in nodes[index].input)
        if name in made
        and name not in graph.constants
        and graph.types.type_of(name) in (FLOAT, UNKNOWN)
    ]
    # Outputs that do not depend on a node at fault are judged as they are.
    kept = [o.name for o in model.graph.output if o.name not in behind]
    return list(dict.fromkeys([*kept, *wanted])), [names[index] for index in first]


def _is_unknown(node: onnx.NodeProto, opset: int) -> bool:
    if not is_standard(node):
        return node.domain not in _KNOWN_DOMAINS
    return schema_of(node.op_type, opset) is None


def judged_part(model: onnx.ModelProto, outputs: Sequence[str]) -> onnx.ModelProto:
    """The part of ``model`` that computes ``outputs``, with all inputs of the model."""
    graph, part = Graph(model), part_of(model, outputs)
    part.metadata_props.extend(model.metadata_props)
    declared = {o.name: o for o in model.graph.output}
    for name in outputs:
        if graph.types.type_of(name) == UNKNOWN:
            raise BadInputError(f"--outputs {name}: nothing says which type it has")
        part.graph.output.append(declared.get(name) or _output(name, graph.types))
    return part


def _output(name: str, types: Scope) -> onnx.ValueInfoProto:
    """The declaration of a tensor as an output, with symbolic axes if its rank is known."""
    rank = types.ranks.get(name)
    shape = None if rank is None else [f"{name}_{axis}" for axis in range(rank)]
    return helper.make_tensor_value_info(name, types.type_of(name), shape)


def judged_part_sentence(outputs: Sequence[str], nodes: Sequence[str]) -> str:
    """The sentence for users on a model that is judged in part."""
    judged = some_of([repr(name) for name in outputs])
    if not nodes:
        return f"judged at {judged} (--outputs); what follows stays in FP32 in the model to ship"
    return (
        f"judged at {judged}, before {some_of(list(nodes))}, whose results cannot be compared one "
        "by one; these stay in FP32 in the model to ship (--outputs judges elsewhere, "
        "--requirement 'box_match(boxes,scores)>=0.99' the detections)"
    )


def select_tensors(model: onnx.ModelProto | Graph, selectors: Iterable[str]) -> list[str]:
    """The float tensors that ``selectors`` match, in the file's order.

    A selector is a layer id, a tensor name, a glob over either, an operator type (``MatMul``) or
    the kind of a pattern (``LayerNorm``).
    """
    graph = as_graph(model)
    layers = graph.layers
    groups: dict[str, set[str]] = {}
    for pattern in find_patterns(graph):
        groups.setdefault(pattern.kind.lower(), set()).update(pattern.layers)
    chosen: set[str] = set()
    for selector in selectors:
        members = groups.get(selector.lower(), set())
        hits = {
            tensor
            for layer in layers
            for tensor in layer.outputs
            if selector in (layer.op, layer.name, tensor)  # a name may look like a glob: a[0]
            or layer.name in members
            or fnmatchcase(layer.name, selector)
            or fnmatchcase(tensor, selector)
        }
        if not hits:
            raise BadInputError(
                f"--mark {selector!r}: matches no layer or tensor; `bisect-trt inspect` lists them"
            )
        chosen |= hits
    return [tensor for layer in layers for tensor in layer.outputs if tensor in chosen]


def with_ranks(
    model: onnx.ModelProto, tensors: Sequence[str]
) -> tuple[Sequence[str], Sequence[str]]:
    """Splits ``tensors`` into those with a known rank, as ONNX's checker requires, and the rest."""
    # If the model's own outputs lack shapes, the checker refuses it anyway.
    declared = all(o.type.tensor_type.HasField("shape") for o in model.graph.output)
    ranks = infer_types(model).ranks
    unknown = [name for name in tensors if name not in ranks] if declared else []
    if unknown and len(unknown) == len(tensors):
        raise BadInputError(
            f"tensor {unknown[0]!r}: nothing says how many dimensions it has, so that no checker "
            "would take it as an output; declare its shape in the model, or mark another"
        )
    return [name for name in tensors if name not in set(unknown)], unknown


def mark_outputs(model: onnx.ModelProto, tensors: Iterable[str]) -> onnx.ModelProto:
    """A copy of ``model`` in which ``tensors`` are outputs too, declared with type and rank."""
    scope = infer_types(model)
    marked = onnx.ModelProto()
    marked.CopyFrom(model)
    graph = marked.graph
    existing = {o for node in graph.node for o in node.output}
    existing.update(v.name for v in (*graph.input, *graph.initializer))
    present = {o.name for o in graph.output}
    for name in tensors:
        if name in present:
            continue
        if name not in existing:
            raise BadInputError(
                f"tensor {name!r} is not in the model; `bisect-trt inspect` lists the layers"
            )
        graph.output.append(_output(name, scope))
        present.add(name)
    # The declarations of inner tensors may contradict those of the new outputs.
    del graph.value_info[:]
    return marked
