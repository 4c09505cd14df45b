"""A part of a switched model, as a model of its own, and the same with its switches written out.

A segment whose switches all stand alike needs none, which for networks of thousands of small nodes
is most of their time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import onnx

from bisect_trt.graph.passes.switched import Flag, Weight
from bisect_trt.graph.tensors.tensor_types import captured_names


@dataclass(frozen=True)
class Segment:
    """``model`` takes ``takes`` (the model's inputs and tensors of earlier segments), a boolean for
    each of ``flags`` and a tensor for each of ``weights``, and gives ``gives``.
    """

    model: onnx.ModelProto
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    flags: Mapping[str, Flag]
    weights: Mapping[str, Weight]


def settled(segment: Segment, on: Collection[str]) -> Segment:
    """``segment`` with its switches written out as they stand; kernels, and so numbers, stay.

    Args:
        segment: with its switches.
        on: the flags that are true.

    Returns:
        A segment with fewer flags: none but those of the source's control flow.
    """
    source = segment.model.graph
    target = onnx.ModelProto(ir_version=segment.model.ir_version)
    target.opset_import.extend(segment.model.opset_import)
    target.functions.extend(segment.model.functions)
    graph = target.graph
    graph.name = source.name
    graph.initializer.extend(source.initializer)
    graph.output.extend(source.output)
    graph.value_info.extend(source.value_info)
    switches = [is_switch(node, segment.flags) for node in source.node]
    pairs = list(zip(source.node, switches, strict=True))
    # A name that a body reads, or that leaves the segment, stays.
    fixed = {t for n, switch in pairs if not switch for t in captured_names(n)}
    fixed.update(segment.gives)
    alias: dict[str, str] = {}
    for node, switch in pairs:
        if not switch:
            _append(graph, node, alias)
            continue
        (name,) = node.output
        branch = next(a.g for a in node.attribute if a.name == _BRANCH[node.input[0] in on])
        if len(branch.node) == 1 and branch.node[0].op_type == "Identity" and name not in fixed:
            inside = branch.node[0].input[0]
            alias[name] = alias.get(inside, inside)
            continue
        graph.initializer.extend(branch.initializer)
        for inner in branch.node:
            _append(graph, inner, alias, {branch.output[0].name: name})
    read = {t for n in graph.node for t in (*n.input, *captured_names(n))}
    graph.input.extend(i for i in source.input if i.name in read)
    flags = {name: flag for name, flag in segment.flags.items() if name in read}
    # A model may have an input that no node reads.
    takes = tuple(name for name in segment.takes if name in read)
    return Segment(target, takes, segment.gives, flags, segment.weights)


def _append(
    graph: onnx.GraphProto,
    node: onnx.NodeProto,
    alias: Mapping[str, str],
    renamed: Mapping[str, str] | None = None,
) -> None:
    """Add a copy of ``node`` that reads through ``alias`` and gives under other names."""
    graph.node.append(node)
    added = graph.node[-1]
    for slot, name in enumerate(added.input):
        if name in alias:
            added.input[slot] = alias[name]
    for slot, name in enumerate(added.output):
        if renamed and name in renamed:
            added.output[slot] = renamed[name]


_BRANCH = {True: "then_branch", False: "else_branch"}


_ROUNDS = frozenset({"Identity", "Cast", "Mul", "Sub"})


def is_switch(node: onnx.NodeProto, flags: Collection[str]) -> bool:
    """Whether ``node`` chooses between two roundings of one tensor, and nothing else."""
    return (
        node.op_type == "If"
        and node.input[0] in flags
        and len(node.output) == 1
        and all(n.op_type in _ROUNDS for a in node.attribute for n in a.g.node)
    )
