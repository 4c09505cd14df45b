"""Finds outputs that are decisions, unreached nodes, and the tensors to judge a model at."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import onnx
from onnx import helper

from bisect_trt.base.display import some_of
from bisect_trt.base.errors import BadInputError
from bisect_trt.model.graph import FLOATS, Graph
from bisect_trt.model.layers import node_names
from bisect_trt.model.precision_rules import (
    FLOAT,
    STORAGE_TYPE,
    TYPE_AGNOSTIC,
    is_standard,
    schema_of,
)
from bisect_trt.model.tensor_types import UNKNOWN, opset_of, part_of, tensors_read


def decided_outputs(graph: Graph, layers: Collection[str]) -> frozenset[str]:
    """The outputs of integers or truth values that depend on one of ``layers``."""
    made_by = {
        tensor: place
        for place, node in enumerate(graph.proto.graph.node)
        for tensor in node.output
        if tensor
    }
    reduced = frozenset(layers)
    return frozenset(
        name
        for name in graph.outputs
        if graph.types.type_of(name) not in FLOATS and _comes_from(graph, name, made_by, reduced)
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
        for _ in model.graph.node:  # bounded, because a damaged file may hold a cycle
            if node is None or node.op_type not in _KEEP_ORDER:
                break
            node = makers.get(node.input[0])
        if node is not None and node.op_type in ("ArgMax", "ArgMin"):
            axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
            found[output.name] = Decision(node.input[0], axis, node.op_type == "ArgMin")
    return found


def _comes_from(graph: Graph, output: str, made_by: dict[str, int], layers: frozenset[str]) -> bool:
    """Whether the values of ``output`` depend on one of ``layers``."""
    waiting, visited = [output], set[str]()
    while waiting:
        name = waiting.pop()
        place = made_by.get(name)
        if name in visited or place is None:
            continue
        visited.add(name)
        if graph.names[place] in layers:
            return True
        node = graph.proto.graph.node[place]
        if node.op_type not in TYPE_AGNOSTIC:
            waiting += tensors_read(node)
    return False


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
        kind = graph.types.type_of(name)
        if kind == UNKNOWN:
            raise BadInputError(f"--outputs {name}: nothing says which type it has")
        rank = graph.types.ranks.get(name)
        shape = None if rank is None else [f"{name}_{axis}" for axis in range(rank)]
        part.graph.output.append(
            declared.get(name) or helper.make_tensor_value_info(name, kind, shape)
        )
    return part


def words(outputs: Sequence[str], nodes: Sequence[str]) -> str:
    """The sentence for users on a model that is judged in part."""
    judged = some_of([repr(name) for name in outputs])
    if not nodes:
        return f"judged at {judged} (--outputs); what follows stays in FP32 in the model to ship"
    return (
        f"judged at {judged}, before {some_of(list(nodes))}, whose results cannot be compared one "
        "by one; these stay in FP32 in the model to ship (--outputs judges elsewhere, "
        "--requirement 'box_match(boxes,scores)>=0.99' the detections)"
    )
