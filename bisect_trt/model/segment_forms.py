"""Forms of a segment: whole, without names, with known shapes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from sys import intern
from typing import Any

import onnx
from numpy.typing import NDArray
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from bisect_trt.model.graph import operators
from bisect_trt.model.precision_rules import is_standard
from bisect_trt.model.shapes import shapes_of
from bisect_trt.model.switched import Segment, is_switch
from bisect_trt.model.tensor_types import captured_names, infer_types, opset_of

_SELECTS, _LISTS = 9, 11
"""The opsets that ``Where`` and ``SequenceConstruct`` came with."""


def without_branches(segment: Segment) -> Segment:
    """``segment`` with a ``Where`` for each switch; its values are the same.

    An infinity or NaN of the rounding that is not taken does not show. Control flow of the source
    stays as it is. The CPU's ``Where`` gives 0 for -0; :func:`with_lists` does not.
    """
    if opset_of(segment.model) < _SELECTS:
        return segment

    # A flag is a scalar: whatever shape the tensor has stays.
    def select(node: onnx.NodeProto, if_true: str, if_false: str) -> list[onnx.NodeProto]:
        inputs = [node.input[0], if_true, if_false]
        return [helper.make_node("Where", inputs, node.output, name=node.name)]

    return _flat(segment, select)[0]


def with_lists(segment: Segment) -> tuple[Segment, frozenset[str]]:
    """``segment`` with a list of both roundings for each switch, and its flag as the place in it;
    its values are the same bit for bit.
    """
    if opset_of(segment.model) < _LISTS:
        return segment, frozenset()

    def select(node: onnx.NodeProto, if_true: str, if_false: str) -> list[onnx.NodeProto]:
        both = [node.name]  # no tensor is called so: the name was made fresh
        return [
            helper.make_node("SequenceConstruct", [if_false, if_true], both),
            helper.make_node("SequenceAt", [*both, node.input[0]], node.output, name=node.name),
        ]

    flat, places = _flat(segment, select)
    for given in flat.model.graph.input:
        if given.name in places:
            given.type.tensor_type.elem_type = TensorProto.INT64
    return flat, places


def _flat(
    segment: Segment, select: Callable[[onnx.NodeProto, str, str], list[onnx.NodeProto]]
) -> tuple[Segment, frozenset[str]]:
    """``segment`` with what ``select`` makes of each switch, whose two results are computed before
    it, and the flags of those.
    """
    model = onnx.ModelProto()
    model.CopyFrom(segment.model)
    graph = model.graph
    del graph.node[:]
    flags = set()
    for node in segment.model.graph.node:
        if not is_switch(node, segment.flags):
            graph.node.append(node)
            continue
        bodies = {a.name: a.g for a in node.attribute}
        choices = [_inlined(graph, bodies[b]) for b in ("then_branch", "else_branch")]
        graph.node.extend(select(node, *choices))
        flags.add(node.input[0])
    return replace(segment, model=model), frozenset(flags)


def _inlined(graph: onnx.GraphProto, body: onnx.GraphProto) -> str:
    """The name under which the outer graph has the result of ``body``."""
    if len(body.node) == 1 and body.node[0].op_type == "Identity":
        return str(body.node[0].input[0])
    graph.initializer.extend(body.initializer)
    graph.node.extend(body.node)
    return str(body.output[0].name)


def joined(segments: Sequence[Segment], outputs: Sequence[str]) -> Segment:
    """``segments`` one after the other as one; what crossed a cut is a tensor inside."""
    first = segments[0].model
    target = onnx.ModelProto(ir_version=first.ir_version)
    target.opset_import.extend(first.opset_import)
    target.functions.extend(first.functions)
    graph = target.graph
    graph.name = first.graph.name
    # Constants stand in every segment that reads them.
    known: set[str] = set()
    for segment in segments:
        source = segment.model.graph
        graph.input.extend(i for i in source.input if i.name not in known)
        known.update(i.name for i in source.input)
        graph.initializer.extend(t for t in source.initializer if t.name not in known)
        known.update(t.name for t in source.initializer)
        for node in source.node:
            if node.op_type != "Constant" or not is_standard(node) or node.output[0] not in known:
                graph.node.append(node)
                known.update(node.output)
    given = {o.name: o for segment in segments for o in segment.model.graph.output}
    graph.output.extend(given[name] for name in outputs)
    for segment in segments:
        graph.value_info.extend(segment.model.graph.value_info)
    return Segment(
        target,
        tuple(dict.fromkeys(n for s in segments for n in s.takes if n not in given)),
        tuple(outputs),
        {name: flag for s in segments for name, flag in s.flags.items()},
        {name: weight for s in segments for name, weight in s.weights.items()},
    )


_SMALL = 1024
"""Elements of a tensor that says what a shape becomes."""

_TYPES = frozenset({TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL, TensorProto.FLOAT})

_TELLS = frozenset({"Shape", "Size"})
"""Operators that ask for the shape of a tensor and not for its values."""

_OF_SHAPES = frozenset(
    {
        *("Add", "And", "Cast", "Ceil", "Concat", "Constant", "ConstantOfShape", "Div", "Equal"),
        *("Expand", "Floor", "Gather", "Greater", "GreaterOrEqual", "Identity", "Less"),
        *("LessOrEqual", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or", "Range", "ReduceProd"),
        *("Reshape", "Slice", "Split", "Sqrt", "Squeeze", "Sub", "Transpose", "Unsqueeze", "Where"),
    }
)
"""Operators that exporters compute shapes with."""

_MOVES = frozenset({"Cast", "Concat", "Constant", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
"""Operators through which constants come to those."""


def told_by_shapes(
    segment: Segment, shapes: Mapping[str, tuple[int, ...]], known: Collection[str]
) -> tuple[str, ...]:
    """The tensors that ``segment`` computes from shapes and what is known alone, and reads
    elsewhere. Inference says no more than that a shape follows from others: what it is, a runtime
    may round otherwise (a ``Resize`` by 0.7). Bodies are left alone. After :func:`with_constants`
    more may follow.
    """
    graph = segment.model.graph
    if not known and not any(node.op_type in _TELLS for node in graph.node):
        return ()
    inferred = _inferred(segment, shapes)
    sizes = shapes_of(inferred)
    small = _small(inferred, sizes)
    derived = set(known)
    there = derived.union(t.name for t in graph.initializer)
    told: set[str] = set()
    for node in graph.node:
        if _asks(node, sizes) or (_follows(node, there, derived) and small.issuperset(node.output)):
            told.update(node.output)
            derived.update(node.output)
            there.update(node.output)
        elif is_standard(node) and node.op_type in _MOVES and there.issuperset(_reads(node)):
            there.update(node.output)
    read = {*segment.gives}
    for node in graph.node:
        if not told.issuperset(node.output):
            read.update(_reads(node))
    return tuple(sorted(told & read))


def giving(segment: Segment, names: Collection[str]) -> Segment:
    """What of ``segment`` gives its tensors ``names``, and them alone."""
    types = infer_types(segment.model)
    outputs = [helper.make_tensor_value_info(n, types.type_of(n), None) for n in names]
    return _pruned(segment, tuple(names), outputs, {})


def with_constants(segment: Segment, arrays: Mapping[str, NDArray[Any]]) -> Segment:
    """``segment`` with tensors as constants. It takes none of them, gives none of them, and has no
    node that is left without a reader.
    """
    gives = tuple(name for name in segment.gives if name not in arrays)
    outputs = [o for o in segment.model.graph.output if o.name in gives]
    return _pruned(segment, gives, outputs, arrays)


def _pruned(
    segment: Segment,
    gives: tuple[str, ...],
    outputs: Sequence[onnx.ValueInfoProto],
    arrays: Mapping[str, NDArray[Any]],
) -> Segment:
    """What gives ``gives``, declared by ``outputs``, with ``arrays`` as constants."""
    model = onnx.ModelProto()
    model.CopyFrom(segment.model)
    graph = model.graph
    needed = set(gives)
    kept = []
    for node in reversed(graph.node):
        left = [name for name in node.output if name and name not in arrays]
        if needed.intersection(left):
            kept.append(node)
            needed.update(_reads(node))
    nodes = list(reversed(kept))
    inputs = [i for i in graph.input if i.name in needed and i.name not in arrays]
    stored = [t for t in graph.initializer if t.name in needed and t.name not in arrays]
    stored += [numpy_helper.from_array(arrays[n], n) for n in sorted(needed & arrays.keys())]
    for field, left_over in (
        (graph.node, nodes),
        (graph.input, inputs),
        (graph.output, outputs),
        (graph.initializer, stored),
    ):
        del field[:]
        field.extend(left_over)
    names = {i.name for i in inputs}
    return replace(
        segment,
        model=model,
        takes=tuple(name for name in segment.takes if name in names),
        gives=gives,
        flags={name: flag for name, flag in segment.flags.items() if name in names},
        weights={name: weight for name, weight in segment.weights.items() if name in names},
    )


def _inferred(segment: Segment, shapes: Mapping[str, tuple[int, ...]]) -> onnx.GraphProto:
    """The graph with what ONNX's inference tells of its tensors; what the model declares is not
    believed: exporters write the shapes of one input.
    """
    model = onnx.ModelProto()
    model.CopyFrom(segment.model)
    del model.graph.value_info[:]
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    for value in model.graph.input:
        if value.name in shapes:
            kind = value.type.tensor_type.elem_type
            value.CopyFrom(helper.make_tensor_value_info(value.name, kind, shapes[value.name]))
    try:
        return onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    except Exception:  # the library raises several kinds; then nothing is known
        return model.graph


def _asks(node: onnx.NodeProto, sizes: Mapping[str, tuple[int | None, ...]]) -> bool:
    """Whether ``node`` asks for a shape that follows from others."""
    if node.op_type not in _TELLS or not is_standard(node):
        return False
    shape = sizes.get(node.input[0])
    return shape is not None and None not in shape


def _follows(node: onnx.NodeProto, there: set[str], derived: set[str]) -> bool:
    """Whether ``node`` reads what is known, and something of a shape among it."""
    read = [name for name in node.input if name]
    return (
        node.op_type in _OF_SHAPES
        and is_standard(node)
        and there.issuperset(read)
        and not derived.isdisjoint(read)
    )


def _small(graph: onnx.GraphProto, known: Mapping[str, tuple[int | None, ...]]) -> set[str]:
    """The tensors that are known to have few elements, of a type that sizes and scales have. Not
    those of 16 bits: ONNX Runtime's CPU provider rounds them at some nodes and not at others.
    """
    found = set()
    for value in (*graph.value_info, *graph.output):
        shape = known.get(value.name)
        sizes = [size for size in shape or () if size is not None]
        if shape is None or len(sizes) < len(shape) or math.prod(sizes) > _SMALL:
            continue
        if value.type.tensor_type.elem_type in _TYPES:
            found.add(value.name)
    return found


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    yield from (name for name in node.input if name)
    yield from captured_names(node)


_NUMBER = re.compile(r"@(node)?(\d+)")


@dataclass(frozen=True, slots=True)
class Names:
    """What a segment's own names are in the one without: of each tensor that it takes, gives, or is
    switched by ``outside``, and in the same place ``numbers``; ``nodes`` are those of its nodes.
    """

    outside: tuple[str, ...]
    numbers: tuple[str, ...]
    nodes: tuple[str, ...]

    @property
    def inside(self) -> dict[str, str]:
        """The number of each tensor."""
        return dict(zip(self.outside, self.numbers, strict=True))

    def own(self, text: str) -> str:
        """``text``, a message about the segment without names, with its own ones."""
        outside = dict(zip(self.numbers, self.outside, strict=True))
        outside |= {f"@node{number}": name for number, name in enumerate(self.nodes)}
        return _NUMBER.sub(lambda found: outside.get(found[0], found[0]), text)


def nameless(segment: Segment) -> tuple[Segment, Names]:
    """``segment`` with its tensors numbered in the order in which they come up, and without what
    documents it, or the shapes of what it takes: behind a cut they are not known either. (A Scan
    needs them.)
    """
    model = onnx.ModelProto()
    model.CopyFrom(segment.model)
    graph = model.graph
    # A switch is known by its tensor, whose name is there anyway.
    nodes = tuple(
        intern(node.output[0] if is_switch(node, segment.flags) else node.name)
        for node in graph.node
    )
    numbers: dict[str, str] = {}
    _rename(graph, numbers)
    for number, node in enumerate(graph.node):
        node.name = f"@node{number}"
    scans = "Scan" in operators(graph.node)
    taken = set() if scans else {numbers[name] for name in segment.takes}
    for value in graph.input:
        if value.name in taken and value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
    flags = {numbers[name]: flag for name, flag in segment.flags.items()}
    weights = {numbers[name]: weight for name, weight in segment.weights.items()}
    takes, gives = (tuple(numbers[n] for n in names) for names in (segment.takes, segment.gives))
    outside = (*segment.takes, *segment.gives, *segment.flags, *segment.weights)
    renamed = replace(segment, model=model, takes=takes, gives=gives, flags=flags, weights=weights)
    inside = tuple(intern(numbers[name]) for name in outside)
    return renamed, Names(tuple(map(intern, outside)), inside, nodes)


def _rename(graph: onnx.GraphProto, numbers: dict[str, str]) -> None:
    """Number the tensors of ``graph`` and of its bodies, which may read those around them: one name
    has one number everywhere.
    """
    graph.name, graph.doc_string = "graph", ""
    del graph.value_info[:], graph.metadata_props[:]
    sparse = [tensor.values for tensor in graph.sparse_initializer]
    for value in (*graph.input, *graph.output, *graph.initializer, *sparse):
        value.name = _number(value.name, numbers)
        value.doc_string = ""
        del value.metadata_props[:]
    for node in graph.node:
        node.name = node.doc_string = ""
        del node.metadata_props[:]
        for names in (node.input, node.output):
            for slot, name in enumerate(names):
                if name:
                    names[slot] = _number(name, numbers)
        for attribute in node.attribute:
            attribute.doc_string = ""
            if attribute.type == AttributeProto.TENSOR:
                attribute.t.name = attribute.t.doc_string = ""
            for body in _bodies(attribute):
                _rename(body, numbers)


def _number(name: str, numbers: dict[str, str]) -> str:
    return numbers.setdefault(name, f"@{len(numbers)}")


def _bodies(attribute: onnx.AttributeProto) -> Iterator[onnx.GraphProto]:
    if attribute.type == AttributeProto.GRAPH:
        yield attribute.g
    yield from attribute.graphs


@dataclass(frozen=True)
class Choice:
    """The inputs in place of one weight: its two versions and what says that the reduced one is
    read.
    """

    pinned: str
    reduced: str
    switch: str


def with_weights_chosen(segment: Segment) -> tuple[onnx.ModelProto, Mapping[str, Choice]]:
    """The model of ``segment`` with a ``Where`` for each weight, and the inputs of each."""
    model = onnx.ModelProto()
    model.CopyFrom(segment.model)
    graph = model.graph
    taken = {name for node in graph.node for name in (*node.input, *node.output)}
    taken.update(i.name for i in graph.input)

    def fresh(name: str) -> str:
        while name in taken:
            name += "_"
        taken.add(name)
        return name

    declared = {i.name: i for i in graph.input}
    choices, selected = {}, []
    for name in segment.weights:
        choice = Choice(
            fresh(f"{name}__pinned"), fresh(f"{name}__lowered"), fresh(f"{name}__switch")
        )
        for version in (choice.pinned, choice.reduced):
            taken_as = onnx.ValueInfoProto()
            taken_as.CopyFrom(declared[name])
            taken_as.name = version
            graph.input.append(taken_as)
        graph.input.append(helper.make_tensor_value_info(choice.switch, TensorProto.BOOL, []))
        inputs = [choice.switch, choice.reduced, choice.pinned]
        selected.append(helper.make_node("Where", inputs, [name], fresh(f"{name}__selected")))
        choices[name] = choice
    kept = [i for i in graph.input if i.name not in segment.weights]
    nodes = [*selected, *graph.node]
    del graph.input[:], graph.node[:]
    graph.input.extend(kept)
    graph.node.extend(nodes)
    return model, choices
