"""Rules about values at the ends of the range: *mask*, *epsilon* and *log-sum-exp*."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from bisect_trt.model.graph import Graph
from bisect_trt.model.walk import attribute
from bisect_trt.repair.edits import (
    HEADROOM,
    LARGEST_FP16,
    SMALLEST_FP16,
    Changed,
    Edit,
    NoMatchError,
    Proposal,
    Ranges,
    Rule,
    Wiring,
    at_stake,
    copied,
    note_origins,
    require,
    searched,
)

MASKED = -(2.0**14)
"""What a masked score becomes: Softmax makes 0 of it, and FP16 has room for four times as much."""

LARGEST_SCORE = -MASKED / 2
"""Scores up to here stay far enough above :data:`MASKED` that Softmax makes 0 of what is masked."""

_MOVES = ("Reshape", "Transpose", "Identity", "Squeeze", "Unsqueeze", "Dropout")


def propose_mask(graph: Graph, ranges: Ranges) -> Proposal:
    """Writes an additive mask beyond FP16's range as a choice between the score and a constant.

    Identity: softmax(s + mask) = softmax(Where(mask < -1, -2^14, s)) where the mask is 0 or one
    number so large that adding a score does not change it: |s| < ulp(mask) / 2. A row that is
    masked everywhere stays uniform. Sources: onnxscript #2654 and #2992, TensorRT #2899 and #3101.
    """
    return searched(graph, ranges, Rule.MASK, _mask)


def _mask(wiring: Wiring, ranges: Ranges, index: int) -> Edit:
    node = wiring.nodes[index]
    require(node.op_type == "Add" and _ends_in_softmax(wiring, node.output[0]))
    scores, mask, lowest = _sides(wiring, ranges, node)
    require(lowest < -LARGEST_FP16 / HEADROOM)
    require(wiring.graph.opset >= _HAS_WHERE, f"Where needs opset {_HAS_WHERE}")
    largest = ranges[scores].largest if scores in ranges else 0.0
    if scores in wiring.constants:
        largest = float(np.abs(wiring.constants[scores]).max(initial=0.0))
    with np.errstate(over="ignore"):  # of the largest number there is
        limit = min(float(np.spacing(np.float32(-lowest))) / 2, LARGEST_SCORE)
    require(
        largest < limit,
        f"scores reach {largest:.4g}, and a mask of {lowest:.4g} hides them below {limit:.4g} only",
    )
    masks, before, constants = _chooser(wiring, ranges, mask, lowest)
    constant = wiring.fresh(f"{node.name}__masked")
    new = copied(node)
    new.op_type = "Where"
    del new.input[:]
    new.input.extend([masks, constant, scores])
    return Edit(
        rule=Rule.MASK,
        nodes=(node.name,),
        tensors=(mask, node.output[0]),
        sentence=f"a masked score becomes {MASKED:g}",
        changed=(Changed(mask, f"{lowest:.4g}", f"{MASKED:g}"),),
        replaced={index: (*before, new)},
        constants={**constants, constant: np.array(MASKED, np.float32)},
    )


def _ends_in_softmax(wiring: Wiring, tensor: str) -> bool:
    """Whether only a Softmax reads ``tensor``, perhaps after it was moved."""
    while wiring.is_inner(tensor):
        (reader,) = wiring.readers[tensor]
        node = wiring.nodes[reader]
        if node.op_type == "Softmax":
            return True
        if node.op_type not in _MOVES or node.input[0] != tensor:
            return False
        tensor = node.output[0]
    return False


def _sides(wiring: Wiring, ranges: Ranges, node: onnx.NodeProto) -> tuple[str, str, float]:
    """The scores, the mask and its lowest value: the operand that reaches below FP16's range."""
    found = []
    for mask, scores in (tuple(node.input), tuple(reversed(node.input))):
        if mask in wiring.constants:
            values = np.asarray(wiring.constants[mask])
            lowest = float(values[np.isfinite(values)].min(initial=0.0))
        elif mask in ranges:
            lowest = -ranges[mask].largest
        else:
            continue
        found.append((scores, mask, lowest))
    require(bool(found))
    return min(found, key=lambda side: side[2])


Chooser = tuple[str, tuple[onnx.NodeProto, ...], dict[str, NDArray[Any]]]
"""A tensor of truth values, the nodes that make it, and their constants."""


def _chooser(wiring: Wiring, ranges: Ranges, mask: str, lowest: float) -> Chooser:
    """What says where ``mask`` masks; the nodes that make it come with the first reader."""
    if mask in wiring.shared:
        return wiring.shared[mask], (), {}
    if mask in wiring.constants:
        values = np.asarray(wiring.constants[mask])
        _two_valued(values, lowest)
        name = wiring.shared[mask] = wiring.fresh(f"{mask}__masks")
        return name, (), {name: values < -1}
    _check_two_values(wiring, ranges, mask, lowest)
    index = wiring.maker.get(mask, -1)
    source, operator, bound = mask, "Less", -1.0
    if index >= 0 and wiring.nodes[index].op_type == "Mul":
        # In FP16 the product of 0 and the lowest is NaN, so that the other factor is compared.
        source, constant = wiring.with_constant(index)
        factor = wiring.scalar(constant)
        require(abs(factor) == -np.float32(lowest), "the mask is more than a product")
        operator, bound = ("Greater", 0.5) if factor < 0 else ("Less", -0.5)
    limit, result = wiring.fresh(f"{mask}__limit"), wiring.fresh(f"{mask}__masks")
    name = wiring.fresh(f"{result}__{operator}")
    wiring.shared[mask] = result
    node = helper.make_node(operator, [source, limit], [result], name)
    return result, (node,), {limit: np.array(bound, np.float32)}


def _check_two_values(wiring: Wiring, ranges: Ranges, mask: str, lowest: float) -> None:
    """Refuses unless each value of ``mask`` was 0 or ``lowest`` on all inputs."""
    found = ranges.get(mask)
    several = "the mask has values beside 0 and its lowest"
    require(found is not None and found.smallest == found.largest, several)
    require(not ranges[mask].positive, several)
    index = wiring.maker.get(mask, -1)
    if index < 0:
        return
    node = wiring.nodes[index]
    if node.op_type in ("Unsqueeze", "Expand", "Reshape", "Identity", "Slice", "Transpose"):
        _check_two_values(wiring, ranges, node.input[0], lowest)
    elif node.op_type == "Where":
        require(all(n in wiring.constants for n in node.input[1:]), several)
        parts = [np.asarray(wiring.constants[n]).ravel() for n in node.input[1:]]
        _two_valued(np.concatenate(parts), lowest)
    else:
        require(node.op_type == "Mul", several)


def _two_valued(values: NDArray[Any], lowest: float) -> None:
    """Refuses unless each value is 0 or ``lowest``."""
    fits = (values == 0) | (values == np.float32(lowest))
    require(bool(fits.all()), "the mask has values beside 0 and its lowest")


def propose_epsilon(graph: Graph, ranges: Ranges) -> Proposal:
    """Guards a division whose epsilon FP16 rounds to 0.

    Identities: x / max(|x|, eps) = x / Where(|x| > 0, max(|x|, eps), 1), since x is 0 where its
    norm is; x / d = x / Where(d = 0, 1, d) for d = n + eps or its root, which is never 0 in real
    arithmetic. Sources: kornia #4021, OpenVINO #8676.
    """
    return searched(graph, ranges, Rule.EPSILON, _epsilon)


def _epsilon(wiring: Wiring, ranges: Ranges, index: int) -> Edit:
    node = wiring.nodes[index]
    if node.op_type == "Add":
        return _added_epsilon(wiring, index)
    require(node.op_type in ("Clip", "Max") and wiring.graph.opset >= _HAS_WHERE)
    if node.op_type == "Max":
        norm, constant = wiring.with_constant(index)
        epsilon = wiring.scalar(constant)
    elif len(node.input) > 1:
        require(len(node.input) == 2 or not node.input[2])
        norm, epsilon = node.input[0], wiring.scalar(node.input[1])
    else:
        norm, epsilon = node.input[0], float(attribute(node, "min", 0.0))
        require(attribute(node, "max", np.inf) > LARGEST_FP16)
    require(0 < epsilon < 2 * SMALLEST_FP16)
    vector = _normed(wiring, norm)
    _check_divides(wiring, node.output[0], vector)
    zero, one = wiring.fresh(f"{node.name}__zero"), wiring.fresh(f"{node.name}__one")
    guarded = wiring.fresh(f"{node.output[0]}__guarded")
    positive = wiring.fresh(f"{norm}__positive")
    new = copied(node)
    new.output[0] = guarded
    compare = helper.make_node(
        "Greater", [norm, zero], [positive], wiring.fresh(f"{positive}__Greater")
    )
    choose = helper.make_node(
        "Where", [positive, guarded, one], [node.output[0]], wiring.fresh(f"{node.name}__Where")
    )
    note_origins(choose, [node.name])
    return Edit(
        rule=Rule.EPSILON,
        nodes=(node.name,),
        tensors=(node.output[0],),
        sentence="the norm of a vector of zeros counts as 1",
        changed=(Changed(f"{node.name}: epsilon", f"{epsilon:.4g}", "1 where the norm is 0"),),
        replaced={index: (new, compare, choose)},
        constants={zero: np.array(0.0, np.float32), one: np.array(1.0, np.float32)},
    )


def _added_epsilon(wiring: Wiring, index: int) -> Edit:
    """Guards what divides by a sum with a vanishing epsilon, or by its root."""
    _, constant = wiring.with_constant(index)
    epsilon = wiring.scalar(constant)
    require(0 < epsilon < 2 * SMALLEST_FP16 and wiring.graph.opset >= _EQUAL_TAKES_FLOATS)
    last = index
    if all(
        wiring.nodes[r].op_type == "Sqrt" for r in wiring.readers.get(_output(wiring, index), [])
    ):
        last = wiring.only_reader(_output(wiring, index), "Sqrt")
    divisor = _output(wiring, last)
    readers = wiring.readers.get(divisor, [])
    require(bool(readers) and divisor not in wiring.outputs and divisor not in wiring.captured)
    for reader in readers:
        node = wiring.nodes[reader]
        divides = node.op_type == "Div" and node.input[0] != divisor
        require(divides or node.op_type == "Reciprocal")
    node = wiring.nodes[last]
    zero, one = wiring.fresh(f"{node.name}__zero"), wiring.fresh(f"{node.name}__one")
    computed, vanishes = wiring.fresh(f"{divisor}__computed"), wiring.fresh(f"{divisor}__vanishes")
    new = copied(node)
    new.output[0] = computed
    compare = helper.make_node(
        "Equal", [computed, zero], [vanishes], wiring.fresh(f"{vanishes}__Equal")
    )
    choose = helper.make_node(
        "Where", [vanishes, one, computed], [divisor], wiring.fresh(f"{node.name}__Where")
    )
    note_origins(choose, [node.name])
    return Edit(
        rule=Rule.EPSILON,
        nodes=(node.name,),
        tensors=(divisor,),
        sentence="a divisor of 0 counts as 1",
        changed=(Changed(f"{wiring.names[index]}: epsilon", f"{epsilon:.4g}", "1 in place of 0"),),
        replaced={last: (new, compare, choose)},
        constants={zero: np.array(0.0, np.float32), one: np.array(1.0, np.float32)},
    )


def _output(wiring: Wiring, index: int) -> str:
    return str(wiring.nodes[index].output[0])


def _normed(wiring: Wiring, norm: str) -> str:
    """The tensor whose norm ``norm`` is: ReduceL2, or the root of a sum of squares."""
    index = wiring.made_by(norm, "ReduceL2", "Sqrt", "Pow")
    node = wiring.nodes[index]
    if node.op_type == "ReduceL2":
        return str(node.input[0])
    require(node.op_type == "Sqrt" or wiring.scalar(node.input[1]) == 0.5)
    total = wiring.nodes[
        wiring.made_by(node.input[0], "ReduceSum", "ReduceSumSquare", "ReduceMean")
    ]
    if total.op_type == "ReduceSumSquare":
        return str(total.input[0])
    square = wiring.nodes[wiring.made_by(total.input[0], "Pow", "Mul")]
    if square.op_type == "Pow":
        require(wiring.scalar(square.input[1]) == 2.0)
    else:
        require(square.input[0] == square.input[1])
    return str(square.input[0])


def _check_divides(wiring: Wiring, divisor: str, vector: str) -> None:
    """Refuses unless all that reads ``divisor`` divides ``vector`` by it."""
    require(divisor not in wiring.outputs and divisor not in wiring.captured)
    for reader in wiring.readers.get(divisor, []):
        node = wiring.nodes[reader]
        if node.op_type == "Expand" and node.input[0] == divisor:
            _check_divides(wiring, node.output[0], vector)
        else:
            require(node.op_type == "Div" and list(node.input) == [vector, divisor])


def propose_log_sum_exp(graph: Graph, ranges: Ranges) -> Proposal:
    """Writes exponentials that leave FP16's range in their stable form.

    Identities, with m = max(x): log(sum(exp(x))) = log(sum(exp(x - m))) + m;
    exp(x) / sum(exp(x)) = softmax(x); log(1 + exp(x)) = softplus(x);
    log(softmax(x)) = x - m - log(sum(exp(x - m))). Sources: TensorRT #3952, coremltools #2727.
    """
    return searched(graph, ranges, Rule.LOG_SUM_EXP, _exponential)


def _exponential(wiring: Wiring, ranges: Ranges, index: int) -> Edit:
    exp = wiring.nodes[index]
    if exp.op_type in ("Softmax", "LogSoftmax"):
        return _log_softmax(wiring, ranges, index)
    require(exp.op_type == "Exp")
    # The sum of exponentials that all vanish is 0, and its logarithm wrong.
    loud = at_stake(ranges, exp.output)
    tensor = exp.output[0]
    require(tensor not in wiring.outputs and tensor not in wiring.captured)
    readers = wiring.readers.get(tensor, [])
    kinds = sorted(wiring.nodes[r].op_type for r in readers)
    if kinds == ["Add"]:
        return _softplus(wiring, index, readers[0], loud)
    if kinds == ["ReduceSum"]:
        return _log_of_sum(wiring, ranges, index, readers[0], loud)
    require(kinds == ["Div", "ReduceSum"] and loud)
    return _softmax(wiring, index, readers)


def _softplus(wiring: Wiring, index: int, add: int, loud: bool) -> Edit:
    exp = wiring.nodes[index]
    _, constant = wiring.with_constant(add)
    require(wiring.scalar(constant) == 1.0 and loud)
    rank = wiring.graph.types.ranks.get(exp.output[0], 0)
    require(wiring.constants[constant].ndim <= rank)
    log = wiring.only_reader(wiring.nodes[add].output[0], "Log")
    new = helper.make_node("Softplus", [exp.input[0]], [wiring.nodes[log].output[0]])
    new.name = wiring.names[log]
    note_origins(new, [wiring.names[index], wiring.names[add]])
    return Edit(
        rule=Rule.LOG_SUM_EXP,
        nodes=tuple(wiring.names[i] for i in (index, add, log)),
        tensors=(exp.output[0],),
        sentence="log(1 + exp(x)) as one operator",
        replaced={index: (), add: (), log: (new,)},
    )


def _axes(wiring: Wiring, node: onnx.NodeProto) -> tuple[int, ...]:
    """The axes that a reduction reduces."""
    axes = attribute(node, "axes")
    if axes is None and len(node.input) > 1 and node.input[1]:
        require(node.input[1] in wiring.constants)
        axes = wiring.constants[node.input[1]].ravel().tolist()
    if axes is None or not len(axes):  # all, or none
        raise NoMatchError
    return tuple(int(a) for a in axes)


def _softmax(wiring: Wiring, index: int, readers: list[int]) -> Edit:
    exp = wiring.nodes[index]
    by = {wiring.nodes[r].op_type: r for r in readers}
    total, div = wiring.nodes[by["ReduceSum"]], wiring.nodes[by["Div"]]
    require(list(div.input) == [exp.output[0], total.output[0]])
    require(attribute(total, "keepdims", 1) == 1 and wiring.is_inner(total.output[0]))
    (axis,) = _axes(wiring, total) if len(_axes(wiring, total)) == 1 else (None,)
    rank = wiring.graph.types.ranks.get(exp.output[0])
    if axis is None or rank is None or axis % rank != rank - 1:
        raise NoMatchError  # before opset 13 Softmax normalises all axes from its own on
    axis = axis % rank
    new = helper.make_node("Softmax", [exp.input[0]], [div.output[0]], div.name, axis=axis)
    gone = [index, by["ReduceSum"]]
    note_origins(new, [wiring.names[i] for i in gone])
    return Edit(
        rule=Rule.LOG_SUM_EXP,
        nodes=tuple(wiring.names[i] for i in (*gone, by["Div"])),
        tensors=(exp.output[0], total.output[0]),
        sentence="exp(x) / sum(exp(x)) as Softmax",
        replaced={**dict.fromkeys(gone, ()), by["Div"]: (new,)},
    )


VANISHES = SMALLEST_FP16 * 64
"""A sum of exponentials that is smaller has few bits in FP16, and its logarithm is wrong."""


def _log_of_sum(wiring: Wiring, ranges: Ranges, index: int, summed: int, loud: bool) -> Edit:
    exp, total = wiring.nodes[index], wiring.nodes[summed]
    log = wiring.only_reader(total.output[0], "Log")
    spread = ranges.get(total.output[0])
    quiet = spread is not None and spread.median < VANISHES
    # Powers up to 1 become larger where the maximum is taken out.
    powers = ranges.get(exp.output[0])
    high = powers is not None and powers.largest > 1.0 and at_stake(ranges, total.output)
    require(loud or quiet or high)
    axes = _axes(wiring, total)
    keepdims = int(attribute(total, "keepdims", 1))
    source, stem = exp.input[0], wiring.names[log]

    constants: dict[str, NDArray[Any]] = {}

    def input_or_attribute(
        node: onnx.NodeProto, name: str, values: NDArray[Any], first: int
    ) -> None:
        if wiring.graph.opset < first:
            node.attribute.append(helper.make_attribute(name, values.tolist()))
            return
        node.input.append(wiring.fresh(f"{node.name}__{name}"))
        constants[node.input[-1]] = values

    def largest(keep: int) -> tuple[onnx.NodeProto, onnx.NodeProto]:
        result, finite = wiring.fresh(f"{source}__max"), wiring.fresh(f"{source}__finite")
        name = wiring.fresh(f"{stem}__ReduceMax")
        reduce = helper.make_node("ReduceMax", [source], [result], name, keepdims=keep)
        input_or_attribute(reduce, "axes", np.array(axes, np.int64), _AXES_ARE_INPUTS)
        # Where all is -inf, the difference from the maximum were NaN.
        clip = helper.make_node("Clip", [result], [finite], wiring.fresh(f"{stem}__Clip"))
        for bound, value in (("min", -LARGEST_FP16), ("max", LARGEST_FP16)):
            input_or_attribute(clip, bound, np.array(value, np.float32), _CLIP_TAKES_INPUTS)
        return reduce, clip

    inner = largest(1)
    outer = inner if keepdims else largest(0)
    below = wiring.fresh(f"{source}__below")
    name = wiring.fresh(f"{stem}__Sub")
    sub = helper.make_node("Sub", [source, inner[-1].output[0]], [below], name)
    new_exp, new_log = copied(exp), copied(wiring.nodes[log])
    new_exp.input[0] = below
    new_log.output[0] = wiring.fresh(f"{new_log.output[0]}__below")
    add = helper.make_node(
        "Add",
        [new_log.output[0], outer[-1].output[0]],
        [wiring.nodes[log].output[0]],
        wiring.fresh(f"{stem}__Add"),
    )
    note_origins(add, [stem])
    maxima = inner if keepdims else (*inner, *outer)
    return Edit(
        rule=Rule.LOG_SUM_EXP,
        nodes=tuple(wiring.names[i] for i in (index, summed, log)),
        tensors=(exp.output[0], total.output[0]),
        sentence="the maximum is taken out of the exponentials",
        replaced={index: (*maxima, sub, new_exp), log: (new_log, add)},
        constants=constants,
    )


def _log_softmax(wiring: Wiring, ranges: Ranges, index: int) -> Edit:
    """Writes the logarithm of a Softmax out, so that no probability vanishes before it."""
    node, opset = wiring.nodes[index], wiring.graph.opset
    gone = () if node.op_type == "LogSoftmax" else (wiring.only_reader(node.output[0], "Log"),)
    last = gone[0] if gone else index
    result, source = _output(wiring, last), node.input[0]
    rank = wiring.graph.types.ranks.get(source)
    require(rank is not None and result in ranges)
    require(ranges[result].largest > -math.log(SMALLEST_FP16))
    # Before opset 13 an axis means itself and all behind it.
    axis = int(attribute(node, "axis", -1 if opset >= 13 else 1)) % (rank or 1)
    require(axis == (rank or 0) - 1)
    stem = wiring.names[last]
    below, powers = wiring.fresh(f"{source}__below"), wiring.fresh(f"{source}__exp")
    largest, total = wiring.fresh(f"{source}__max"), wiring.fresh(f"{source}__sum")
    log = wiring.fresh(f"{source}__log")

    def made(op: str, inputs: list[str], output: str) -> onnx.NodeProto:
        return helper.make_node(op, inputs, [output], wiring.fresh(f"{stem}__{op}"))

    reductions = made("ReduceMax", [source], largest), made("ReduceSum", [powers], total)
    axes, constants = wiring.fresh(f"{stem}__axes"), dict[str, NDArray[Any]]()
    for reduction, first in zip(reductions, (_AXES_ARE_INPUTS, 13), strict=True):
        if opset >= first:
            reduction.input.append(axes)
            constants[axes] = np.array([axis], np.int64)
        else:
            reduction.attribute.append(helper.make_attribute("axes", [axis]))
    name = helper.make_node("Sub", [below, log], [result], stem)
    note_origins(name, [node.name])
    written = (
        reductions[0],
        made("Sub", [source, largest], below),
        made("Exp", [below], powers),
        reductions[1],
        made("Log", [total], log),
        name,
    )
    return Edit(
        rule=Rule.LOG_SUM_EXP,
        nodes=tuple(dict.fromkeys((wiring.names[index], stem))),
        tensors=(result,),
        sentence="log(softmax(x)) with the maximum taken out",
        replaced={**dict.fromkeys((index, *gone), ()), last: written},
        constants=constants,
    )


_HAS_WHERE = 9
"""The opset that introduced Where."""

_EQUAL_TAKES_FLOATS = 11
"""The opset from which on Equal compares floats."""

_CLIP_TAKES_INPUTS = 11
"""The opset from which on Clip takes its bounds as inputs."""

_AXES_ARE_INPUTS = 18
"""The opset from which on ReduceMax takes its axes as an input."""
