"""Other ways to write the same network: names, order, places of constants, functions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

import numpy as np
import onnx
from onnx import AttributeProto, helper

from tests.fuzz.net import with_shapes

Transform = Callable[[onnx.ModelProto, np.random.Generator], onnx.ModelProto]

WRAPPED = "fuzz.wrapped"
"""The domain of the function that part of a model is put into."""


def copied(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy without value_info, which may name tensors that are renamed."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    del copy.graph.value_info[:]
    return copy


def bodies_of(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The bodies of a node."""
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g


def reads(node: onnx.NodeProto) -> set[str]:
    """The tensors that a node reads, those that its bodies take from outside included."""
    found = {name for name in node.input if name}
    for body in bodies_of(node):
        own = {v.name for v in (*body.input, *body.initializer)}
        own |= {name for inner in body.node for name in inner.output}
        inside = {name for inner in body.node for name in reads(inner)}
        found |= (inside | {o.name for o in body.output}) - own
    return found


def _rename(nodes: Iterable[onnx.NodeProto], names: dict[str, str]) -> None:
    for node in nodes:
        for slots in (node.input, node.output):
            for slot, name in enumerate(slots):
                slots[slot] = names.get(name, name)
        for body in bodies_of(node):
            _rename(body.node, names)


def renamed(model: onnx.ModelProto, random: np.random.Generator) -> onnx.ModelProto:
    """Other names of nodes and inner tensors, so that they sort in another order."""
    new = copied(model)
    graph = new.graph
    kept = {v.name for v in (*graph.input, *graph.output)}
    inner = [t.name for t in graph.initializer]
    inner += [o for node in graph.node for o in node.output if o]
    inner = [name for name in inner if name not in kept]
    places = random.permutation(len(inner))
    names = {name: f"t/{place}" for name, place in zip(inner, places, strict=True)}
    _rename(graph.node, names)
    for tensor in graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
    for node, place in zip(graph.node, random.permutation(len(graph.node)), strict=True):
        node.name = f"n/{place}"
    return new


def reordered(model: onnx.ModelProto, random: np.random.Generator) -> onnx.ModelProto:
    """The nodes in another order that is topological too, the constants in another order."""
    new = copied(model)
    left = list(model.graph.node)
    made = {name for node in left for name in node.output if name}
    done: set[str] = set()
    del new.graph.node[:]
    while left:
        ready = [n for n in left if (reads(n) & made) <= done]
        chosen = ready[int(random.integers(len(ready)))]
        left = [n for n in left if n is not chosen]
        done.update(chosen.output)
        new.graph.node.append(chosen)
    tensors = [model.graph.initializer[i] for i in random.permutation(len(model.graph.initializer))]
    del new.graph.initializer[:]
    new.graph.initializer.extend(tensors)
    return new


def to_constants(model: onnx.ModelProto, random: np.random.Generator) -> onnx.ModelProto:
    """Each initialiser as a Constant node."""
    new = copied(model)
    made = [helper.make_node("Constant", [], [t.name], value=t) for t in model.graph.initializer]
    del new.graph.initializer[:]
    nodes = list(model.graph.node)
    del new.graph.node[:]
    new.graph.node.extend([*made, *nodes])
    return new


def from_constants(model: onnx.ModelProto, random: np.random.Generator) -> onnx.ModelProto:
    """Each Constant node as an initialiser."""
    new = copied(model)
    del new.graph.node[:]
    for node in model.graph.node:
        value = next((a.t for a in node.attribute if a.name == "value"), None)
        if node.op_type == "Constant" and value is not None:
            tensor = new.graph.initializer.add()
            tensor.CopyFrom(value)
            tensor.name = node.output[0]
        else:
            new.graph.node.append(node)
    return new


def wrapped(model: onnx.ModelProto, random: np.random.Generator) -> onnx.ModelProto:
    """A run of nodes as a call of a local function."""
    nodes = list(model.graph.node)
    first = int(random.integers(len(nodes)))
    last = min(len(nodes), first + 1 + int(random.integers(8)))
    part, rest = nodes[first:last], [*nodes[:first], *nodes[last:]]
    made = [name for node in part for name in node.output if name]
    read = sorted(set().union(*(reads(n) for n in part)) - set(made))
    outside = set().union(*(reads(n) for n in rest)) if rest else set()
    outside |= {o.name for o in model.graph.output}
    given = [name for name in made if name in outside]
    new = copied(model)
    if not given or {node.domain for node in part} - {"", WRAPPED} or not read:
        return new
    function = helper.make_function(
        WRAPPED, "Part", read, given, part, [o for o in model.opset_import if o.domain == ""]
    )
    new.functions.append(function)
    new.opset_import.append(helper.make_opsetid(WRAPPED, 1))
    new.ir_version = max(new.ir_version, 8)
    del new.graph.node[:]
    call = helper.make_node("Part", read, given, "call", domain=WRAPPED)
    new.graph.node.extend([*nodes[:first], call, *nodes[last:]])
    return new


SAME: dict[str, Transform] = {
    "renamed": renamed,
    "reordered": reordered,
    "to Constant nodes": to_constants,
    "from Constant nodes": from_constants,
    "wrapped in a function": wrapped,
}
"""What changes no answer."""


def with_identity(
    model: onnx.ModelProto, behind: Collection[str], random: np.random.Generator
) -> onnx.ModelProto:
    """An Identity behind one of the tensors ``behind``, which all its readers read."""
    new = copied(model)
    name = sorted(behind)[int(random.integers(len(behind)))]
    for place, node in enumerate(model.graph.node):
        if name not in node.output:
            continue
        _rename(new.graph.node, {name: "identity_out"})
        made = new.graph.node[place]
        made.CopyFrom(node)
        new.graph.node.insert(
            place + 1, helper.make_node("Identity", [name], ["identity_out"], "identity")
        )
        break
    return with_shapes(new)
