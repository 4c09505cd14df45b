"""Predicts what a plan costs in time, from a table of consecutive blocks of the network.

Source: the time of a mixed-precision network is additive over consecutive subgraphs, not over
single layers (Intel, arXiv 2505.13060). On TensorRT for RTX blocks add up within 3 to 7 %, while
the same nine convolutions cost five times as much alone as beside point-wise layers in FP32.

So a table holds three costs of each block beyond everything reduced: the whole block in FP32, its
matrix layers alone, its other layers alone. A block that a plan keeps in part lies between them by
bilinear interpolation. The entries are estimated by a roofline, or solved from timed engines.

Errors: within a block neighbours are not looked at, so a few layers of a block are its weakest
prediction. The estimate knows neither kernels nor fused attention. Its rates and shares were chosen
by measured plans of five networks on one GPU, so its errors on other networks are not known; on
these five a plan's share of FP16's saving is off by up to 0.5. Times of engines replace it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import onnx
from numpy.typing import NDArray

from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.model.graph import Graph
from bisect_trt.model.precision_rules import FLOAT, MATRIX_INPUTS, MOVES
from bisect_trt.model.shapes import Inputs, Shape, complete, multiply_adds, shapes_from
from bisect_trt.model.walk import attribute, every_node, subgraphs, tensors_read

Matrix = NDArray[np.float64]

BLOCKS = 10
"""Blocks of a network; fewer where it has fewer layers."""
CUT_CANDIDATES = 192
"""Places at which a network may be cut, to bound the search for the best ones."""
BUILDS = 12
"""Engines that a table is measured with, those of FP32 and of everything reduced included."""

MULTIPLY_ADDS_PER_S = {
    Precision.FP16: 6e13,
    Precision.BF16: 6e13,
    Precision.TF32: 3e13,
    Precision.FP32: 1e13,
}
"""What whole networks reach on an H100 or H200: an eighth of its tensor cores' peak.

FP32 runs on CUDA cores, which reach a larger part of less.
"""
BYTES_PER_S = 2.4e12
"""What kernels reach of an H100's memory bandwidth: 0.7 of it."""
TILE_CHANNELS = 64
"""Columns of a tensor core's tile: a layer with fewer takes the time of a full tile."""
FUSED_TRAFFIC = 0.1
"""The share of a point-wise layer's bytes that move: the builder fuses it into its neighbours."""
CONVOLUTION_BETWEEN_REDUCED = 0.6
"""The share of a convolution's cost in an FP32 block that it has between reduced layers."""
PRODUCT_BETWEEN_REDUCED = 0.05
"""The same of other matrix layers: their kernels read and write FP16 and accumulate in FP32."""
OTHERS_BETWEEN_REDUCED = 0.2
"""The same of layers whose kernels take in casts: point-wise ones, copies, reductions of rows."""

PRIOR_DEVIATION = 1.0
"""How far entries are from the estimate, as a share of it."""
PRIOR_FLOOR = 0.5
"""How far at least, as a share of a block's mean cost."""
TIME_DEVIATION = 0.01
"""The deviation of a measured time and of the sum over blocks, as a share of FP32's extra time."""

SAME_TIME = 0.03
"""A share of what reducing saves: plans that differ by less take the same time."""

_CONVOLUTIONS = frozenset({"Conv", "ConvTranspose", "DeformConv"})
_VIEWS = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Dropout"})
"""Operators that move no bytes."""
_READ_WHAT_THEY_WRITE = frozenset({"Gather", "GatherElements", "GatherND", "Slice"})
"""Operators that read a part of their operand, as an embedding does of its table."""
_POINTWISE = frozenset(
    {"Abs", "Add", "BatchNormalization", "Cast", "Ceil", "Celu", "Clip", "Cos", "Div", "Elu", "Erf"}
    | {"Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Log", "Max", "Min", "Mish"}
    | {"Mul", "Neg", "PRelu", "Pow", "Reciprocal", "Relu", "Round", "Selu", "Sigmoid", "Sign"}
    | {"Sin", "Softplus", "Softsign", "Sqrt", "Sub", "Tanh", "ThresholdedRelu", "Where"}
)
"""Operators that builders fuse into the kernels of their neighbours."""
_ACTIVATIONS = frozenset({"Clip", "HardSigmoid", "HardSwish", "LeakyRelu", "Relu", "Sigmoid"})
"""Operators that builders fuse into the convolution before them, if both have one type."""
_TAKE_IN_CASTS = (
    _POINTWISE
    | MOVES
    | frozenset({"GlobalAveragePool", "GroupNormalization", "InstanceNormalization"})
    | frozenset({"LayerNormalization", "LogSoftmax", "RMSNormalization", "Softmax"})
    | frozenset({"ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum", "Resize"})
)
"""Operators whose kernels read and write another type at no cost."""


@dataclass(frozen=True)
class LayerWork:
    """What one layer computes and moves.

    ``multiply_adds`` are those of a matrix layer, 0 for others; ``tiled`` the same with the columns
    that a tensor core computes for nothing. ``values`` are the FP32 values read and written,
    weights included; ``moved`` those that cross the GPU's memory once neighbours are fused.
    ``exposed`` are the values that cross it once more where the layer alone is in FP32.
    ``is_matrix`` says that the layer multiplies matrices or convolves.
    """

    name: str
    op: str
    multiply_adds: float
    tiled: float
    values: float
    moved: float
    exposed: float
    is_matrix: bool

    def bytes_at(self, precision: Precision) -> float:
        """The bytes read and written at ``precision``."""
        return self.values * _width(precision)

    def seconds_at(self, precision: Precision) -> float:
        """The time by the roofline: the longer of computing and moving bytes."""
        computing = self.tiled / MULTIPLY_ADDS_PER_S[precision]
        return max(computing, self.moved * _width(precision) / BYTES_PER_S)

    @property
    def weight(self) -> float:
        """The layer's part in its half of a block: multiply-adds, or values that move."""
        return self.tiled if self.is_matrix else self.moved


def _width(precision: Precision) -> int:
    return 2 if precision.is_storage else 4


@dataclass(frozen=True)
class BlockCost:
    """What a block costs beyond everything reduced: kept whole, or one half of it alone."""

    whole: float
    matrix: float
    others: float


@dataclass(frozen=True)
class CostTable:
    """What the blocks of a network cost, in ``unit``: "relative" (all reduced takes 1) or "ms".

    ``blocks`` holds the work of each block's layers in the file's order, ``costs`` a row for each
    block. ``reduced`` is the time with everything reduced.
    """

    blocks: tuple[tuple[LayerWork, ...], ...]
    costs: tuple[BlockCost, ...]
    reduced: float
    unit: str = "relative"

    def predicted(self, plan: PrecisionPlan) -> float:
        """The time of ``plan`` beyond everything reduced, in the table's unit.

        Pinned layers that the table does not know cost nothing.
        """
        return float((self.coefficients(plan.pinned) * self._entries).sum())

    def time(self, plan: PrecisionPlan) -> float:
        """The time of ``plan``, in the table's unit."""
        return self.reduced + self.predicted(plan)

    def saving_kept(self, plan: PrecisionPlan) -> float:
        """The share of the reduced precision's saving that ``plan`` keeps; NaN if it saves none."""
        extra = self.extra
        return 1.0 - self.predicted(plan) / extra if extra > 0.0 else math.nan

    @property
    def extra(self) -> float:
        """The time of everything in FP32 beyond everything reduced."""
        return sum(cost.whole for cost in self.costs)

    def coefficients(self, pinned: Collection[str]) -> Matrix:
        """The factors of the entries in a plan's time: (blocks, 3) for whole, matrix, others.

        With m and o the kept shares of a block's two halves: m*o, m*(1-o), o*(1-m).
        """
        others, matrix = [0.0] * len(self.blocks), [0.0] * len(self.blocks)
        for name in pinned:
            place = self._places.get(name)
            if place is not None:
                block, is_matrix, share = place
                (matrix if is_matrix else others)[block] += share
        return _factors(np.array(matrix), np.array(others))

    @cached_property
    def _entries(self) -> Matrix:
        """The costs as an array (blocks, 3)."""
        rows = [(cost.whole, cost.matrix, cost.others) for cost in self.costs]
        return np.array(rows, np.float64).reshape(-1, 3)

    @cached_property
    def _places(self) -> dict[str, tuple[int, bool, float]]:
        """By layer: its block, whether it is in the matrix half, its share of its half."""
        found = {}
        for number, block in enumerate(self.blocks):
            totals = _totals(block)
            for work in block:
                total = totals[work.is_matrix]
                share = work.weight / total if total else 0.0
                found[work.name] = number, work.is_matrix, share
        return found

    def with_entries(self, entries: Matrix, reduced: float, unit: str) -> CostTable:
        """The table with other costs: (blocks, 3) for whole, matrix, others.

        Where only one half of a block has work, that half's cost is the whole block's too.
        """
        costs = []
        for block, (whole, matrix, others) in zip(self.blocks, entries.tolist(), strict=True):
            of_others, of_matrix = _totals(block)
            if of_others and of_matrix:
                costs.append(BlockCost(whole, matrix, others))
            else:
                costs.append(_of_one_half(block, matrix if of_matrix else others))
        return replace(self, costs=tuple(costs), reduced=reduced, unit=unit)


def _factors(matrix: Matrix, others: Matrix) -> Matrix:
    """The bilinear factors of whole, matrix and others, for the kept shares of both halves."""
    return np.stack([matrix * others, matrix * (1.0 - others), others * (1.0 - matrix)], axis=-1)


def _totals(block: Iterable[LayerWork]) -> tuple[float, float]:
    """The weights of a block's other layers and of its matrix layers."""
    totals = [0.0, 0.0]
    for work in block:
        totals[work.is_matrix] += work.weight
    return totals[0], totals[1]


def _of_one_half(block: Iterable[LayerWork], cost: float) -> BlockCost:
    """The costs of a block of which only one half has work, or none."""
    others, matrix = _totals(block)
    whole = cost if others or matrix else 0.0
    return BlockCost(whole, whole if matrix else 0.0, whole if others else 0.0)


def estimated_table(
    graph: Graph,
    inputs: Inputs,
    precision: Precision,
    *,
    kept: Precision | None = None,
    count: int = BLOCKS,
) -> CostTable:
    """The table of ``graph`` without an engine, in relative time.

    Args:
        graph: the model.
        inputs: the shape of each input, which decides how large tensors are.
        precision: what reduced layers run in.
        kept: what an engine runs pinned layers in; None for TF32, an engine's FP32 unless that is
            switched off, or for FP32 where ``precision`` is TF32.
        count: how many blocks, fewer where there are fewer layers.

    Returns:
        A table in which everything reduced takes 1.
    """
    if kept is None:
        kept = Precision.TF32 if precision.is_storage else Precision.FP32
    works = layer_works(graph, inputs, precision)
    starts = block_starts(works, crossing_values(graph, inputs, precision), count)
    blocks = tuple(works[begin:end] for begin, end in pairwise((*starts, len(works))))
    reduced = sum(work.seconds_at(precision) for work in works) or 1.0
    costs = tuple(_estimated(block, precision, kept, reduced) for block in blocks)
    return CostTable(blocks, costs, 1.0)


def _estimated(
    block: Sequence[LayerWork], precision: Precision, kept: Precision, unit_s: float
) -> BlockCost:
    """A block's costs by the roofline, in units of ``unit_s``."""
    whole = matrix = others = 0.0
    for work in block:
        extra = max(0.0, work.seconds_at(kept) - work.seconds_at(precision))
        whole += extra / unit_s
        if work.is_matrix:
            matrix += extra * _share_between_reduced(work.op, precision) / unit_s
        elif precision.is_storage:
            others += work.exposed * _width(precision) / BYTES_PER_S / unit_s
    if not all(_totals(block)):
        return _of_one_half(block, whole)
    # Keeping one more layer never gets cheaper: a search may rely on it.
    return BlockCost(max(whole, matrix, others), matrix, others)


def _share_between_reduced(op: str, precision: Precision) -> float:
    """The share of its cost in an FP32 block that a matrix layer has between reduced layers."""
    # TF32 is no type of a tensor: nothing is cast.
    if not precision.is_storage:
        return 1.0
    return CONVOLUTION_BETWEEN_REDUCED if op in _CONVOLUTIONS else PRODUCT_BETWEEN_REDUCED


def layer_works(graph: Graph, inputs: Inputs, precision: Precision) -> tuple[LayerWork, ...]:
    """The work of the layers that can run at ``precision``, in the file's order.

    A tensor whose shape does not follow from ``inputs`` counts like the largest operand of its
    layer.
    """
    sizes = _Sizes(graph, inputs)
    nodes = graph.proto.graph.node
    makers = {name: node.op_type for node in nodes for name in node.output}
    return tuple(
        _work(nodes[layer.index], layer.name, sizes, makers) for layer in graph.layers_at(precision)
    )


class _Sizes:
    """The number of values of each float tensor, and the shapes that are known."""

    def __init__(self, graph: Graph, inputs: Inputs) -> None:
        self.shapes = shapes_from(graph, inputs)
        self._values: dict[str, float] = {}
        for node in graph.proto.graph.node:
            read = [self._known(graph, name) for name in node.input if name]
            largest = max((size for size in read if size is not None), default=1.0)
            for name in filter(None, node.output):
                known = self._known(graph, name)
                self._values[name] = largest if known is None else known
        for name in (*(i.name for i in graph.proto.graph.input), *graph.float_constants):
            self._values.setdefault(name, self._known(graph, name) or 0.0)
        self._floats = {name for name in self._values if graph.types.type_of(name) == FLOAT}

    def _known(self, graph: Graph, name: str) -> float | None:
        """The values of a tensor by its shape, or as an earlier node left them."""
        if name in self._values:
            return self._values[name]
        if name in graph.constants:
            return float(graph.constants.count(name))
        shape = complete(self.shapes.get(name))
        return None if shape is None else float(math.prod(shape))

    def floats(self, names: Iterable[str]) -> float:
        """The FP32 values of ``names``, each counted once."""
        return sum(self._values[name] for name in set(names) & self._floats)

    def of(self, name: str) -> float:
        """The values of ``name``; 0 if it is unknown."""
        return self._values.get(name, 0.0)


def _work(node: onnx.NodeProto, name: str, sizes: _Sizes, makers: Mapping[str, str]) -> LayerWork:
    """What the layer ``name`` computes and moves; ``makers`` are operators by their outputs."""
    op, shapes = node.op_type, sizes.shapes
    written, read = sizes.floats(node.output), sizes.floats(tensors_read(node))
    values = written + (min(written, read) if op in _READ_WHAT_THEY_WRITE else read)
    if op in MATRIX_INPUTS or _has_matrix_body(node):
        # A matrix layer of unknown shapes still reads each weight once.
        count = multiply_adds(node, shapes, sizes.of(node.output[0])) or values
        tiled = count * _tile_factor(node, shapes)
        return LayerWork(name, op, count, tiled, values, values, 0.0, is_matrix=True)
    moved = values * (0.0 if op in _VIEWS else FUSED_TRAFFIC if op in _POINTWISE else 1.0)
    exposed = OTHERS_BETWEEN_REDUCED * moved if op in _TAKE_IN_CASTS else moved
    if op in _ACTIVATIONS and makers.get(node.input[0]) in _CONVOLUTIONS:
        exposed = values
    return LayerWork(name, op, 0.0, 0.0, values, moved, exposed, is_matrix=False)


def _has_matrix_body(node: onnx.NodeProto) -> bool:
    """Whether a body of ``node`` multiplies matrices."""
    return any(
        inner.op_type in MATRIX_INPUTS
        for _, body in subgraphs(node)
        for inner in every_node(body.node)
    )


def _tile_factor(node: onnx.NodeProto, shapes: Mapping[str, Shape]) -> float:
    """How many times the columns of a convolution a full tile has; 1 for what has no tiles."""
    if node.op_type not in ("Conv", "ConvTranspose"):
        return 1.0
    weight = complete(shapes.get(node.input[1]))
    groups = attribute(node, "group", 1)
    # Grouped convolutions run on other units; their bytes decide.
    if not weight or groups > 1:
        return 1.0
    columns = weight[0] if node.op_type == "Conv" else weight[1]
    return -(-columns // TILE_CHANNELS) * TILE_CHANNELS / max(1, columns)


def crossing_values(graph: Graph, inputs: Inputs, precision: Precision) -> tuple[float, ...]:
    """The FP32 values that are alive behind each layer: made before, read later or given out."""
    sizes = _Sizes(graph, inputs)
    nodes = graph.proto.graph.node
    last = dict.fromkeys(graph.outputs, len(nodes))
    for index, node in enumerate(nodes):
        for name in tensors_read(node):
            last[name] = max(last.get(name, index), index)
    ends: dict[int, float] = defaultdict(float)
    alive, found = 0.0, []
    layers = {layer.index for layer in graph.layers_at(precision)}
    for index, node in enumerate(nodes):
        for name in filter(None, node.output):
            if name not in graph.constants and last.get(name, index) > index:
                size = sizes.floats([name])
                alive += size
                ends[last[name]] += size
        alive -= ends.pop(index, 0.0)
        if index in layers:
            found.append(alive)
    return tuple(found)


def block_starts(
    works: Sequence[LayerWork], crossing: Sequence[float], count: int = BLOCKS
) -> tuple[int, ...]:
    """The first layer of each of at most ``count`` blocks: even in work, cut where little crosses.

    ``crossing`` are the values alive behind each layer. A block's size is the mean of its share of
    layers and its share of the time at TF32. The cuts have the least sum of squared sizes and
    relative crossing values, found by dynamic programming.
    """
    if not works:
        return ()
    size = _sizes_of(works)
    ends = _candidate_cuts(size, crossing)
    count = min(count, len(ends))
    at = np.concatenate([[0.0], np.cumsum(size)[ends]])
    mean = float(np.mean(crossing)) or 1.0
    price = np.array([crossing[end] / mean for end in ends]) / count
    price[-1] = 0.0  # the network's end is no cut
    # best[j]: the least cost of the layers before candidate j in the blocks so far.
    best = np.full(len(at), np.inf)
    best[0], came = 0.0, []
    squares = count * (at[None, :] - at[:, None]) ** 2
    squares[np.tril_indices(len(at))] = np.inf
    for _ in range(count):
        total = best[:, None] + squares
        came.append(total.argmin(axis=0))
        best = total.min(axis=0)
        best[1:] += price
    place, starts = len(at) - 1, []
    for sources in reversed(came):
        place = int(sources[place])
        starts.append(0 if place == 0 else int(ends[place - 1]) + 1)
    return tuple(reversed(starts))


def _sizes_of(works: Sequence[LayerWork]) -> Matrix:
    """Each layer's share of a network: half by number, half by time."""
    seconds = np.array([work.seconds_at(Precision.TF32) for work in works])
    shares = seconds / seconds.sum() if seconds.sum() else np.zeros(len(works))
    halves: Matrix = (shares + 1.0 / len(works)) / (2.0 if seconds.sum() else 1.0)
    return halves


def _candidate_cuts(size: Matrix, crossing: Sequence[float]) -> NDArray[np.intp]:
    """The layers that a block may end with: of each small stretch the one with least crossing."""
    stretch = np.minimum((np.cumsum(size) * CUT_CANDIDATES).astype(int), CUT_CANDIDATES - 1)
    found: dict[int, int] = {}
    for place, number in enumerate(stretch):
        if number not in found or crossing[place] < crossing[found[number]]:
            found[number] = place
    found[CUT_CANDIDATES] = len(size) - 1
    return np.unique(np.fromiter(found.values(), np.intp))


def engines_to_build(table: CostTable, count: int = BUILDS) -> tuple[frozenset[str], ...]:
    """The pinned layers of ``count`` engines whose times tell the entries of ``table`` best.

    The first has none, the second all, the third all matrix layers, the fourth all others. Each
    further one keeps in each block nothing, one half or the whole: the combination that the times
    so far leave most uncertain (greedy choice by the posterior variance, in coordinate ascent).
    """
    states = [_states(block) for block in table.blocks]
    rows = np.array(
        [
            [table.coefficients(state)[number] for state in found]
            for number, found in enumerate(states)
        ]
    ).reshape(-1, 4, 3)
    uncertain = np.diag(_prior_deviations(table._entries).ravel() ** 2)
    noise = (TIME_DEVIATION * max(table.extra, 1e-9)) ** 2
    chosen: list[frozenset[str]] = []
    for number in range(count):
        if number < 4:
            choice = [number] * len(states)
        else:
            choice = _most_uncertain(uncertain, rows, seed=number)
        chosen.append(frozenset[str]().union(*(s[c] for s, c in zip(states, choice, strict=True))))
        row = _row(rows, choice)
        seen = uncertain @ row
        uncertain = uncertain - np.outer(seen, seen) / (float(row @ seen) + noise)
    return tuple(dict.fromkeys(chosen))


def _states(block: Sequence[LayerWork]) -> tuple[frozenset[str], ...]:
    """What an engine may keep of a block: nothing, everything, matrix layers, others."""
    matrix = frozenset(work.name for work in block if work.is_matrix)
    every = frozenset(work.name for work in block)
    return frozenset[str](), every, matrix, every - matrix


def _row(rows: Matrix, choice: Sequence[int]) -> Matrix:
    """The coefficients of an engine whose blocks are in the states ``choice``."""
    found: Matrix = rows[np.arange(len(rows)), np.asarray(choice, np.intp)].ravel()
    return found


def _most_uncertain(uncertain: Matrix, rows: Matrix, seed: int) -> list[int]:
    """The states of all blocks whose summed time has the largest variance, by coordinate ascent."""
    best, found = -1.0, [0] * len(rows)
    random = np.random.default_rng(seed)
    for _ in range(8):
        choice, score, changed = random.integers(0, 4, len(rows)).tolist(), -1.0, True
        while changed:
            changed = False
            for block in range(len(rows)):
                for state in range(4):
                    tried = [*choice[:block], state, *choice[block + 1 :]]
                    row = _row(rows, tried)
                    variance = float(row @ uncertain @ row)
                    if variance > score * (1.0 + 1e-9):
                        choice, score, changed = tried, variance, True
        if score > best:
            best, found = score, choice
    return found


def _prior_deviations(entries: Matrix) -> Matrix:
    """How far the true entries may be from the estimated ones: (blocks, 3)."""
    whole, others = np.abs(entries[:, :1]), np.abs(entries[:, 2:])
    floor = PRIOR_FLOOR * float(whole.mean()) if len(whole) else 0.0
    # A half's entry is as uncertain as its block is dear; the others' half is nearly free.
    scale = np.concatenate([whole, whole, np.maximum(others, 0.3 * whole)], axis=1)
    deviations: Matrix = PRIOR_DEVIATION * scale + floor * np.array([1.0, 0.5, 0.3])
    return np.maximum(deviations, 1e-12)


def measured_table(
    table: CostTable, pinned: Sequence[Collection[str]], times_ms: Sequence[float]
) -> CostTable:
    """``table`` in milliseconds, solved from the times of engines that keep ``pinned`` layers.

    Least squares, with the scaled estimate as a prior: there may be fewer engines than entries.
    Entries may be negative, as measured. The times must hold an engine with nothing pinned and
    one with everything.

    Raises:
        ValueError: one of these two is missing.
    """
    rows = np.stack([table.coefficients(names).ravel() for names in pinned])
    times = np.asarray(times_ms, np.float64)
    kept = [len(table._places.keys() & set(names)) for names in pinned]
    if 0 not in kept or len(table._places) not in kept:
        raise ValueError("the times need an engine with nothing pinned and one with everything")
    reduced = float(np.median([t for t, n in zip(times, kept, strict=True) if not n]))
    whole = float(np.median([t for t, n in zip(times, kept, strict=True) if n == max(kept)]))
    # FP32 may be no slower: then the times say nothing about how the estimate scales.
    scale = max(whole - reduced, 0.02 * reduced) / (table.extra or 1.0)
    prior = table._entries * scale
    deviations = _prior_deviations(prior).ravel()
    noise = TIME_DEVIATION * max(whole - reduced, 0.02 * reduced)
    # Ridge regression around the prior, in units of each entry's deviation.
    scaled = rows * deviations / noise
    rest = (times - reduced - rows @ prior.ravel()) / noise
    left = scaled.T @ scaled + np.eye(len(deviations))
    found = prior.ravel() + deviations * np.linalg.solve(left, scaled.T @ rest)
    return table.with_entries(found.reshape(-1, 3), reduced, "ms")
