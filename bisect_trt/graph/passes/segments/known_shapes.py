"""A segment at known shapes: what follows from them alone is computed once and stays.

Exporters let shapes follow the input: ``Shape``, a slice of it, and a ``Reshape`` by that. Devices
compute these on the host, and what goes there and back cannot be captured by a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from bisect_trt.graph.model.shapes import shapes_of
from bisect_trt.graph.passes.segments.segment import Segment
from bisect_trt.graph.tensors.operator_rules import is_standard
from bisect_trt.graph.tensors.tensor_types import captured_names, infer_types

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

    Args:
        segment: any.
        shapes: of what it takes.
        known: its tensors that are constants for these shapes.
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

    Args:
        segment: gives something else too.
        arrays: by the names of its tensors.
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
