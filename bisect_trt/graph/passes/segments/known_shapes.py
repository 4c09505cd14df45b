"""A segment at known shapes: what follows from them alone is computed once and stays.

Exporters let shapes follow the input: ``Shape``, a slice of it, and a ``Reshape`` by that. Devices
compute these on the host, and what goes there and back cannot be captured by a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
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


def what_shapes_tell(
    segment: Segment, shapes: Mapping[str, tuple[int, ...]], values: Mapping[str, NDArray[Any]]
) -> onnx.ModelProto | None:
    """A model without inputs that gives what ``segment`` computes from shapes and ``values`` alone
    and reads elsewhere; None where it computes nothing so. Bodies are left alone. After
    :func:`with_constants` more may be known.

    Args:
        segment: any.
        shapes: of what it takes.
        values: of what it takes, as far as they are to be constants.
    """
    graph = segment.model.graph
    inferred = _inferred(segment, shapes)
    known = shapes_of(inferred)
    small = _small(inferred, known)
    source: dict[str, TensorProto | onnx.NodeProto] = {t.name: t for t in graph.initializer}
    source |= {name: numpy_helper.from_array(array, name) for name, array in values.items()}
    there, derived = set(source), set(values)
    found: list[onnx.NodeProto] = []
    for node in graph.node:
        told = _told(node, known)
        if told is None and _follows(node, there, derived) and small.issuperset(node.output):
            told = node
        if told is not None:
            found.append(told)
            derived.update(node.output)
        elif is_standard(node) and node.op_type in _MOVES and there.issuperset(_reads(node)):
            source |= dict.fromkeys(node.output, node)
        else:
            continue
        there.update(node.output)
    gone = {name for node in found for name in node.output}
    read = {*segment.gives}
    for node in graph.node:
        if not gone.issuperset(node.output):
            read.update(_reads(node))
    wanted = sorted(gone & read)
    return _model_of(segment, found, wanted, source) if wanted else None


def with_constants(segment: Segment, arrays: Mapping[str, NDArray[Any]]) -> Segment:
    """``segment`` with tensors as constants. It takes none of them, gives none of them, and has no
    node that is left without a reader.

    Args:
        segment: gives something else too.
        arrays: by the names of its tensors.
    """
    model = onnx.ModelProto()
    model.CopyFrom(segment.model)
    graph = model.graph
    gives = tuple(name for name in segment.gives if name not in arrays)
    needed = set(gives)
    kept = []
    for node in reversed(graph.node):
        left = [name for name in node.output if name and name not in arrays]
        if needed.intersection(left):
            kept.append(node)
            needed.update(_reads(node))
    nodes = list(reversed(kept))
    inputs = [i for i in graph.input if i.name in needed and i.name not in arrays]
    outputs = [o for o in graph.output if o.name in gives]
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
    """The graph with what ONNX's inference tells of its tensors."""
    model = onnx.ModelProto()
    model.CopyFrom(segment.model)
    for value in model.graph.input:
        if value.name in shapes:
            kind = value.type.tensor_type.elem_type
            value.CopyFrom(helper.make_tensor_value_info(value.name, kind, shapes[value.name]))
    try:
        return onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    except Exception:  # the library raises several kinds; then nothing is known
        return model.graph


def _told(
    node: onnx.NodeProto, known: Mapping[str, tuple[int | None, ...]]
) -> onnx.NodeProto | None:
    """A constant in place of a node that asks for a known shape."""
    if node.op_type not in _TELLS or not is_standard(node):
        return None
    shape = known.get(node.input[0])
    sizes = [size for size in shape or () if size is not None]
    if shape is None or len(sizes) < len(shape):
        return None
    ends = {a.name: a.i for a in node.attribute}
    told = sizes[slice(ends.get("start"), ends.get("end"))]
    dims = [len(told)]
    if node.op_type == "Size":
        told, dims = [math.prod(sizes)], []
    value = helper.make_tensor("", TensorProto.INT64, dims, told)
    return helper.make_node("Constant", [], node.output, node.name, value=value)


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


def _model_of(
    segment: Segment,
    nodes: list[onnx.NodeProto],
    wanted: list[str],
    source: Mapping[str, TensorProto | onnx.NodeProto],
) -> onnx.ModelProto:
    """``nodes`` as a model of their own that gives ``wanted``."""
    made = {name for node in nodes for name in node.output}
    model = onnx.ModelProto(ir_version=segment.model.ir_version)
    model.opset_import.extend(segment.model.opset_import)
    graph = model.graph
    graph.name = "what shapes tell"
    read = {name for node in nodes for name in _reads(node)} - made
    constants: list[onnx.NodeProto] = []
    for name, stored in reversed(list(source.items())):  # whoever reads it comes after it
        if name not in read:
            continue
        if isinstance(stored, TensorProto):
            graph.initializer.append(stored)
        elif not any(stored is node for node in constants):
            constants.append(stored)
            read.update(_reads(stored))
    graph.node.extend([*reversed(constants), *nodes])
    types = infer_types(segment.model)
    graph.output.extend(
        helper.make_tensor_value_info(name, types.type_of(name), None) for name in wanted
    )
    return model
