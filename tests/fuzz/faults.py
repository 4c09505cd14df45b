"""Faults of known place and cause, planted into random networks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tests.fuzz.net import Net, Tensor

LOWEST = float(np.finfo(np.float32).min)
UNIT_AT_1 = 2.0**-10
"""FP16's distance of two numbers between 1 and 2."""

CHAIN_STEPS = 48
"""The steps of a chain: it loses about 18 units, a layer alone one at most."""


@dataclass(frozen=True)
class Planted:
    """A fault: the ``cause`` that a run must name, and the ``layers`` of which it names one.

    An empty cause says that the fault is there and harms nothing.
    """

    kind: str
    cause: str
    layers: frozenset[str]


@dataclass(frozen=True)
class Fault:
    """A kind of fault; ``parts`` are the kinds that it plants, itself if it is one."""

    plant: Callable[[Net, Tensor], tuple[Tensor, Planted]]
    parts: tuple[str, ...]


def _name_of(tensor: str) -> str:
    """The name of the node that the builder gave with ``tensor``."""
    return tensor.removesuffix("_output_0")


def _bounded(net: Net, x: Tensor) -> Tensor:
    """Values between -1 and 1, so that sizes behind are known."""
    return net.unary("Tanh", x)


def _with(y: str, x: Tensor, kind: str, cause: str, *tensors: str) -> tuple[Tensor, Planted]:
    return Tensor(y, x.shape), Planted(kind, cause, frozenset(map(_name_of, tensors)))


def _overflow(net: Net, x: Tensor) -> tuple[Tensor, Planted]:
    """Values of 1e6 in between, as in a decoder without a normalisation."""
    up = net.op("Mul", _bounded(net, x).name, net.weight(3e4))
    far = net.op("Mul", up, net.weight(50.0))
    down = net.op("Mul", net.op("Mul", far, net.weight(1e-3)), net.weight(1e-3))
    return _with(down, x, "overflow", "overflow", far)


def _squares(net: Net, x: Tensor) -> tuple[Tensor, Planted]:
    """An RMSNorm of values in the hundreds: the squares leave the range."""
    big = net.op("Mul", net.op("Add", _bounded(net, x).name, net.weight(1.5)), net.weight(400.0))
    square = net.op("Pow", big, net.weight(2.0))
    mean = net.reduce("ReduceMean", square, [-1])
    root = net.op("Sqrt", net.op("Add", mean, net.weight(1e-6)))
    return _with(net.op("Div", big, root), x, "squares", "overflow", square, mean)


def _epsilon(net: Net, x: Tensor) -> tuple[Tensor, Planted]:
    """A normalisation of small values whose squares and whose epsilon become zero."""
    small = net.op("Mul", _bounded(net, x).name, net.weight(1e-4))
    square = net.op("Mul", small, small)
    mean = net.reduce("ReduceMean", square, [-1])
    total = net.op("Add", mean, net.weight(1e-12))
    y = net.op("Div", small, net.op("Sqrt", total))
    kept = {square, mean, total, y, small}
    return _with(y, x, "epsilon", "underflow", *kept)


def _underflow(net: Net, x: Tensor) -> tuple[Tensor, Planted]:
    """A product with weights below the smallest number of FP16, scaled up behind."""
    kept = _bounded(net, x).name
    weight = net.weight(net.random.uniform(1e-9, 2e-9, x.shape[-1]))
    tiny = net.op("Mul", kept, weight)
    up = net.op("Mul", net.op("Mul", tiny, net.weight(2e4)), net.weight(3e4))
    return _with(net.op("Add", up, kept), x, "underflow", "underflow", tiny)


def _offset(net: Net, x: Tensor) -> tuple[Tensor, Planted]:
    """A large number, added and taken off again: the bits of the rest are lost."""
    far = net.op("Add", _bounded(net, x).name, net.weight(3000.0))
    back = net.op("Sub", far, net.weight(3000.0))
    return _with(back, x, "offset", "rounding", far, back)


def _heavy(net: Net, x: Tensor) -> tuple[Tensor, Planted]:
    """A weight beyond the range of FP16 where all values are in range."""
    small = net.op("Mul", _bounded(net, x).name, net.weight(1e-3))
    y = net.op("Mul", small, net.weight(2e5))
    return _with(net.op("Mul", y, net.weight(5e-3)), x, "heavy", "overflow", y)


def _masked(net: Net, x: Tensor) -> tuple[Tensor, Planted]:
    """Rows that an input masks as a whole: infinities only, of which a softmax is NaN."""
    keep = net.entry("mask", x.shape[1:], 0.0)
    for feed in net.feeds:
        mask = (net.random.random(feed[keep.name].shape) < 0.7).astype(np.float32)
        mask[0].reshape(-1, mask.shape[-1])[0] = 0.0
        feed[keep.name] = mask
    missing = net.op("Sub", net.weight(1.0), keep.name)
    mask_name = net.op("Mul", missing, net.weight(LOWEST / 2))
    bounded = _bounded(net, x).name
    scores = net.op("Add", bounded, mask_name)
    y = net.op("Add", bounded, net.op("Softmax", scores, axis=-1))
    return _with(y, x, "masked", "overflow", mask_name, scores)


def _mask_1e9(net: Net, x: Tensor) -> tuple[Tensor, Planted]:
    """A mask of -1e9: infinite in FP16, zero behind the softmax, and right."""
    mask = np.zeros(x.shape[-1], np.float32)
    mask[-1] = -1e9
    bounded = _bounded(net, x).name
    scores = net.op("Add", bounded, net.weight(mask))
    y = net.op("Add", bounded, net.op("Softmax", scores, axis=-1))
    return _with(y, x, "mask-1e9", "", scores)


def _dead(net: Net, x: Tensor) -> tuple[Tensor, Planted]:
    """An overflow that a bound takes away again: infinity and 1e6 are both cut to 2."""
    far = net.op("Mul", net.op("Mul", _bounded(net, x).name, net.weight(4e4)), net.weight(9.0))
    cut = net.op("Min", net.op("Max", far, net.weight(-2.0)), net.weight(2.0))
    return _with(net.op("Mul", cut, net.weight(0.5)), x, "dead", "", far)


def _swallowed(net: Net, x: Tensor) -> tuple[Tensor, Planted]:
    """Infinity less infinity, into what a kernel may compute without the NaN."""
    bounded = net.op("Add", _bounded(net, x).name, net.weight(2.0))
    far = net.op("Mul", bounded, net.weight(6e4))
    near = net.op("Sub", far, net.op("Mul", far, net.weight(0.75)))
    back = net.op("Mul", near, net.weight(5e-5))
    # Through a recurrent layer: with a bias, ONNX Runtime's is finite for NaN.
    width, steps = x.shape[-1], int(np.prod(x.shape[1:-1]))
    rows = net.op("Reshape", back, net.ints(-1, steps, width))
    weights = [net.normal(1, 3 * width, width, scale=width**-0.5) for _ in "WR"]
    weights.append(net.normal(1, 6 * width, scale=0.1))
    moved = net.op("Transpose", rows, perm=[1, 0, 2])
    gates = net.op("GRU", moved, *weights, hidden_size=width)
    y = net.op("Reshape", net.op("Transpose", gates, perm=[2, 0, 1, 3]), net.ints(-1, *x.shape[1:]))
    return _with(y, x, "swallowed", "overflow", far)


def _chain(net: Net, x: Tensor) -> tuple[Tensor, Planted]:
    """Many steps of less than half a unit in the last place: each is lost, none alone matters."""
    y = net.op("Mul", _bounded(net, x).name, net.weight(0.4))
    y = net.op("Add", y, net.weight(1.5))
    sign = net.random.choice([-1.0, 1.0], x.shape[-1])
    for _ in range(CHAIN_STEPS):
        step = sign * net.random.uniform(0.3, 0.45, x.shape[-1]) * UNIT_AT_1
        y = net.op("Add", y, net.weight(step))
    y = net.op("Mul", net.op("Sub", y, net.weight(1.5)), net.weight(2.5))
    return _with(y, x, "chain", "accumulation")


_PLANTS: dict[str, Callable[[Net, Tensor], tuple[Tensor, Planted]]] = {
    "overflow": _overflow,
    "squares": _squares,
    "epsilon": _epsilon,
    "underflow": _underflow,
    "offset": _offset,
    "heavy": _heavy,
    "masked": _masked,
    "mask-1e9": _mask_1e9,
    "dead": _dead,
    "swallowed": _swallowed,
    "chain": _chain,
}

TWO = (("overflow", "underflow"), ("squares", "offset"), ("heavy", "epsilon"))
"""Faults that are planted together."""

FAULTS: dict[str, Fault] = {
    **{name: Fault(plant, (name,)) for name, plant in _PLANTS.items()},
    **{"+".join(pair): Fault(_PLANTS[pair[0]], pair) for pair in TWO},
}
"""Every kind of fault by its name."""
