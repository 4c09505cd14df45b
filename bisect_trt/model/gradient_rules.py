"""The gradients of operators that compute: functions, products, normalisations, reductions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from math import prod

import numpy as np

from bisect_trt.model.gradient_nodes import GradientWriter, NoRuleError, Site

Gradients = Mapping[int, str]
"""The gradient of each wanted input that has one; one that is left out is zero everywhere."""

Rule = Callable[[Site], Gradients]

Slope = Callable[[Site, GradientWriter], str]
"""Writes the derivative of a function of one number."""


def _sigmoid(s: Site, to: GradientWriter) -> str:
    return to.op("Sub", s.y(), to.times(s.y(), s.y()))


def _one_less_square(s: Site, to: GradientWriter) -> str:
    return to.op("Sub", to.number(1.0), to.times(s.y(), s.y()))


def _hard_swish(s: Site, to: GradientWriter) -> str:
    inner = to.op("Add", to.op("Div", s.x(), to.number(3.0)), to.number(0.5))
    upper = to.where(to.op("Greater", s.x(), to.number(3.0)), 1.0, inner)
    return to.where(to.op("Less", s.x(), to.number(-3.0)), 0.0, upper)


def _hard_sigmoid(s: Site, to: GradientWriter) -> str:
    above = to.op("Greater", s.y(), to.number(0.0))
    inside = to.op("And", above, to.op("Less", s.y(), to.number(1.0)))
    return to.where(inside, float(s.attribute("alpha", 0.2)), 0.0)


def _bent(positive: float, negative: Slope | float) -> Slope:
    """``positive`` above zero, and ``negative`` below."""

    def slope(s: Site, to: GradientWriter) -> str:
        below = negative if isinstance(negative, float) else negative(s, to)
        return to.where(to.op("Greater", s.x(), to.number(0.0)), positive, below)

    return slope


def _leaky(s: Site, to: GradientWriter) -> str:
    return to.number(float(s.attribute("alpha", 0.01)))


def _elu(s: Site, to: GradientWriter) -> str:
    return to.op("Add", s.y(), to.number(float(s.attribute("alpha", 1.0))))


def _celu(s: Site, to: GradientWriter) -> str:
    return to.op("Exp", to.op("Div", s.x(), to.number(float(s.attribute("alpha", 1.0)))))


_SELU = (1.6732632423543772, 1.0507009873554805)


def _selu(s: Site, to: GradientWriter) -> str:
    alpha, gamma = (
        float(s.attribute(n, d)) for n, d in zip(("alpha", "gamma"), _SELU, strict=True)
    )
    below = to.op("Add", s.y(), to.number(alpha * gamma))
    return to.where(to.op("Greater", s.x(), to.number(0.0)), gamma, below)


def _thresholded(s: Site, to: GradientWriter) -> str:
    return to.as_float(to.op("Greater", s.x(), to.number(float(s.attribute("alpha", 1.0)))))


def _erf_slope(to: GradientWriter, x: str, factor: float, narrowness: float) -> str:
    """``factor`` times exp(-narrowness * x^2)."""
    square = to.times(x, x, to.number(-narrowness))
    return to.times(to.op("Exp", square), to.number(factor))


def _gelu(s: Site, to: GradientWriter) -> str:
    x, half, one = s.x(), to.number(0.5), to.number(1.0)
    if s.attribute("approximate", "none") == "tanh":
        root = math.sqrt(2.0 / math.pi)
        square = to.times(x, x)
        cubic = to.op("Add", one, to.times(square, to.number(0.044715)))
        t = to.op("Tanh", to.times(x, cubic, to.number(root)))
        steep = to.op("Add", one, to.times(square, to.number(3.0 * 0.044715)))
        rest = to.op("Sub", one, to.times(t, t))
        inner = to.times(x, rest, steep, to.number(root))
        return to.times(half, to.op("Add", to.op("Add", one, t), inner))
    error = to.op("Erf", to.times(x, to.number(math.sqrt(0.5))))
    share = to.times(half, to.op("Add", one, error))
    return to.op("Add", share, to.times(x, _erf_slope(to, x, 1.0 / math.sqrt(2.0 * math.pi), 0.5)))


def _mish(s: Site, to: GradientWriter) -> str:
    t = to.op("Tanh", to.op("Softplus", s.x()))
    rest = to.op("Sub", to.number(1.0), to.times(t, t))
    return to.op("Add", t, to.times(s.x(), to.op("Sigmoid", s.x()), rest))


def _swish(s: Site, to: GradientWriter) -> str:
    scaled = to.times(s.x(), to.number(float(s.attribute("alpha", 1.0))))
    share = to.op("Sigmoid", scaled)
    rest = to.op("Sub", to.number(1.0), share)
    return to.times(share, to.op("Add", to.number(1.0), to.times(scaled, rest)))


def _softsign(s: Site, to: GradientWriter) -> str:
    below = to.op("Add", to.number(1.0), to.op("Abs", s.x()))
    return to.op("Reciprocal", to.times(below, below))


_SLOPES: dict[str, Slope] = {
    "Relu": lambda s, to: to.as_float(to.op("Greater", s.y(), to.number(0.0))),
    "LeakyRelu": _bent(1.0, _leaky),
    "Elu": _bent(1.0, _elu),
    "Celu": _bent(1.0, _celu),
    "Selu": _selu,
    "ThresholdedRelu": _thresholded,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _hard_swish,
    "Sigmoid": _sigmoid,
    "Tanh": _one_less_square,
    "Exp": lambda s, to: s.y(),
    "Log": lambda s, to: to.op("Reciprocal", s.x()),
    "Sqrt": lambda s, to: to.op("Div", to.number(0.5), s.y()),
    "Reciprocal": lambda s, to: to.op("Neg", to.times(s.y(), s.y())),
    "Neg": lambda s, to: to.number(-1.0),
    "Abs": lambda s, to: to.op("Sign", s.x()),
    "Erf": lambda s, to: _erf_slope(to, s.x(), 2.0 / math.sqrt(math.pi), 1.0),
    "Softplus": lambda s, to: to.op("Sigmoid", s.x()),
    "Softsign": _softsign,
    "Sin": lambda s, to: to.op("Cos", s.x()),
    "Cos": lambda s, to: to.op("Neg", to.op("Sin", s.x())),
    "Gelu": _gelu,
    "Mish": _mish,
    "Swish": _swish,
    # Between its bounds the value is unchanged.
    "Clip": lambda s, to: to.as_float(to.op("Equal", s.x(), s.y())),
}


def _function(slope: Slope) -> Rule:
    def rule(s: Site) -> Gradients:
        if s.wanted != {0}:  # a bound that layers compute
            raise NoRuleError
        return {0: s.to.times(s.g, slope(s, s.to))}

    return rule


def _same(s: Site) -> Gradients:
    return {0: s.g}


def _flat(s: Site) -> Gradients:
    """The gradient of a step function."""
    return {}


def _sub(s: Site) -> Gradients:
    to, given = s.to, s.result_shape()
    signed = {slot: s.g if slot == 0 else to.op("Neg", s.g) for slot in s.wanted}
    return {slot: to.unbroadcast(g, given, s.shape(slot)) for slot, g in signed.items()}


def _mul(s: Site) -> Gradients:
    to, given = s.to, s.result_shape()
    return {
        slot: to.unbroadcast(to.times(s.g, s.x(1 - slot)), given, s.shape(slot))
        for slot in s.wanted
    }


def _div(s: Site) -> Gradients:
    to, given = s.to, s.result_shape()
    share = to.op("Div", s.g, s.x(1))
    found = {0: share} if 0 in s.wanted else {}
    if 1 in s.wanted:
        found[1] = to.op("Neg", to.times(share, s.y()))
    return {slot: to.unbroadcast(g, given, s.shape(slot)) for slot, g in found.items()}


def _pow(s: Site) -> Gradients:
    to = s.to
    if s.wanted != {0}:
        raise NoRuleError
    exponent = s.x(1)
    if exponent in to.integers:
        exponent = to.as_float(exponent)
    less = to.op("Pow", s.x(), to.op("Sub", exponent, to.number(1.0)))
    return {0: to.unbroadcast(to.times(s.g, exponent, less), s.result_shape(), s.shape())}


def _extreme(s: Site) -> Gradients:
    to, given = s.to, s.result_shape()
    found = {}
    for slot in s.wanted:
        chosen = to.as_float(to.op("Equal", s.x(slot), s.y()))
        found[slot] = to.unbroadcast(to.times(s.g, chosen), given, s.shape(slot))
    return found


def _average(s: Site) -> Gradients:
    return s.everywhere(s.to.op("Div", s.g, s.to.number(float(len(s.node.input)))))


def _where(s: Site) -> Gradients:
    to, given = s.to, s.result_shape()
    found = {}
    for slot in s.wanted:
        part = to.where(s.x(0), s.g, 0.0) if slot == 1 else to.where(s.x(0), 0.0, s.g)
        found[slot] = to.unbroadcast(part, given, s.shape(slot))
    return found


def _prelu(s: Site) -> Gradients:
    to = s.to
    if s.wanted != {0}:
        raise NoRuleError
    above = to.op("Greater", s.x(), to.number(0.0))
    return {0: to.where(above, s.g, to.times(s.g, s.x(1)))}


def _turned(to: GradientWriter, name: str, rank: int) -> str:
    """``name`` with its last two axes exchanged."""
    return to.op("Transpose", name, perm=[*range(rank - 2), rank - 1, rank - 2])


def _matmul(s: Site) -> Gradients:
    to = s.to
    first, second = s.shape(0), s.shape(1)
    # A vector is a matrix with one row on the left, and with one column on the right.
    shapes = (
        (1, *first) if len(first) == 1 else first,
        (*second, 1) if len(second) == 1 else second,
    )
    names = [
        to.reshaped(s.x(slot), shapes[slot]) if shapes[slot] != s.shape(slot) else s.x(slot)
        for slot in (0, 1)
    ]
    batch = np.broadcast_shapes(shapes[0][:-2], shapes[1][:-2])
    rows, inner, columns = shapes[0][-2], shapes[0][-1], shapes[1][-1]
    whole = (*batch, rows, columns)
    g = s.g if whole == s.result_shape() else to.reshaped(s.g, whole)
    found = {}
    if 0 in s.wanted:
        product = to.op("MatMul", g, _turned(to, names[1], len(shapes[1])))
        found[0] = to.unbroadcast(product, (*batch, rows, inner), shapes[0])
    if 1 in s.wanted:
        product = to.op("MatMul", _turned(to, names[0], len(shapes[0])), g)
        found[1] = to.unbroadcast(product, (*batch, inner, columns), shapes[1])
    return {
        slot: to.reshaped(name, s.shape(slot)) if shapes[slot] != s.shape(slot) else name
        for slot, name in found.items()
    }


def _gemm(s: Site) -> Gradients:
    to = s.to
    scale = {"alpha": float(s.attribute("alpha", 1.0))}
    first, second = bool(s.attribute("transA", 0)), bool(s.attribute("transB", 0))

    def product(a: str, b: str, a_turned: bool, b_turned: bool) -> str:
        return to.op("Gemm", a, b, transA=int(a_turned), transB=int(b_turned), **scale)

    found = {}
    if 0 in s.wanted:
        found[0] = (
            product(s.x(1), s.g, second, True) if first else product(s.g, s.x(1), False, not second)
        )
    if 1 in s.wanted:
        found[1] = (
            product(s.g, s.x(0), True, first) if second else product(s.x(0), s.g, not first, False)
        )
    if 2 in s.wanted:
        scaled = to.times(s.g, to.number(float(s.attribute("beta", 1.0))))
        found[2] = to.unbroadcast(scaled, s.result_shape(), s.shape(2))
    return found


def _einsum(s: Site) -> Gradients:
    equation = str(s.attribute("equation")).replace(" ", "")
    left, _, result = equation.partition("->")
    terms = left.split(",")
    # Without a result the letters are sorted, and an ellipsis stands for any axes.
    whole = [*terms, result]
    if "->" not in equation or "." in equation or any(len(set(t)) < len(t) for t in whole):
        raise NoRuleError
    found = {}
    for slot in s.wanted:
        others = [i for i in range(len(terms)) if i != slot]
        if not set(terms[slot]) <= set(result).union(*(terms[i] for i in others)):
            raise NoRuleError
        inputs = [s.g, *(s.x(i) for i in others)]
        sources = ",".join([result, *(terms[i] for i in others)])
        found[slot] = s.to.op("Einsum", *inputs, equation=f"{sources}->{terms[slot]}")
    return found


def padding(
    s: Site, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> list[int]:
    """The padding of a convolution or pool: all starts, then all ends."""
    rank, mode = len(kernel), s.attribute("auto_pad", "NOTSET")
    if mode in ("NOTSET", ""):
        return [int(p) for p in s.attribute("pads", [0] * (2 * rank))]
    if mode == "VALID":
        return [0] * (2 * rank)
    starts, ends = [], []
    for size, k, stride, dilation in zip(s.shape()[2:], kernel, strides, dilations, strict=True):
        reach = (k - 1) * dilation + 1
        total = max((-(-size // stride) - 1) * stride + reach - size, 0)
        small = total // 2
        starts.append(small if mode == "SAME_UPPER" else total - small)
        ends.append(total - starts[-1])
    return starts + ends


def _conv(s: Site) -> Gradients:
    to = s.to
    if s.wanted != {0}:  # a weight that layers compute
        raise NoRuleError
    kernel = s.shape(1)[2:]
    rank, group = len(kernel), int(s.attribute("group", 1))
    strides = [int(v) for v in s.attribute("strides", [1] * rank)]
    dilations = [int(v) for v in s.attribute("dilations", [1] * rank)]
    pads = padding(s, kernel, strides, dilations)
    reach = [(k - 1) * d for k, d in zip(kernel, dilations, strict=True)]
    mirrored = [r - p for r, p in zip([*reach, *reach], pads, strict=True)]
    if set(strides) == {1} and min(mirrored) >= 0:
        # ONNX Runtime's convolution is faster than its transposed one.
        weight = _mirrored(s, group)
        return {0: to.op("Conv", s.g, weight, pads=mirrored, dilations=dilations, group=group)}
    more = [
        size - ((out - 1) * stride + r + 1 - before - after)
        for size, out, stride, r, before, after in zip(
            s.shape()[2:],
            s.result_shape()[2:],
            strides,
            reach,
            pads[:rank],
            pads[rank:],
            strict=True,
        )
    ]
    options = {"strides": strides, "dilations": dilations, "pads": pads, "group": group}
    return {0: to.op("ConvTranspose", s.g, s.x(1), output_padding=more, **options)}


def _mirrored(s: Site, group: int) -> str:
    """The weight of a convolution for its gradient: channels exchanged, places in reverse."""
    to, (outside, inside, *kernel) = s.to, s.shape(1)
    weight = s.x(1)
    if group == 1:
        weight = to.op("Transpose", weight, perm=[1, 0, *range(2, 2 + len(kernel))])
    elif (outside // group, inside) != (1, 1):
        apart = to.reshaped(weight, [group, outside // group, inside, *kernel])
        turned = to.op("Transpose", apart, perm=[0, 2, 1, *range(3, 3 + len(kernel))])
        weight = to.reshaped(turned, [group * inside, outside // group, *kernel])
    axes = [axis for axis, k in enumerate(kernel, 2) if k > 1]
    if not axes:
        return weight
    last, steps = to.ints([-1] * len(axes)), to.ints([-1] * len(axes))
    return to.op("Slice", weight, last, to.ints([-(2**31)] * len(axes)), to.ints(axes), steps)


def _conv_transpose(s: Site) -> Gradients:
    automatic = s.attribute("auto_pad", "NOTSET") not in ("NOTSET", "", "VALID")
    if s.wanted != {0} or automatic or s.attribute("output_shape") is not None:
        raise NoRuleError
    rank = len(s.shape()) - 2
    options = {name: s.attribute(name, [1] * rank) for name in ("strides", "dilations")}
    options["pads"] = s.attribute("pads", [0] * (2 * rank))
    options["group"] = s.attribute("group", 1)
    return {0: s.to.op("Conv", s.g, s.x(1), **options)}


def _per_channel(s: Site, name: str) -> str:
    """A vector of one number a channel, which is the second axis."""
    return s.to.reshaped(name, [-1] + [1] * (len(s.shape()) - 2))


def _batch_norm(s: Site) -> Gradients:
    to = s.to
    if s.wanted != {0} or s.attribute("training_mode", 0) or not s.attribute("spatial", 1):
        raise NoRuleError
    epsilon = to.number(float(s.attribute("epsilon", 1e-5)))
    factor = to.op("Div", s.x(1), to.op("Sqrt", to.op("Add", s.x(4), epsilon)))
    return {0: to.times(s.g, _per_channel(s, factor))}


def _normalised(
    to: GradientWriter,
    x: str,
    scaled: str,
    axes: Sequence[int],
    epsilon: float,
    centred: bool = True,
) -> str:
    """The gradient of x over its deviation along ``axes``; ``scaled`` is that of the quotient."""
    apart = to.op("Sub", x, to.mean(x, axes)) if centred else x
    square = to.mean(to.times(apart, apart), axes)
    deviation = to.op("Sqrt", to.op("Add", square, to.number(epsilon)))
    unit = to.op("Div", apart, deviation)
    along = to.times(unit, to.mean(to.times(scaled, unit), axes))
    rest = to.op("Sub", scaled, along)
    if centred:
        rest = to.op("Sub", rest, to.mean(scaled, axes))
    return to.op("Div", rest, deviation)


def _layer_norm(centred: bool) -> Rule:
    def rule(s: Site) -> Gradients:
        if s.wanted != {0}:
            raise NoRuleError
        axes = list(range(s.axis(-1), len(s.shape())))
        epsilon = float(s.attribute("epsilon", 1e-5))
        scaled = s.to.times(s.g, s.x(1))
        return {0: _normalised(s.to, s.x(), scaled, axes, epsilon, centred)}

    return rule


def _instance_norm(s: Site) -> Gradients:
    if s.wanted != {0}:
        raise NoRuleError
    axes = list(range(2, len(s.shape())))
    scaled = s.to.times(s.g, _per_channel(s, s.x(1)))
    return {0: _normalised(s.to, s.x(), scaled, axes, float(s.attribute("epsilon", 1e-5)))}


def _group_norm(s: Site) -> Gradients:
    to, shape = s.to, s.shape()
    if s.wanted != {0}:
        raise NoRuleError
    groups = int(s.attribute("num_groups"))
    apart = [shape[0], groups, -1]
    x, g = to.reshaped(s.x(), apart), s.g
    if s.opset >= 21:  # a scale for each channel, before for each group
        scaled = to.reshaped(to.times(g, _per_channel(s, s.x(1))), apart)
    else:
        scaled = to.times(to.reshaped(g, apart), to.reshaped(s.x(1), [groups, 1]))
    found = _normalised(to, x, scaled, [2], float(s.attribute("epsilon", 1e-5)))
    return {0: to.reshaped(found, shape)}


def _mean_variance(s: Site) -> Gradients:
    axes = [int(a) for a in s.attribute("axes", [0, 2, 3])]
    return {0: _normalised(s.to, s.x(), s.g, axes, 1e-9)}


def _lp_norm(s: Site) -> Gradients:
    to, axis = s.to, s.axis(-1)
    if s.attribute("p", 2) != 2:
        raise NoRuleError
    length = to.op("ReduceL2", s.x(), to.ints([axis]), keepdims=1)
    along = to.times(s.y(), to.summed(to.times(s.g, s.y()), [axis]))
    return {0: to.op("Div", to.op("Sub", s.g, along), length)}


def _softmax_axes(s: Site) -> list[int]:
    """The axes that sum to one: before opset 13 all from the named one on."""
    if s.opset >= 13:
        return [s.axis(-1)]
    return list(range(s.axis(1), len(s.shape())))


def _softmax(s: Site) -> Gradients:
    to, axes = s.to, _softmax_axes(s)
    mean = to.summed(to.times(s.g, s.y()), axes)
    return {0: to.times(s.y(), to.op("Sub", s.g, mean))}


def _log_softmax(s: Site) -> Gradients:
    to, axes = s.to, _softmax_axes(s)
    share = to.times(to.op("Exp", s.y()), to.summed(s.g, axes))
    return {0: to.op("Sub", s.g, share)}


Reduced = Callable[[Site, GradientWriter, str, str, list[int]], str]
"""Writes the gradient of a reduction from the output's, with it and the output's kept axes."""


def _reduced_axes(s: Site) -> list[int]:
    rank = len(s.shape())
    axes = s.listed("axes", 1)
    if not axes:
        return [] if s.attribute("noop_with_empty_axes", 0) else list(range(rank))
    return sorted(axis % rank for axis in axes)


def _reduction(write: Reduced) -> Rule:
    def rule(s: Site) -> Gradients:
        to, axes = s.to, _reduced_axes(s)
        kept = [1 if i in axes else size for i, size in enumerate(s.shape())]
        g, y = to.reshaped(s.g, kept), to.reshaped(s.y(), kept)
        return {0: to.expanded(write(s, to, g, y, axes), s.shape())}

    return rule


def _reduced_mean(s: Site, to: GradientWriter, g: str, y: str, axes: list[int]) -> str:
    return to.op("Div", g, to.number(float(prod(s.shape()[a] for a in axes))))


def _reduced_extreme(s: Site, to: GradientWriter, g: str, y: str, axes: list[int]) -> str:
    chosen = to.as_float(to.op("Equal", s.x(), y))
    # Equal values share the gradient.
    return to.times(chosen, to.op("Div", g, to.summed(chosen, axes)))


_REDUCTIONS: dict[str, Reduced] = {
    "ReduceSum": lambda s, to, g, y, axes: g,
    "ReduceMean": _reduced_mean,
    "ReduceMax": _reduced_extreme,
    "ReduceMin": _reduced_extreme,
    "ReduceL1": lambda s, to, g, y, axes: to.times(g, to.op("Sign", s.x())),
    "ReduceL2": lambda s, to, g, y, axes: to.times(s.x(), to.op("Div", g, y)),
    "ReduceSumSquare": lambda s, to, g, y, axes: to.times(s.x(), g, to.number(2.0)),
    "ReduceProd": lambda s, to, g, y, axes: to.op("Div", to.times(g, y), s.x()),
    "ReduceLogSum": lambda s, to, g, y, axes: to.op("Div", g, to.op("Exp", y)),
    "ReduceLogSumExp": lambda s, to, g, y, axes: to.times(g, to.op("Exp", to.op("Sub", s.x(), y))),
}


def _global_average(s: Site) -> Gradients:
    share = s.to.op("Div", s.g, s.to.number(float(prod(s.shape()[2:]))))
    return {0: s.to.expanded(share, s.shape())}


def _global_max(s: Site) -> Gradients:
    axes = list(range(2, len(s.shape())))
    return {0: _reduced_extreme(s, s.to, s.g, s.y(), axes)}


RULES: dict[str, Rule] = {
    **{name: _function(slope) for name, slope in _SLOPES.items()},
    **{name: _reduction(write) for name, write in _REDUCTIONS.items()},
    **dict.fromkeys(("Identity", "Dropout", "Cast"), _same),
    **dict.fromkeys(("Round", "Floor", "Ceil", "Sign"), _flat),
    **dict.fromkeys(("Add", "Sum"), lambda s: s.everywhere(s.g)),
    "Mean": _average,
    "Sub": _sub,
    "Mul": _mul,
    "Div": _div,
    "Pow": _pow,
    **dict.fromkeys(("Max", "Min"), _extreme),
    "Where": _where,
    "PRelu": _prelu,
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Einsum": _einsum,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "BatchNormalization": _batch_norm,
    "LayerNormalization": _layer_norm(centred=True),
    "RMSNormalization": _layer_norm(centred=False),
    "InstanceNormalization": _instance_norm,
    "GroupNormalization": _group_norm,
    "MeanVarianceNormalization": _mean_variance,
    "LpNormalization": _lp_norm,
    "Softmax": _softmax,
    "LogSoftmax": _log_softmax,
    "GlobalAveragePool": _global_average,
    "GlobalMaxPool": _global_max,
}
"""The rules of operators that compute, by operator type."""
