"""Finds the constants that FP16 or BF16 destroys in part, and says what they are for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray

from bisect_trt.base.outcomes import VANISHING, Finding
from bisect_trt.base.plan import Precision
from bisect_trt.metrics.arrays import flat, slices
from bisect_trt.metrics.rounding import LARGEST, SMALLEST_SUBNORMAL, STEPS, rounded
from bisect_trt.model.graph import Graph, as_graph
from bisect_trt.model.precision_rules import MATRIX_INPUTS
from bisect_trt.model.tensor_values import let_go

_LOST_ERROR = 1e-2
"""Relative RMS error from which on a constant counts as lost: 32 times FP16's usual one."""

_ADDS = frozenset({"Add", "Max", "Clip"})
"""Operators in which a small constant is an epsilon."""

_ROLES = {
    ("BatchNormalization", 1): "scale",
    ("BatchNormalization", 3): "mean",
    ("BatchNormalization", 4): "variance",
}
"""Names for an operator's constants, by input slot."""


@dataclass(frozen=True)
class LostConstant:
    """The constant ``name`` of ``layer``, which rounding destroys in part.

    ``largest`` is its largest magnitude, ``role`` its meaning for the layer. ``bits_lost`` is the
    lost share of its significant bits, 1 if it becomes zero.
    """

    layer: str
    op: str
    name: str
    largest: float
    scalar: bool
    bits_lost: float
    role: str = ""

    def words(self, precision: Precision) -> str:
        """A sentence such as "epsilon 1e-12 of /Clip becomes 0 in FP16"."""
        low = precision.value.upper()
        many = not self.scalar and self.op in MATRIX_INPUTS
        if self.scalar:
            called = "epsilon" if self.op in _ADDS else f"constant {self.name!r}"
            what = f"{called} {self.largest:.3g} of {self.layer}"
        else:
            kind = "weights" if many else self.role
            what = f"{kind} of {self.layer} (largest {self.largest:.3g})"
        become, lose, whose = ("become", "lose", "their") if many else ("becomes", "loses", "its")
        if self.bits_lost >= 1.0:
            return f"{what} {become} 0 in {low}"
        return f"{what} {lose} {self.bits_lost:.0%} of {whose} bits in {low}"


def lost_constants(graph: Graph, precision: Precision) -> dict[str, LostConstant]:
    """The lost constants: for each layer, the one that loses the largest share of its bits."""
    if not precision.is_storage:
        return {}
    readers: dict[str, list[tuple[str, str, int]]] = {}
    for layer in graph.layers_at(precision):
        for slot, name in enumerate(graph.proto.graph.node[layer.index].input):
            readers.setdefault(name, []).append((layer.name, layer.op, slot))
    found: dict[str, LostConstant] = {}
    for name in (n for n in graph.float_constants if n in readers):
        array = graph.float_constants[name]
        lost = _lost(array, precision) if array.size else None
        if lost is None:
            continue
        largest, bits_lost = lost
        for reader, op, slot in readers[name]:
            if reader not in found or bits_lost > found[reader].bits_lost:
                role = _ROLES.get((op, slot), f"constant {name!r}")
                found[reader] = LostConstant(
                    layer=reader,
                    op=op,
                    name=name,
                    largest=largest,
                    scalar=array.size == 1,
                    bits_lost=bits_lost,
                    role=role,
                )
    return found


def _lost(array: NDArray[np.float32], precision: Precision) -> tuple[float, float] | None:
    """The largest magnitude and the share of bits lost; None if the constant counts as kept."""
    largest = max(map(abs, _ends(array)))
    squares = _sum_of_squares(block.astype(np.float64) for block in _finite_blocks(array))
    # A constant with a larger RMS is not lost: the smallest step is at most this share of it.
    small = SMALLEST_SUBNORMAL[precision] / _LOST_ERROR
    if not 0.0 < math.sqrt(squares / array.size) <= small:
        return None
    # Relative to the RMS, so that single small values among large ones do not count.
    off = _sum_of_squares(
        rounded(block, precision).astype(np.float64) - block for block in _finite_blocks(array)
    )
    error = math.sqrt(off / squares)
    if error < _LOST_ERROR:
        return None
    # The RMS error of values that are spread evenly over one step of the format.
    usual = STEPS[precision] / math.sqrt(3.0)
    # On a logarithmic scale: the usual error loses no bits, an error of 100 % loses all.
    return largest, min(1.0, math.log(error / usual) / math.log(1.0 / usual))


def _finite_blocks(array: NDArray[np.float32]) -> Iterator[NDArray[np.float32]]:
    """The finite values of a constant, block by block, because it may have gigabytes."""
    values = flat(array)
    for part in slices(values.size):
        block = values[part]
        yield block[np.isfinite(block)]
    let_go(array)


def _sum_of_squares(blocks: Iterable[NDArray[np.float64]]) -> float:
    return sum(float(np.dot(block, block)) for block in blocks)


def _ends(array: NDArray[np.float32]) -> tuple[float, float]:
    """The minimum and the maximum of the finite values and 0."""
    low = high = 0.0
    for block in _finite_blocks(array):
        low = min(low, float(block.min(initial=0.0)))
        high = max(high, float(block.max(initial=0.0)))
    return low, high


def largest_constant(graph: Graph, layer: str) -> str:
    """The layer's largest constant in words, such as "variance 9.8e+07 of bn"; '' without any."""
    node = graph.proto.graph.node[graph.names.index(layer)]
    best, words = 0.0, ""
    for slot, name in enumerate(node.input):
        if name not in graph.float_constants:
            continue
        low, high = _ends(graph.float_constants[name])
        size, value = (-low, low) if -low > high else (high, high)
        if size > best:
            role = _ROLES.get((node.op_type, slot), f"constant {name!r}")
            best, words = size, f"{role} {value:.3g} of {layer}"
    return words


def constant_sizes(graph: Graph) -> dict[str, tuple[float, float]]:
    """The smallest and the largest magnitude of each layer's FP32 constants, by layer id.

    Zeros and values that are not finite do not count; layers without others are left out.
    """
    ends: dict[str, tuple[float, float]] = {}
    for name in {name for layer in graph.layers for name in layer.inputs}:
        if name in graph.float_constants:
            ends[name] = _magnitudes(graph.float_constants[name])
    found = {}
    for layer in graph.layers:
        known = [ends[name] for name in layer.inputs if ends.get(name, (0.0, 0.0))[1] > 0.0]
        if known:
            found[layer.name] = min(low for low, _ in known), max(high for _, high in known)
    return found


def _magnitudes(array: NDArray[np.float32]) -> tuple[float, float]:
    """The smallest magnitude but 0 and the largest; (inf, 0) where there is none."""
    low, high = math.inf, 0.0
    for block in _finite_blocks(array):
        sizes = np.abs(block)
        high = max(high, float(sizes.max(initial=0.0)))
        low = min(low, float(sizes.min(initial=np.inf, where=sizes > 0.0)))
    return low, high


def weight_findings(model: onnx.ModelProto | Graph, precision: Precision) -> list[Finding]:
    """A finding for each layer's constant that overflows or partly vanishes in FP16 or BF16."""
    if not precision.is_storage:
        return []
    graph = as_graph(model)
    readers: dict[str, list[str]] = {}
    for layer in graph.layers:
        for name in layer.inputs:
            readers.setdefault(name, []).append(layer.name)
    findings = []
    for name in (n for n in graph.float_constants if n in readers):
        array = graph.float_constants[name]
        for kind, problem in _problems(array, precision) if array.size else ():
            for reader in readers[name]:
                findings.append(
                    Finding(kind, reader, f"constant {name!r} of layer {reader!r} {problem}")
                )
    return findings


def _problems(array: NDArray[np.float32], precision: Precision) -> Iterator[tuple[str, str]]:
    """The kind and the description of each thing that ``array`` loses in ``precision``."""
    # Infinite values (a mask, the bound of a maximum) are the same in any precision.
    largest = max(_ends(array), key=abs)
    vanishing = 0
    for block in map(np.abs, _finite_blocks(array)):
        lost = (block > 0) & (block < SMALLEST_SUBNORMAL[precision] / 2)
        vanishing += int(np.count_nonzero(lost))
    if abs(largest) > LARGEST[precision]:
        # A value of this size is a mask, such as FP32's most negative number.
        what = "a mask or weight" if abs(largest) >= 1e30 else "a weight"
        yield (
            "weight-overflow",
            f"holds {largest:.3g}: {what} beyond {precision}'s {LARGEST[precision]:.6g} becomes "
            "infinite",
        )
    if vanishing:
        yield (
            VANISHING,
            f"holds {vanishing} of {array.size} values below half of {precision}'s smallest "
            f"number, {SMALLEST_SUBNORMAL[precision]:.3g}, which become zero",
        )
