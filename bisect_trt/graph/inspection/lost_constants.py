"""Constants of which little is left at a reduced precision, because they are too small for it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bisect_trt.core.precision import Precision
from bisect_trt.graph.model.graph import Graph
from bisect_trt.graph.tensors.mapped_files import let_go
from bisect_trt.graph.tensors.operator_rules import MATRIX_INPUTS
from bisect_trt.numerics.blocks import flat, slices
from bisect_trt.numerics.rounding import SMALLEST_SUBNORMAL, STEPS, rounded

LOST = 1e-2
"""Error of a constant over its RMS from which on it counts as lost: 32 times FP16's usual one."""

_BLOCK = 1 << 16

_ADDS = frozenset({"Add", "Max", "Clip"})
"""A small number in these keeps something from being zero."""

_ROLES = {
    ("BatchNormalization", 1): "scale",
    ("BatchNormalization", 3): "mean",
    ("BatchNormalization", 4): "variance",
}
"""What the constants of an operator are called, by its input slots."""

_VARIANCE = ("BatchNormalization", 4)


@dataclass(frozen=True)
class LostConstant:
    """The constant ``name`` of ``layer``: its largest magnitude, the share of its significant bits
    that rounding takes (1 where it becomes zero), and its ``role`` there in words.
    """

    layer: str
    op: str
    name: str
    largest: float
    scalar: bool
    bits_lost: float
    role: str = ""

    def words(self, precision: Precision) -> str:
        """What becomes of it, such as "epsilon 1e-12 of /Clip becomes 0 in FP16"."""
        low, whose, many = precision.value.upper(), "its", False
        called = "epsilon" if self.op in _ADDS else f"constant {self.name!r}"
        what = f"{called} {self.largest:.3g} of {self.layer}"
        if not self.scalar:
            many = self.op in MATRIX_INPUTS
            kind, whose = ("weights", "their") if many else (self.role, "its")
            what = f"{kind} of {self.layer} (largest {self.largest:.3g})"
        if self.bits_lost >= 1.0:
            return f"{what} {'become' if many else 'becomes'} 0 in {low}"
        verb = "lose" if many else "loses"
        return f"{what} {verb} {self.bits_lost:.0%} of {whose} bits in {low}"


def lost_constants(graph: Graph, precision: Precision) -> dict[str, LostConstant]:
    """By layer, the constant that it reads of which least is left; only those that are lost.

    Args:
        graph: the model.
        precision: of the layers that read them.
    """
    if not precision.is_storage:
        return {}
    readers: dict[str, list[tuple[str, str, int]]] = {}
    for layer in graph.layers_at(precision):
        for slot, name in enumerate(graph.proto.graph.node[layer.index].input):
            readers.setdefault(name, []).append((layer.name, layer.op, slot))
    found: dict[str, LostConstant] = {}
    for name in (n for n in graph.float_constants if n in readers):
        array = graph.float_constants[name]
        of_all = _lost(array, precision) if array.size else None
        for layer_name, op, slot in readers[name]:
            told = of_all
            if told is None and (op, slot) == _VARIANCE:
                told = _lost_variance(array, _epsilon(graph, layer_name), precision)
            if told is None:
                continue
            largest, bits = told
            before = found.get(layer_name)
            if before is None or bits > before.bits_lost:
                role = _ROLES.get((op, slot), f"constant {name!r}")
                found[layer_name] = LostConstant(
                    layer_name, op, name, largest, array.size == 1, bits, role
                )
    return found


def _epsilon(graph: Graph, layer: str) -> float:
    node = graph.proto.graph.node[graph.names.index(layer)]
    return next((a.f for a in node.attribute if a.name == "epsilon"), 1e-5)


def _lost_variance(
    array: NDArray[np.float32], epsilon: float, precision: Precision
) -> tuple[float, float] | None:
    """As :func:`_lost`, of the channels whose variance is lost: each divides alone."""
    values = flat(array).astype(np.float64)
    small = (values > 0.0) & (values <= SMALLEST_SUBNORMAL[precision] / LOST)
    values = values[small]
    kept = rounded(values.astype(np.float32), precision).astype(np.float64)
    off = np.abs(np.sqrt((values + epsilon) / (kept + epsilon)) - 1.0) > LOST
    return _lost(values[off].astype(np.float32), precision) if off.any() else None


def _lost(array: NDArray[np.float32], precision: Precision) -> tuple[float, float] | None:
    """The largest magnitude and the share of bits that are lost; None for a constant that keeps
    most of them.
    """
    squares, largest, off = 0.0, 0.0, 0.0
    values = flat(array)
    # Rounding moves a small value by half of the smallest step at most.
    small = SMALLEST_SUBNORMAL[precision] / LOST
    for part in slices(values.size, _BLOCK):
        block = values[part].astype(np.float64)
        block = block[np.isfinite(block)]
        squares += float(np.dot(block, block))
        largest = max(largest, float(np.abs(block).max(initial=0.0)))
    let_go(array)
    if not 0.0 < math.sqrt(squares / values.size) <= small:
        return None
    for part in slices(values.size, _BLOCK):
        block = values[part][np.isfinite(values[part])]
        away = rounded(block, precision).astype(np.float64) - block
        off += float(np.dot(away, away))
    let_go(array)
    error = math.sqrt(off / squares)
    if error < LOST:
        return None
    usual = STEPS[precision] / math.sqrt(3.0)
    return largest, min(1.0, math.log(error / usual) / math.log(1.0 / usual))


def largest_constant(graph: Graph, layer: str) -> str:
    """The constant of ``layer`` with the largest magnitude in words, such as "variance 9.8e+07 of
    bn"; blank where it reads none.
    """
    index = graph.names.index(layer)
    node = graph.proto.graph.node[index]
    best, said = 0.0, ""
    for slot, name in enumerate(node.input):
        if name not in graph.float_constants:
            continue
        values = flat(graph.float_constants[name])
        finite = values[np.isfinite(values)]
        low, high = float(finite.min(initial=0.0)), float(finite.max(initial=0.0))
        size, value = (-low, low) if -low > high else (high, high)
        if size > best:
            role = _ROLES.get((node.op_type, slot), f"constant {name!r}")
            best, said = size, f"{role} {value:.3g} of {layer}"
    return said
