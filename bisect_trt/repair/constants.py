"""Rules that move constants: *fold-bn*, *shift-to-norm* and *const-through*."""

from __future__ import annotations

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from bisect_trt.model.graph import Graph
from bisect_trt.model.walk import attribute
from bisect_trt.repair.edits import (
    HEADROOM,
    LARGEST_FP16,
    SMALLEST_NORMAL_FP16,
    Changed,
    Edit,
    NoMatchError,
    Proposal,
    Ranges,
    Rule,
    Wiring,
    at_stake,
    copied,
    require,
    searched,
    size_words,
)

Array = NDArray[np.float64]

MATRIX = ("Conv", "ConvTranspose", "Gemm", "MatMul")


def propose_fold_bn(graph: Graph, ranges: Ranges) -> Proposal:
    """Folds a BatchNormalization whose constants or input leave FP16's range.

    Identity: BN(W x + c) = (a W) x + (a c + b) with a = scale / sqrt(var + eps), b = bias - a mean,
    computed in double precision. It goes into the matrix operator in front, or into a convolution
    without padding behind, or becomes a Mul and an Add. Sources: TensorRT #2186, YOLOX #1575.
    """
    return searched(graph, ranges, Rule.FOLD_BN, _fold)


def _fold(wiring: Wiring, ranges: Ranges, index: int) -> Edit:
    node = wiring.nodes[index]
    require(node.op_type == "BatchNormalization" and not attribute(node, "training_mode", 0))
    require(all(not o for o in node.output[1:]))
    require(all(n in wiring.constants for n in node.input[1:5]))
    scale, bias, mean, variance = (
        np.asarray(wiring.constants[n], np.float64) for n in node.input[1:5]
    )
    epsilon = float(attribute(node, "epsilon", 1e-5))
    source, result = node.input[0], node.output[0]
    near = at_stake(ranges, (source, result))
    require(near or _is_extreme(variance) or _is_extreme(mean) or _has_tiny_weights(wiring, source))
    require(scale.ndim == 1)  # before opset 9 there may be one for each place
    a = scale / np.sqrt(variance + epsilon)
    b = bias - a * mean
    before = Changed(node.input[4], size_words(variance), "folded")
    try:
        return _into_maker(wiring, index, a, b, before)
    except NoMatchError:
        pass
    try:
        return _into_reader(wiring, index, a, b, before)
    except NoMatchError:
        return _as_mul_and_add(wiring, index, a, b, before)


def _is_extreme(values: Array) -> bool:
    sizes = np.abs(values[values != 0])
    if not sizes.size:
        return False
    return bool(sizes.max() > LARGEST_FP16 / HEADROOM or sizes.min() < SMALLEST_NORMAL_FP16)


def _has_tiny_weights(wiring: Wiring, tensor: str) -> bool:
    """Whether ``tensor`` is made by weights that FP16 holds as subnormal numbers."""
    maker = wiring.maker.get(tensor, -1)
    if maker < 0 or wiring.nodes[maker].op_type not in MATRIX:
        return False
    weight = wiring.nodes[maker].input[1]
    if weight not in wiring.constants or not wiring.constants.count(weight):
        return False
    return bool(np.abs(wiring.constants[weight]).max() < SMALLEST_NORMAL_FP16)


def _into_maker(wiring: Wiring, index: int, a: Array, b: Array, before: Changed) -> Edit:
    """Folds into the matrix operator that makes the input."""
    node = wiring.nodes[index]
    source = node.input[0]
    require(wiring.is_inner(source))
    maker = wiring.made_by(source, *MATRIX, "Add")
    plus: int | None = None
    if wiring.nodes[maker].op_type == "Add":  # the bias of a MatMul
        plus = maker
        product, constant = wiring.with_constant(plus)
        require(wiring.is_inner(product))
        maker = wiring.made_by(product, "MatMul")
        offset = np.asarray(wiring.constants[constant], np.float64)
        require(_is_row(offset, a.size))
        b = b + a * offset.ravel()
    matrix = wiring.nodes[maker]
    require(matrix.input[1] in wiring.constants)
    weight = np.asarray(wiring.constants[matrix.input[1]], np.float64)
    new = copied(matrix, [wiring.names[index]] + ([wiring.names[plus]] if plus is not None else []))
    name, shift = wiring.fresh(f"{matrix.input[1]}__folded"), wiring.fresh(f"{new.name}__shift")
    constants = {name: _scaled(matrix, weight, a).astype(np.float32)}
    new.input[1] = name
    gone = [i for i in (index, plus) if i is not None]
    if matrix.op_type == "MatMul":
        require(wiring.graph.types.ranks.get(source) == 2 and weight.ndim == 2)
        constants[shift] = b.astype(np.float32)
        add = helper.make_node("Add", [new.output[0], shift], [node.output[0]], wiring.names[index])
        replaced = {maker: (new,), **dict.fromkeys(gone, ()), index: (add,)}
    else:
        b = b + a * _bias(wiring, matrix, a.size)
        constants[shift] = b.astype(np.float32)
        kept = list(new.input[:2])
        del new.input[:]
        new.input.extend([*kept, shift])
        if matrix.op_type == "Gemm":
            _forget(new, "beta")
        new.output[0] = node.output[0]
        replaced = {maker: (new,), index: ()}
    changed = Changed(matrix.input[1], size_words(weight), size_words(constants[name]))
    return Edit(
        rule=Rule.FOLD_BN,
        nodes=(wiring.names[maker], *(wiring.names[i] for i in gone)),
        tensors=(source,),
        sentence=f"folded into {wiring.names[maker]}",
        changed=(before, changed),
        replaced=replaced,
        constants=constants,
    )


def _scaled(matrix: onnx.NodeProto, weight: Array, a: Array) -> Array:
    """The weight whose outputs are ``a`` times as large, channel by channel."""
    if matrix.op_type == "Conv":
        require(weight.shape[0] == a.size)
        return np.asarray(weight * a.reshape(-1, *[1] * (weight.ndim - 1)))
    if matrix.op_type == "ConvTranspose":
        groups = int(attribute(matrix, "group", 1))
        require(weight.shape[1] * groups == a.size)
        split = weight.reshape(groups, -1, *weight.shape[1:])
        factors = a.reshape(groups, 1, -1, *[1] * (weight.ndim - 2))
        return np.asarray((split * factors).reshape(weight.shape))
    if matrix.op_type == "Gemm" and attribute(matrix, "transB", 0):
        require(weight.shape[0] == a.size)
        return np.asarray(weight * a[:, None])
    require(weight.shape[-1] == a.size)
    return np.asarray(weight * a)


def _bias(wiring: Wiring, matrix: onnx.NodeProto, channels: int) -> Array:
    """The bias of a matrix operator, zeros where it has none."""
    if len(matrix.input) < 3 or not matrix.input[2]:
        return np.zeros(channels)
    require(matrix.input[2] in wiring.constants)
    found = np.asarray(wiring.constants[matrix.input[2]], np.float64)
    require(_is_row(found, channels))
    beta = float(attribute(matrix, "beta", 1.0)) if matrix.op_type == "Gemm" else 1.0
    return np.broadcast_to(found.ravel() * beta, (channels,))


def _is_row(bias: Array, channels: int) -> bool:
    """Whether a bias has one value, or one for each of the last axis."""
    return bias.size in (1, channels) and (bias.ndim < 2 or bias.shape[-1] == bias.size)


def _forget(node: onnx.NodeProto, name: str) -> None:
    kept = [a for a in node.attribute if a.name != name]
    del node.attribute[:]
    node.attribute.extend(kept)


def _into_reader(wiring: Wiring, index: int, a: Array, b: Array, before: Changed) -> Edit:
    """Folds into a convolution without padding that alone reads the result."""
    node = wiring.nodes[index]
    reader = wiring.only_reader(node.output[0], "Conv")
    conv = wiring.nodes[reader]
    require(conv.input[0] == node.output[0] and conv.input[1] in wiring.constants)
    require(not any(attribute(conv, "pads", ())))
    require(attribute(conv, "auto_pad", b"NOTSET") in (b"NOTSET", b"VALID"))
    weight = np.asarray(wiring.constants[conv.input[1]], np.float64)
    groups = int(attribute(conv, "group", 1))
    require(weight.shape[1] * groups == a.size)
    per_group = weight.shape[0] // groups
    spread = [1] * (weight.ndim - 2)
    a_of = np.repeat(a.reshape(groups, -1), per_group, axis=0).reshape(*weight.shape[:2], *spread)
    b_of = np.repeat(b.reshape(groups, -1), per_group, axis=0).reshape(*weight.shape[:2], *spread)
    shift = (weight * b_of).reshape(weight.shape[0], -1).sum(axis=1)
    shift = shift + _bias(wiring, conv, weight.shape[0])
    new = copied(conv, [wiring.names[index]])
    name, bias = wiring.fresh(f"{conv.input[1]}__folded"), wiring.fresh(f"{new.name}__shift")
    del new.input[:]
    new.input.extend([node.input[0], name, bias])
    folded = (weight * a_of).astype(np.float32)
    return Edit(
        rule=Rule.FOLD_BN,
        nodes=(wiring.names[index], wiring.names[reader]),
        tensors=(node.input[0], node.output[0]),
        sentence=f"folded into {wiring.names[reader]} behind it",
        changed=(before, Changed(conv.input[1], size_words(weight), size_words(folded))),
        replaced={index: (), reader: (new,)},
        constants={name: folded, bias: shift.astype(np.float32)},
    )


def _as_mul_and_add(wiring: Wiring, index: int, a: Array, b: Array, before: Changed) -> Edit:
    """Writes the normalisation as a Mul and an Add along the channels."""
    node = wiring.nodes[index]
    rank = wiring.graph.types.ranks.get(node.input[0])
    if rank is None or rank < 2:
        raise NoMatchError("the rank of its input is not known")
    shape = (-1, *[1] * (rank - 2))
    factor, shift = wiring.fresh(f"{node.name}__factor"), wiring.fresh(f"{node.name}__shift")
    inner = wiring.fresh(f"{node.output[0]}__scaled")
    mul = helper.make_node(
        "Mul", [node.input[0], factor], [inner], wiring.fresh(f"{node.name}__Mul")
    )
    add = helper.make_node("Add", [inner, shift], [node.output[0]], node.name)
    return Edit(
        rule=Rule.FOLD_BN,
        nodes=(wiring.names[index],),
        tensors=(node.input[0],),
        sentence="written as Mul and Add",
        changed=(before,),
        replaced={index: (mul, add)},
        constants={
            factor: a.reshape(shape).astype(np.float32),
            shift: b.reshape(shape).astype(np.float32),
        },
    )


MIN_SHIFT = 8.0
"""A bias this many times as large as a tensor's other values hides them from FP16's eleven bits."""


def propose_shift_to_norm(graph: Graph, ranges: Ranges) -> Proposal:
    """Takes from a bias the part that a normalisation behind it removes again.

    Identity: norm(x + c) = norm(x) where c is constant over what the norm averages: each channel
    for InstanceNormalization, all features for LayerNormalization. Source: TensorRT #2691.
    """
    return searched(graph, ranges, Rule.SHIFT_TO_NORM, _shift)


def _shift(wiring: Wiring, ranges: Ranges, index: int) -> Edit:
    norm = wiring.nodes[index]
    require(norm.op_type in ("InstanceNormalization", "LayerNormalization"))
    require(norm.op_type == "InstanceNormalization" or len(norm.output) == 1)
    source = norm.input[0]
    require(wiring.is_inner(source))
    maker = wiring.made_by(source, "Conv", "ConvTranspose", "Gemm", "Add")
    node = wiring.nodes[maker]
    if node.op_type == "Add":
        _, name = wiring.with_constant(maker)
    else:
        require(len(node.input) > 2 and node.input[2] in wiring.constants)
        name = node.input[2]
    slot = list(node.input).index(name)
    bias = np.asarray(wiring.constants[name], np.float64)
    kept = bias - _cancelled(wiring, norm, node, bias)
    removed = np.abs(bias - kept).max(initial=0.0)
    spread = np.abs(kept).max(initial=0.0)
    require(source in ranges and removed >= 1.0)
    require(removed > spread and removed * MIN_SHIFT > ranges[source].largest)
    new = copied(node)
    new.input[slot] = wiring.fresh(f"{name}__centred")
    after = kept.astype(np.float32)
    return Edit(
        rule=Rule.SHIFT_TO_NORM,
        nodes=(wiring.names[maker], wiring.names[index]),
        tensors=(source,),
        sentence=f"the offset that {wiring.names[index]} removes is left out",
        changed=(Changed(name, size_words(bias), size_words(after)),),
        replaced={maker: (new,)},
        constants={new.input[slot]: after},
    )


def _cancelled(wiring: Wiring, norm: onnx.NodeProto, node: onnx.NodeProto, bias: Array) -> Array:
    """The part of ``bias`` that ``norm`` removes."""
    if norm.op_type == "InstanceNormalization":
        if node.op_type == "Add":  # the bias must be the same all over each channel
            rank = wiring.graph.types.ranks.get(norm.input[0])
            require(rank is not None)
            shape = (1,) * ((rank or 0) - bias.ndim) + bias.shape
            require(all(size == 1 for axis, size in enumerate(shape) if axis != 1))
        return bias
    axis = int(attribute(norm, "axis", -1))
    rank = wiring.graph.types.ranks.get(norm.input[0], 0)
    require(axis in (-1, rank - 1) and node.op_type in ("Gemm", "Add"))
    require(bias.ndim >= 1 and bias.size == bias.shape[-1])
    return np.full_like(bias, bias.mean())


_LARGEST, _SMALLEST_NORMAL = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)

PASSES = ("AveragePool", "GlobalAveragePool", "ReduceMean", "Reshape", "Transpose", "Flatten")
"""Linear operators without constants, which a factor may pass."""


def propose_const_through(graph: Graph, ranges: Ranges) -> Proposal:
    """Joins two factors between which a tensor leaves FP16's range.

    Identity: d * pool(c * x) = (c d) * pool(x) for scalars c and d, also where d divides. Source:
    the pooler of transformers #46277.
    """
    return searched(graph, ranges, Rule.CONST_THROUGH, _through)


def _through(wiring: Wiring, ranges: Ranges, index: int) -> Edit:
    first = wiring.nodes[index]
    factor = _factor(wiring, index)
    between, tensor = list[int](), first.output[0]
    tensors = [tensor]
    while True:
        require(wiring.is_inner(tensor))
        (reader,) = wiring.readers[tensor]
        node = wiring.nodes[reader]
        if node.op_type not in PASSES:
            break
        require(node.input[0] == tensor)
        between.append(reader)
        tensor = node.output[0]
        tensors.append(tensor)
    last = wiring.nodes[reader]
    require(last.input[0] == tensor or last.op_type == "Mul")
    joined = factor * _factor(wiring, reader)
    require(_SMALLEST_NORMAL <= abs(joined) <= _LARGEST and at_stake(ranges, tensors))
    source, _ = wiring.with_constant(index)
    name = wiring.fresh(f"{last.name}__joined")
    new = copied(last, [wiring.names[index]])
    new.op_type = "Mul"
    operand = tensor if between else source
    del new.input[:]
    new.input.extend([operand, name])
    replaced: dict[int, tuple[onnx.NodeProto, ...]] = {index: (), reader: (new,)}
    if between:
        moved = copied(wiring.nodes[between[0]])
        moved.input[0] = source
        replaced[between[0]] = (moved,)
    return Edit(
        rule=Rule.CONST_THROUGH,
        nodes=(wiring.names[index], *(wiring.names[i] for i in between), wiring.names[reader]),
        tensors=tuple(tensors),
        sentence=f"its factor joins that of {wiring.names[reader]}",
        changed=(Changed(f"{first.name}: factor", f"{factor:.4g}", f"{joined:.4g}"),),
        replaced=replaced,
        constants={name: np.array(joined, np.float32)},
    )


def _factor(wiring: Wiring, index: int) -> float:
    """The scalar by which a Mul or Div with a constant multiplies."""
    node = wiring.nodes[index]
    require(node.op_type in ("Mul", "Div"))
    source, constant = wiring.with_constant(index)
    require(node.op_type == "Mul" or node.input[0] == source)
    require(wiring.constants[constant].ndim <= wiring.graph.types.ranks.get(source, 0))
    value = wiring.scalar(constant)
    require(value != 0)
    return value if node.op_type == "Mul" else 1.0 / value
