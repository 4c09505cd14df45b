"""Blocks of real networks in small, drawn at random: each takes a tensor and gives another."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import TensorProto, helper

from tests.fuzz.net import Net, Tensor, body

F, B, L = TensorProto.FLOAT, TensorProto.BOOL, TensorProto.INT64
Block = Callable[[Net, Tensor], Tensor]


def activation(net: Net, x: Tensor) -> Tensor:
    """An activation of one node, or of a few."""
    kinds = ["Relu", "LeakyRelu", "Sigmoid", "Tanh", "HardSigmoid", "Elu", "Softplus", "Softsign"]
    kinds += ["clip", "swish", "gelu", "relu6", "Selu", "PRelu"]
    kinds += [
        k for k, since in (("HardSwish", 14), ("Mish", 18), ("Gelu", 20)) if net.opset >= since
    ]
    kind = net.pick(kinds)
    if kind == "clip":
        low, high = net.constant(-0.8), net.constant(2.0)
        return net.unary("Clip", x, *net.pick([(low, high), (low,), ("", high)]))
    if kind == "relu6":
        return net.unary("Clip", x, net.constant(0.0), net.constant(6.0))
    if kind == "swish":
        return net.unary("Mul", x, net.op("Sigmoid", x.name))
    if kind == "PRelu":
        return net.unary("PRelu", x, net.constant(np.asarray([0.2], np.float32)))
    if kind == "gelu":
        inner = net.op("Erf", net.op("Div", x.name, net.constant(1.41421356)))
        scaled = net.op("Mul", x.name, net.op("Add", inner, net.constant(1.0)))
        return Tensor(net.op("Mul", scaled, net.constant(0.5)), x.shape)
    return net.unary(kind, x)


# Images: (batch, channels, height, width).


def conv(net: Net, x: Tensor) -> Tensor:
    """A convolution: whole, grouped or by channel, with or without a bias and a stride."""
    size, channels = net.pick([1, 3]), x.shape[1]
    group = net.pick([1, 1, channels]) if size == 3 else 1
    out = channels if group > 1 else net.pick([4, 6, 8])
    stride = net.pick([1, 2]) if x.shape[2] >= 8 else 1
    fan = channels // group * size * size
    weights = [net.normal(out, channels // group, size, size, scale=1.2 / np.sqrt(fan))]
    if net.chance(0.6):
        weights.append(net.normal(out, scale=0.1))
    pads, strides = [size // 2] * 4, [stride] * 2
    name = net.op("Conv", x.name, *weights, pads=pads, strides=strides, group=group)
    height, width = (-(-n // stride) for n in x.shape[2:])
    return Tensor(name, (x.shape[0], out, height, width))


def batch_norm(net: Net, x: Tensor) -> Tensor:
    """A normalisation of images: by batch, by image, or by groups of channels."""
    c = x.shape[1]
    scale, shift = net.weight(net.random.uniform(0.5, 1.5, c)), net.normal(c, scale=0.2)
    kinds = ["batch", "instance", *(["group"] if net.opset >= 21 and c % 2 == 0 else [])]
    kind = net.pick(kinds)
    if kind == "batch":
        mean, variance = net.normal(c, scale=0.2), net.weight(net.random.uniform(0.5, 2.0, c))
        return net.unary("BatchNormalization", x, scale, shift, mean, variance)
    if kind == "group":
        return net.unary("GroupNormalization", x, scale, shift, num_groups=2)
    return net.unary("InstanceNormalization", x, scale, shift)


def pool(net: Net, x: Tensor) -> Tensor:
    """A pool of two by two places, or a maximum around each."""
    if x.shape[2] < 4 or net.chance(0.3):
        return net.unary("MaxPool", x, kernel_shape=[3, 3], pads=[1] * 4)
    name = net.op(net.pick(["MaxPool", "AveragePool"]), x.name, kernel_shape=[2, 2], strides=[2, 2])
    return Tensor(name, (*x.shape[:2], x.shape[2] // 2, x.shape[3] // 2))


def resize(net: Net, x: Tensor) -> Tensor:
    """Twice as large, by a Resize, a transposed convolution or from channels."""
    if x.shape[2] > 8:
        return x
    twice = (x.shape[2] * 2, x.shape[3] * 2)
    kind = net.pick(["nearest", "linear", "transposed", "channels"])
    if kind == "transposed":
        weight = net.normal(x.shape[1], 4, 2, 2, scale=1.0 / np.sqrt(x.shape[1]))
        name = net.op("ConvTranspose", x.name, weight, strides=[2, 2])
        return Tensor(name, (x.shape[0], 4, *twice))
    if kind == "channels":
        if x.shape[1] % 4:
            return x
        name = net.op("DepthToSpace", x.name, blocksize=2, mode=net.pick(["DCR", "CRD"]))
        return Tensor(name, (x.shape[0], x.shape[1] // 4, *twice))
    modes = {"coordinate_transformation_mode": net.pick(["half_pixel", "asymmetric"])}
    if kind == "nearest":
        modes["nearest_mode"] = "floor"
    scales = net.constant(np.asarray([1, 1, 2, 2], np.float32))
    name = net.op("Resize", x.name, "", scales, mode=kind, **modes)
    return Tensor(name, (*x.shape[:2], *twice))


def pad(net: Net, x: Tensor) -> Tensor:
    """A border of one place, taken off again behind a convolution."""
    mode = net.pick(["constant", "reflect", "edge"])
    wide = net.op("Pad", x.name, net.ints(0, 0, 1, 1, 0, 0, 1, 1), mode=mode)
    c = x.shape[1]
    return net.unary("Conv", Tensor(wide, x.shape), net.normal(c, c, 3, 3, scale=(9 * c) ** -0.5))


def split(net: Net, x: Tensor) -> Tensor:
    """The channels in two, one part through another block, and together again."""
    axis = 1 if len(x.shape) == 4 else len(x.shape) - 1
    if x.shape[axis] % 2:
        return x
    half = x.shape[axis] // 2
    left, right = net.op("Split", x.name, net.ints(half, half), outputs=2, axis=axis)
    shape = tuple(half if i == axis else n for i, n in enumerate(x.shape))
    done = activation(net, Tensor(left, shape))
    return Tensor(net.op("Concat", right, done.name, axis=axis), x.shape)


def squeeze_excite(net: Net, x: Tensor) -> Tensor:
    """Each channel times a gate of the mean over all places."""
    c = x.shape[1]
    mean = net.op("GlobalAveragePool", x.name)
    inner = net.op("Relu", net.op("Conv", mean, net.normal(4, c, 1, 1, scale=c**-0.5)))
    gate = net.op("Sigmoid", net.op("Conv", inner, net.normal(c, 4, 1, 1, scale=0.5)))
    return net.unary("Mul", x, gate)


def residual(net: Net, x: Tensor) -> Tensor:
    """What was, plus a block of it that keeps the shape."""
    if len(x.shape) == 4:
        c = x.shape[1]
        weight = net.normal(c, c, 3, 3, scale=(9 * c) ** -0.5)
        inner = net.unary("Conv", x, weight, pads=[1] * 4)
    else:
        inner = net.unary("MatMul", x, net.matrix(x.shape[-1], x.shape[-1]))
    return net.unary("Add", activation(net, inner), x.name)


def quantised(net: Net, x: Tensor) -> Tensor:
    """A pair that quantises to eight bits and back."""
    scale = net.weight(0.04)
    zero = net.weight(net.pick([0, 5]), net.pick([np.int8, np.uint8]))
    return net.unary("DequantizeLinear", net.unary("QuantizeLinear", x, scale, zero), scale, zero)


def to_sequence(net: Net, x: Tensor) -> Tensor:
    """The places of an image as a sequence: (batch, places, channels)."""
    n, c, height, width = x.shape
    flat = net.op("Reshape", x.name, net.ints(0, c, -1))
    return Tensor(net.op("Transpose", flat, perm=[0, 2, 1]), (n, height * width, c))


# Sequences: (batch, steps, features).


def linear(net: Net, x: Tensor) -> Tensor:
    """A product with weights and a bias, by MatMul, Gemm or Einsum."""
    width = net.pick([8, 12, 16])
    kind = net.pick(["MatMul", "MatMul", "Gemm", "Einsum"])
    shape = (*x.shape[:-1], width)
    if kind == "Einsum":
        weight = net.matrix(x.width, width)
        return Tensor(net.op("Einsum", x.name, weight, equation="bti,io->bto"), shape)
    if kind == "Gemm":
        flat = net.op("Reshape", x.name, net.ints(-1, x.width))
        weight = net.normal(width, x.width, scale=x.width**-0.5)
        y = net.op("Gemm", flat, weight, net.normal(width, scale=0.1), transB=1)
        return Tensor(net.op("Reshape", y, net.ints(-1, x.shape[1], width)), shape)
    y = net.op("MatMul", x.name, net.matrix(x.width, width))
    return Tensor(net.op("Add", y, net.normal(width, scale=0.1)), shape)


def layer_norm(net: Net, x: Tensor) -> Tensor:
    """LayerNorm: the operator where there is one, or written out; its statistics may be read."""
    scale, shift = net.weight(net.random.uniform(0.5, 1.5, x.width)), net.normal(x.width, scale=0.1)
    if net.opset >= 17 and net.chance(0.5):
        if net.chance(0.3):
            y, mean, _ = net.op("LayerNormalization", x.name, scale, shift, outputs=3)
            net.taps.append((mean, F))
            return Tensor(y, x.shape)
        return net.unary("LayerNormalization", x, scale, shift)
    centred = net.op("Sub", x.name, net.reduce("ReduceMean", x.name, [-1]))
    square = net.pick([(centred,), ()])
    squared = (
        net.op("Mul", centred, *square) if square else net.op("Pow", centred, net.constant(2.0))
    )
    variance = net.reduce("ReduceMean", squared, [-1])
    root = net.op("Sqrt", net.op("Add", variance, net.constant(1e-3)))
    y = net.op("Add", net.op("Mul", net.op("Div", centred, root), scale), shift)
    return Tensor(y, x.shape)


def rms_norm(net: Net, x: Tensor) -> Tensor:
    """RMSNorm: the operator from opset 23 on, or written out."""
    scale = net.weight(net.random.uniform(0.5, 1.5, x.width))
    if net.opset >= 23 and net.chance(0.5):
        return net.unary("RMSNormalization", x, scale, axis=-1)
    mean = net.reduce("ReduceMean", net.op("Pow", x.name, net.constant(2.0)), [-1])
    root = net.op("Sqrt", net.op("Add", mean, net.constant(1e-3)))
    over = net.op("Div", x.name, root) if net.chance(0.5) else None
    y = over or net.op("Mul", x.name, net.op("Reciprocal", root))
    return Tensor(net.op("Mul", y, scale), x.shape)


def attention(net: Net, x: Tensor) -> Tensor:
    """Self-attention of two heads: written out, or the operator of opset 23."""
    parts = [net.op("MatMul", x.name, net.matrix(x.width, 8)) for _ in "qkv"]
    steps, shape = x.shape[1], (*x.shape[:-1], 8)
    if net.opset >= 23 and net.chance(0.4):
        heads = {"q_num_heads": 2, "kv_num_heads": 2, "is_causal": net.pick([0, 1])}
        return Tensor(net.op("Attention", *parts, **heads), shape)
    q, k, v = (
        net.op("Transpose", net.op("Reshape", p, net.ints(-1, steps, 2, 4)), perm=[0, 2, 1, 3])
        for p in parts
    )
    scores = net.op("MatMul", q, net.op("Transpose", k, perm=[0, 1, 3, 2]))
    scores = net.op("Mul", scores, net.constant(0.5))
    if net.chance(0.5):  # a causal mask that FP16 holds
        mask = np.triu(np.full((steps, steps), -1e4, np.float32), 1)
        scores = net.op("Add", scores, net.constant(mask))
    mixed = net.op("MatMul", net.op("Softmax", scores, axis=-1), v)
    joined = net.op(
        "Reshape", net.op("Transpose", mixed, perm=[0, 2, 1, 3]), net.ints(-1, steps, 8)
    )
    return Tensor(joined, shape)


def recurrent(net: Net, x: Tensor) -> Tensor:
    """LSTM, GRU or RNN over the steps, in one direction or two; the last state may be read."""
    kind = net.pick(["LSTM", "GRU", "RNN"])
    gates, size = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind], 6
    ways = net.pick([1, 2])
    moved = net.op("Transpose", x.name, perm=[1, 0, 2])
    weights = [
        net.normal(ways, gates * size, x.width, scale=x.width**-0.5),
        net.normal(ways, gates * size, size, scale=size**-0.5),
    ]
    if net.chance(0.5):
        weights.append(net.normal(ways, 2 * gates * size, scale=0.1))
    direction = "forward" if ways == 1 else "bidirectional"
    more = {"linear_before_reset": net.pick([0, 1])} if kind == "GRU" else {}
    outputs = net.pick([1, 2])
    given = net.op(
        kind, moved, *weights, hidden_size=size, direction=direction, outputs=outputs, **more
    )
    y = given if outputs == 1 else given[0]
    if outputs == 2:
        net.taps.append((given[1], F))
    y = net.op("Transpose", y, perm=[2, 0, 1, 3])
    shape = (*x.shape[:-1], ways * size)
    return Tensor(net.op("Reshape", y, net.ints(-1, x.shape[1], ways * size)), shape)


def branch(net: Net, x: Tensor) -> Tensor:
    """An If whose bodies read a tensor from outside; the condition is computed."""
    highest = net.op("ReduceMax", x.name, keepdims=0)
    condition = net.op("Greater", highest, net.constant(net.pick([0.05, 50.0])))
    node = helper.make_node
    one = body("one", [node("Tanh", [x.name], ["one_y"], "one_tanh")], {}, {"one_y": F})
    other = body(
        "other",
        [
            node("Mul", [x.name, "half"], ["other_a"], "other_mul"),
            node("Sub", ["other_a", "half"], ["other_y"], "other_sub"),
        ],
        {},
        {"other_y": F},
        {"half": np.float32(0.5)},
    )
    return Tensor(net.op("If", condition, then_branch=one, else_branch=other), x.shape)


def loop(net: Net, x: Tensor) -> Tensor:
    """A Loop of a few turns that carries a tensor."""
    node = helper.make_node
    turn = body(
        "turn",
        [
            node("Identity", ["go"], ["still"], "turn_go"),
            node("Tanh", ["carried"], ["inner"], "turn_tanh"),
            node("Mul", ["inner", "rate"], ["scaled"], "turn_mul"),
            node("Add", ["carried", "scaled"], ["next"], "turn_add"),
        ],
        {"number": L, "go": B, "carried": F},
        {"still": B, "next": F},
        {"rate": np.float32(0.3)},
        {"number": 0, "go": 0, "still": 0},
    )
    turns, go = net.weight(net.pick([1, 2, 3]), np.int64), net.weight(True, np.bool_)
    return Tensor(net.op("Loop", turns, go, x.name, body=turn), x.shape)


def scan(net: Net, x: Tensor) -> Tensor:
    """A Scan over the steps with a state of the size of one."""
    node = helper.make_node
    step = body(
        "step",
        [
            node("Mul", ["state", "keep"], ["kept"], "step_mul"),
            node("Add", ["kept", "now"], ["after"], "step_add"),
            node("Tanh", ["after"], ["given"], "step_tanh"),
        ],
        {"state": F, "now": F},
        {"after": F, "given": F},
        {"keep": np.float32(0.6)},
        {"state": 2, "now": 2, "after": 2, "given": 2},
    )
    start = net.reduce("ReduceMean", x.name, [1], keepdims=0)
    _, y = net.op(
        "Scan",
        start,
        x.name,
        outputs=2,
        body=step,
        num_scan_inputs=1,
        scan_input_axes=[1],
        scan_output_axes=[1],
    )
    return Tensor(y, x.shape)


def lookup(net: Net, x: Tensor) -> Tensor:
    """Rows of a table by ids from an input, added."""
    name, rows = f"ids{len(net.taps)}_{net.random.integers(1 << 30)}", 11
    for feed, batch in zip(net.feeds, net.batches, strict=True):
        feed[name] = net.random.integers(0, rows, (batch, x.shape[1])).astype(np.int64)
    net.declare(name, L, [x.shape[1]])
    return net.unary("Add", x, net.op("Gather", net.normal(rows, x.width), name, axis=0))


def tied(net: Net, x: Tensor) -> Tensor:
    """Weights that are read twice, once transposed, as an embedding is."""
    weight = net.matrix(x.width, 10)
    up = net.op("Tanh", net.op("MatMul", x.name, weight))
    return Tensor(net.op("MatMul", up, net.op("Transpose", weight, perm=[1, 0])), x.shape)


def rotate(net: Net, x: Tensor) -> Tensor:
    """Slices, turned and joined, as rotary embeddings do."""
    half = x.width // 2
    if x.width % 2:
        return x
    first = net.op("Slice", x.name, net.ints(0), net.ints(half), net.ints(2))
    last = net.op("Slice", x.name, net.ints(half), net.ints(1 << 40), net.ints(2))
    turned = net.op("Concat", net.op("Neg", last), first, axis=-1)
    sine = net.constant(np.sin(np.arange(x.shape[1], dtype=np.float32))[:, None])
    return net.unary("Add", x, net.op("Mul", turned, sine))


def called(net: Net, x: Tensor) -> Tensor:
    """A call of a local function; each is called as often as it is drawn."""
    node = helper.make_node
    nodes = [node("Sigmoid", ["x"], ["gate"], "gate"), node("Mul", ["x", "gate"], ["y"], "product")]
    return net.function("Swish", x, nodes)


def chosen(net: Net, x: Tensor) -> Tensor:
    """The largest values, or their places, as a further output."""
    if net.chance(0.5):
        values, places = net.op("TopK", x.name, net.ints(min(3, x.width)), outputs=2, axis=-1)
        net.taps += [(values, F), (places, L)]
    else:
        net.taps.append((net.op("ArgMax", x.name, axis=-1, keepdims=net.pick([0, 1])), L))
    return x


def selected(net: Net, x: Tensor) -> Tensor:
    """A Where by a comparison, or a gathering of features in another order."""
    if net.chance(0.5):
        order = net.constant(net.random.permutation(x.width).astype(np.int64))
        return Tensor(net.op("Gather", x.name, order, axis=2), x.shape)
    mask = net.op("Less", x.name, net.constant(0.1))
    return Tensor(net.op("Where", mask, x.name, net.op("Abs", x.name)), x.shape)


def spread(net: Net, x: Tensor) -> Tensor:
    """A reduction over the steps that comes back over all of them."""
    kind = net.pick(["ReduceMax", "ReduceMin", "ReduceMean", "ReduceL2", "ReduceLogSumExp"])
    pooled = net.reduce(kind, x.name, [1], keepdims=1)
    if net.chance(0.3):
        pooled = net.op("Expand", pooled, net.op("Shape", x.name))
    kind = net.pick(["Add", "Sub", "Max", "Min"])
    return net.unary(kind, x, pooled)


def running(net: Net, x: Tensor) -> Tensor:
    """Running sums, or shares of one."""
    if net.chance(0.4):
        y = net.op("CumSum", x.name, net.weight(1, np.int64))
        return Tensor(net.op("Mul", y, net.constant(1.0 / x.shape[1])), x.shape)
    return net.unary(net.pick(["Softmax", "LogSoftmax"]), x, axis=-1)


def more_input(net: Net, x: Tensor) -> Tensor:
    """A second input, added."""
    return net.unary("Add", x, net.entry("more", x.shape[1:], 0.5).name)


def tapped(net: Net, x: Tensor) -> Tensor:
    """An inner tensor that is an output too."""
    net.taps.append((x.name, F))
    return x


ANYWHERE: tuple[Block, ...] = (activation, residual, split, quantised, branch, loop, called)
ANYWHERE += (more_input,)
IMAGES: tuple[Block, ...] = (conv, conv, batch_norm, pool, resize, pad, squeeze_excite, *ANYWHERE)
SEQUENCES: tuple[Block, ...] = (linear, linear, layer_norm, rms_norm, attention, recurrent, scan)
SEQUENCES += (lookup, tied, rotate, chosen, selected, spread, running, tapped, *ANYWHERE)
