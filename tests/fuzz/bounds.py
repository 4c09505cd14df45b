"""What FP32 may be off by in operators whose kernels pass through larger numbers than their result.

Each bound counts the roundings of a kernel's way, in any order of sums, to the first order. A
rounding is :data:`UNIT` of the number that is rounded, or of the sum of magnitudes behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper

from tests.fuzz.operators import Array, evaluated

UNIT = 2.0**-24
"""Half the distance from one to the next FP32 number: the largest relative rounding error."""

KERNEL = 8
"""Roundings of one that a sigmoid, a tanh, an exponential or a logarithm is off by at most.

ONNX Runtime's were at most 5.5 off at two million places.
"""

SHIFT = 1e-6
"""What a number is moved by for a derivative."""


@dataclass(frozen=True)
class Call:
    """A node with what it was given, what it gave and its attributes by name."""

    node: onnx.NodeProto
    inputs: Sequence[Array | None]
    outputs: Sequence[Array]
    attributes: Mapping[str, Any]
    opset: int


def bounds(
    node: onnx.NodeProto, inputs: Sequence[Array | None], outputs: Sequence[Array], opset: int
) -> list[Array]:
    """The bound of each output; zeros for operators without one here."""
    own = _OWN.get(node.op_type)
    if own is None:
        return [np.zeros(()) for _ in outputs]
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    found = own(Call(node, inputs, outputs, attributes, opset))
    return [*found, *(np.zeros(()) for _ in outputs[len(found) :])]


def _log_softmax(call: Call) -> list[Array]:
    """A logarithm of a sum near one is off by the sum's relative error, however small it is."""
    (x,), (y,) = call.inputs, call.outputs
    assert x is not None
    axis = call.attributes.get("axis", -1 if call.opset >= 13 else 1) % x.ndim
    axes = (axis,) if call.opset >= 13 else tuple(range(axis, x.ndim))
    below = np.abs(x - x.max(axes, keepdims=True))
    count = int(np.prod([x.shape[a] for a in axes]))
    total = np.abs(below + y)  # the logarithm of the sum, by magnitude
    likely = (np.exp(y) * np.where(np.isfinite(below), below, 0.0)).sum(axes, keepdims=True)
    return [UNIT * (2 * below + np.abs(y) + KERNEL * (1 + total) + count + likely)]


def _layer_norm(call: Call) -> list[Array]:
    """The kernel takes the variance as the mean square less the squared mean."""
    x, scale, *_ = call.inputs
    assert x is not None and scale is not None
    axes = tuple(range(call.attributes.get("axis", -1) % x.ndim, x.ndim))
    count = int(np.prod([x.shape[a] for a in axes]))
    mean = x.mean(axes, keepdims=True)
    size, square = np.abs(x).mean(axes, keepdims=True), (x**2).mean(axes, keepdims=True)
    variance = x.var(axes, keepdims=True) + call.attributes.get("epsilon", 1e-5)
    # Sums of squares and of values, the square of the mean, the difference, epsilon.
    off = UNIT * ((count + 2) * square + 2 * (count + 1) * np.abs(mean) * size + 2 * variance)
    root = np.sqrt(variance)
    slack = 1 / np.sqrt(np.maximum(variance - off, UNIT * variance)) - 1 / root
    centred = np.abs(x - mean)
    moved = UNIT * ((count + 1) * size + centred) / root + centred * slack
    return [
        np.abs(scale) * (moved + 4 * UNIT * centred / root) + 2 * UNIT * np.abs(call.outputs[0])
    ]


def _attention(call: Call) -> list[Array]:
    """Each score is off by its sum of magnitudes, which moves its weight by that share."""
    q, k, v = call.inputs[:3]
    assert q is not None and k is not None and v is not None
    heads = call.attributes.get("q_num_heads", 1) if q.ndim == 3 else 1
    width = q.shape[-1] // heads
    every = [k, *(a for a in call.inputs[4:5] if a is not None)]  # with those of before
    lengths = [_largest(np.linalg.norm(a.reshape(-1, width), axis=-1)) for a in (q, *every)]
    scale = call.attributes.get("scale") or width**-0.5
    score = (width + 4) * scale * lengths[0] * max(lengths[1:])
    keys = sum(a.shape[-2] for a in every)
    sizes = [
        np.abs(a) if slot in (2, 5) and a is not None else a for slot, a in enumerate(call.inputs)
    ]
    mixed, *_ = evaluated(call.node, sizes, call.opset)
    return [UNIT * (2 * score + 2 * keys + 2 * KERNEL) * mixed]


def _recurrent(call: Call) -> list[Array]:
    """What each gate of each step is off by, times what it moves of each output.

    The gates are moved through further inputs, each of which is added to one gate alone.
    """
    x, weight, again, *rest = call.inputs
    assert x is not None and weight is not None and again is not None
    steps, batch, _ = x.shape
    ways, gates, size = again.shape
    bias = rest[0] if rest and rest[0] is not None else np.zeros((ways, 2 * gates))
    first = [a for a in rest[2:4] if a is not None]
    largest = max(map(_largest, (*call.outputs, *first)))
    # A gate that is off moves the state, which the next step multiplies. A tanh may be two
    # sigmoids less one, so that it is off by roundings of one, however small it is.
    kernels = {1: 1, 3: 3, 4: 5}[gates // size]
    state = KERNEL * UNIT * (1.0 if kernels == 1 else kernels * max(1.0, largest))
    held = np.abs(again).sum(-1).max(0) * (state + (size + 1) * UNIT * largest)
    held += UNIT * 4 * np.abs(bias.reshape(ways, 2, gates)).sum(1).max(0)
    terms = (x.shape[2] + 4) * UNIT
    # Gates carry a state on, together with what it is off by.
    found = [np.full(o.shape, state * (1 if kernels == 1 else steps)) for o in call.outputs]
    wide = np.concatenate([weight, np.tile(np.eye(gates), (ways, 1, 1))], axis=2)
    for step in range(steps):
        local = terms * np.abs(x[step]) @ np.abs(weight).max(0).T + held  # of (batch, gates)
        moved = np.zeros((steps, batch, gates + 1, x.shape[2] + gates))
        moved[..., : x.shape[2]] = x[:, :, None, :]
        moved[step, :, np.arange(gates), x.shape[2] + np.arange(gates)] = SHIFT
        tiled = [_repeated(slot, a, gates + 1) for slot, a in enumerate(rest, 3)]
        given = [moved.reshape(steps, -1, moved.shape[-1]), wide, again, *tiled]
        for place, after in enumerate(evaluated(call.node, given, call.opset)):
            rows = after.reshape(*after.shape[:-2], batch, gates + 1, size)
            change = np.abs(rows[..., :gates, :] - rows[..., gates:, :]) / SHIFT
            # A step that is not finite moves nothing of those before it.
            off = np.where(change == 0.0, 0.0, change * local[:, :, None])
            found[place] = found[place] + off.sum(-2)
    return found


def _largest(array: Array) -> float:
    """The largest finite magnitude; 0 where there is none."""
    return float(np.abs(array[np.isfinite(array)]).max(initial=0.0))


def _repeated(slot: int, array: Array | None, times: int) -> Array | None:
    """Lengths and first states, an element of the batch ``times`` times; others as they are."""
    axis = {4: 0, 5: 1, 6: 1}.get(slot)
    return array if array is None or axis is None else np.repeat(array, times, axis)


_OWN: dict[str, Callable[[Call], list[Array]]] = {
    "LogSoftmax": _log_softmax,
    "LayerNormalization": _layer_norm,
    "Attention": _attention,
    **dict.fromkeys(("LSTM", "GRU", "RNN"), _recurrent),
}
