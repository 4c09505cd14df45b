"""The gradients of operators that move, pick or interpolate values along axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.model.gradient_nodes import GradientWriter, NoRuleError, Shape, Site
from bisect_trt.model.gradient_rules import RULES, Gradients, Rule, padding

Pick = Callable[[Site, NDArray[np.int64]], NDArray[np.int64]]
"""What a moving node gives for the flat places of its first input."""


def _numbered(shape: Shape) -> NDArray[np.int64]:
    return np.arange(prod(shape), dtype=np.int64).reshape(shape)


def _moved(pick: Pick) -> Rule:
    """The gradient goes back to the places from which the node took each value."""

    def rule(s: Site) -> Gradients:
        if s.wanted != {0}:
            raise NoRuleError
        places = pick(s, _numbered(s.shape()))
        return {0: s.to.scattered(s.g, places, s.shape())}

    return rule


def _gathered(s: Site, places: NDArray[np.int64]) -> NDArray[np.int64]:
    found: NDArray[np.int64] = np.take(places, s.values(1), axis=s.axis(0))
    return found


def _gathered_elements(s: Site, places: NDArray[np.int64]) -> NDArray[np.int64]:
    axis = s.axis(0)
    indices = s.values(1) % s.shape()[axis]
    others = np.ix_(*(range(size) for size in indices.shape))
    chosen = tuple(indices if i == axis else o for i, o in enumerate(others))
    found: NDArray[np.int64] = places[chosen]
    return found


def _gathered_nd(s: Site, places: NDArray[np.int64]) -> NDArray[np.int64]:
    batch, indices = int(s.attribute("batch_dims", 0)), s.values(1)
    lead = indices.shape[:batch]
    flat = places.reshape((prod(lead), *places.shape[batch:]))
    rows = indices.reshape((prod(lead), -1, indices.shape[-1]))
    found = [one[tuple(row.T)] for one, row in zip(flat, rows, strict=True)]
    return np.stack(found).reshape(s.result_shape())


def _shape_only(s: Site) -> Gradients:
    return {0: s.to.reshaped(s.g, s.shape())}


def _transpose(s: Site) -> Gradients:
    rank = len(s.shape())
    order = [int(p) for p in s.attribute("perm", range(rank - 1, -1, -1))]
    return {0: s.to.op("Transpose", s.g, perm=[order.index(i) for i in range(rank)])}


def _expand(s: Site) -> Gradients:
    return {0: s.to.unbroadcast(s.g, s.result_shape(), s.shape())}


def _tile(s: Site) -> Gradients:
    shape = s.shape()
    repeats = [int(v) for v in s.values(1)]
    apart = [v for pair in zip(repeats, shape, strict=True) for v in pair]
    total = s.to.summed(s.to.reshaped(s.g, apart), list(range(0, len(apart), 2)))
    return {0: s.to.reshaped(total, shape)}


def _concat(s: Site) -> Gradients:
    to, rank = s.to, len(s.result_shape())
    axis, start, found = s.axis(0, rank), 0, {}
    for slot in range(len(s.node.input)):
        end = start + s.shape(slot)[axis]
        if slot in s.wanted:
            found[slot] = to.op("Slice", s.g, to.ints([start]), to.ints([end]), to.ints([axis]))
        start = end
    return found


def _split(s: Site) -> Gradients:
    to = s.to
    parts = [
        s.gradients.get(slot) or to.expanded(to.number(0.0), s.result_shape(slot))
        for slot in range(len(s.node.output))
    ]
    return {0: to.op("Concat", *parts, axis=s.axis(0))}


def _slice(s: Site) -> Gradients:
    to, shape = s.to, s.shape()
    starts, ends = s.listed("starts", 1) or [], s.listed("ends", 2) or []
    axes = s.listed("axes", 3) or list(range(len(starts)))
    steps = s.listed("steps", 4) or [1] * len(starts)
    cut = [slice(None)] * len(shape)
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        # A negative end before the first place is none for NumPy.
        last = None if step < 0 and end < -shape[axis] else end
        cut[axis] = slice(start, last, step)
    if any(step != 1 for step in steps):
        return {0: to.scattered(s.g, _numbered(shape)[tuple(cut)], shape)}
    bounds = [c.indices(size) for c, size in zip(cut, shape, strict=True)]
    after = [size - max(b[0], b[1]) for b, size in zip(bounds, shape, strict=True)]
    return {0: to.op("Pad", s.g, to.ints([*(b[0] for b in bounds), *after]))}


_PAD_MODES = {"reflect": "reflect", "edge": "edge", "wrap": "wrap"}


def _pad(s: Site) -> Gradients:
    to, shape = s.to, s.shape()
    given = s.listed("pads", 1) or []
    rank = len(given) // 2
    axes = [int(a) % len(shape) for a in s.values(3)] if s.has(3) else list(range(rank))
    before, after = [0] * len(shape), [0] * len(shape)
    for place, axis in enumerate(axes):
        before[axis], after[axis] = given[place], given[place + rank]
    if s.wanted != {0} or min(before + after, default=0) < 0:
        raise NoRuleError
    mode = s.attribute("mode", "constant")
    if mode == "constant":
        ends = [b + size for b, size in zip(before, shape, strict=True)]
        every = to.ints(range(len(shape)))
        return {0: to.op("Slice", s.g, to.ints(before), to.ints(ends), every)}
    widths = list(zip(before, after, strict=True))
    options: dict[str, Any] = {"mode": _PAD_MODES[mode]}
    return {0: to.scattered(s.g, np.pad(_numbered(shape), widths, **options), shape)}


def _depth_to_space(s: Site) -> Gradients:
    batch, channels, height, width = s.result_shape()
    block = int(s.attribute("blocksize"))
    rows, columns = height // block, width // block
    apart = s.to.reshaped(s.g, [batch, channels, rows, block, columns, block])
    order = [0, 1, 3, 5, 2, 4] if s.attribute("mode", "DCR") == "CRD" else [0, 3, 5, 1, 2, 4]
    return {0: s.to.reshaped(s.to.op("Transpose", apart, perm=order), s.shape())}


def _space_to_depth(s: Site) -> Gradients:
    return {0: s.to.op("DepthToSpace", s.g, blocksize=int(s.attribute("blocksize")))}


def _top_k(s: Site) -> Gradients:
    if s.gradients.keys() != {0}:
        raise NoRuleError
    axis = s.axis(-1)
    indices = s.known(s.node.output[1])
    places = np.take_along_axis(_numbered(s.shape()), indices, axis)
    return {0: s.to.scattered(s.gradients[0], places, s.shape())}


def _cumulative(s: Site) -> Gradients:
    reverse = 1 - int(s.attribute("reverse", 0))
    options = {"exclusive": int(s.attribute("exclusive", 0)), "reverse": reverse}
    axis = int(s.values(1).reshape(-1)[0])
    return {0: s.to.op("CumSum", s.g, s.to.constant(np.asarray(axis, np.int64)), **options)}


def _triangle(s: Site) -> Gradients:
    k = int(s.values(1).reshape(-1)[0]) if s.has(1) else 0
    upper = int(s.attribute("upper", 1))
    return {0: s.to.op("Trilu", s.g, s.to.constant(np.asarray(k, np.int64)), upper=upper)}


def _max_pool(s: Site) -> Gradients:
    to = s.to
    kernel = [int(k) for k in s.attribute("kernel_shape")]
    ones = [1] * len(kernel)
    strides, dilations = s.attribute("strides", ones), s.attribute("dilations", ones)
    if s.attribute("auto_pad", "NOTSET") not in ("NOTSET", "") and s.attribute("ceil_mode", 0):
        raise NoRuleError
    options = {
        "kernel_shape": kernel,
        "strides": strides,
        "dilations": dilations,
        "pads": padding(s, kernel, strides, dilations),
        "ceil_mode": int(s.attribute("ceil_mode", 0)),
    }
    _, places = to.ops("MaxPool", 2, s.x(), **options)
    size = prod(s.result_shape())
    zeros = to.expanded(to.number(0.0), [prod(s.shape())])
    at, flat = to.reshaped(places, [size]), to.reshaped(s.g, [size])
    found = to.op("ScatterElements", zeros, at, flat, axis=0, reduction="add")
    return {0: to.reshaped(found, s.shape())}


def _average_pool(s: Site) -> Gradients:
    kernel = [int(k) for k in s.attribute("kernel_shape")]
    ones = [1] * len(kernel)
    strides, dilations = s.attribute("strides", ones), s.attribute("dilations", ones)
    pads, rank = padding(s, kernel, strides, dilations), len(kernel)
    counted = bool(s.attribute("count_include_pad", 0))
    matrices = {}
    for i, (size, out) in enumerate(zip(s.shape()[2:], s.result_shape()[2:], strict=True)):
        matrix = np.zeros((out, size), np.float32)
        for place in range(out):
            start = place * strides[i] - pads[i]
            reached = start + dilations[i] * np.arange(kernel[i])
            inside = reached[(reached >= 0) & (reached < size)]
            # A last window that was rounded up ends with the padding.
            within = int(np.count_nonzero(reached < size + pads[rank + i]))
            matrix[place, inside] = 1.0 / max(1, within if counted else inside.size)
        matrices[2 + i] = matrix
    return {0: s.to.along(s.g, len(s.shape()), matrices)}


def _resize(s: Site) -> Gradients:
    shape, result, upsample = s.shape(), s.result_shape(), s.node.op_type == "Upsample"
    mode = s.attribute("mode", "nearest")
    placed = "asymmetric"
    if not upsample and s.opset >= 11:
        placed = s.attribute("coordinate_transformation_mode", "half_pixel")
    rounding = (
        "floor" if upsample or s.opset < 11 else s.attribute("nearest_mode", "round_prefer_floor")
    )
    odd = (
        s.attribute("antialias", 0)
        or s.attribute("keep_aspect_ratio_policy", "stretch") != "stretch"
    )
    if mode not in ("nearest", "linear") or odd or s.wanted != {0}:
        raise NoRuleError
    scales = _scales(s)
    matrices = {}
    for axis, (size, out) in enumerate(zip(shape, result, strict=True)):
        if size != out or scales[axis] != 1.0:
            places = _coordinates(placed, size, out, scales[axis])
            matrices[axis] = _interpolation(mode, rounding, places, size)
    return {0: s.to.along(s.g, len(shape), matrices)}


def _scales(s: Site) -> list[float]:
    """The scale of each axis, as given or as the sizes imply."""
    shape, result = s.shape(), s.result_shape()
    implied = [out / size for size, out in zip(shape, result, strict=True)]
    slot = 1 if s.node.op_type == "Upsample" or s.opset < 11 else 2
    given = s.attribute("scales")
    if given is None and s.has(slot) and s.node.input[slot] in s.to.scales:
        given = s.to.scales[s.node.input[slot]]
    if given is None or not len(given):
        return implied
    axes = [int(a) % len(shape) for a in s.attribute("axes", range(len(shape)))]
    scales = [1.0] * len(shape)
    for axis, scale in zip(axes, given, strict=True):
        scales[axis] = float(scale)
    return scales


def _coordinates(placed: str, size: int, out: int, factor: float) -> NDArray[np.float32]:
    """Where each place of the result lies in the input."""
    # In FP32, as ONNX Runtime computes them: ties decide which neighbour is the nearest.
    places, scale, half = np.arange(out, dtype=np.float32), np.float32(factor), np.float32(0.5)
    if placed == "align_corners":
        last = np.float32(size - 1), np.float32(max(out - 1, 1))
        return places * last[0] / last[1]
    if placed == "asymmetric":
        return places / scale
    if placed == "tf_half_pixel_for_nn":
        return (places + half) / scale
    if placed == "pytorch_half_pixel" and out == 1:
        return np.zeros(1, np.float32)
    middle = (places + half) / scale - half
    if placed in ("half_pixel", "pytorch_half_pixel"):
        return middle
    if placed == "half_pixel_symmetric":
        return middle + np.float32(size / 2.0 * (1.0 - out / (float(scale) * size)))
    raise NoRuleError


def _interpolation(
    mode: str, rounding: str, places: NDArray[np.float32], size: int
) -> NDArray[np.float32]:
    """The matrix, shape (places, size), that interpolates along an axis."""
    matrix = np.zeros((places.size, size), np.float32)
    rows = np.arange(places.size)
    if mode == "linear":
        low = np.floor(places)
        share = places - low
        for index, weight in ((low, np.float32(1.0) - share), (low + np.float32(1.0), share)):
            columns = np.clip(index, 0, size - 1).astype(np.int64)
            np.add.at(matrix, (rows, columns), weight)
        return matrix
    middle = np.float32(0.5)
    rounded = {
        "floor": np.floor(places),
        "ceil": np.ceil(places),
        "round_prefer_floor": np.ceil(places - middle),
        "round_prefer_ceil": np.floor(places + middle),
    }[rounding]
    matrix[rows, np.clip(rounded, 0, size - 1).astype(np.int64)] = 1.0
    return matrix


def _grid_sample(s: Site) -> Gradients:
    to = s.to
    edges = s.attribute("padding_mode", "zeros")
    mode = s.attribute("mode", "bilinear" if s.opset < 20 else "linear")
    if len(s.shape()) != 4 or mode not in ("bilinear", "linear") or edges == "reflection":
        raise NoRuleError
    batch, channels, height, width = s.shape()
    rows, columns = s.result_shape()[2:]
    count = rows * columns
    axes = [
        _sampled_axis(s, number, size, [batch, 1, count], edges == "border")
        for number, size in ((0, width), (1, height))
    ]
    g = to.reshaped(s.g, [batch, channels, count])
    flat = to.reshaped(s.x(), [batch, channels, height * width])
    back = to.expanded(to.number(0.0), [batch, channels, height * width])
    slopes: list[list[str]] = [[], []]
    for upper_x in (0, 1):
        for upper_y in (0, 1):
            (at_x, in_x, part_x, sign_x) = axes[0].corner(to, upper_x)
            (at_y, in_y, part_y, sign_y) = axes[1].corner(to, upper_y)
            row = to.op("Mul", at_y, to.number(float(width)))
            place = to.op("Cast", to.op("Add", row, at_x), to=7)
            wide = to.expanded(place, [batch, channels, count])
            inside = to.times(in_x, in_y)
            if 0 in s.wanted:
                share = to.times(g, to.times(part_x, part_y, inside))
                back = to.op("ScatterElements", back, wide, share, axis=2, reduction="add")
            if 1 in s.wanted:
                value = to.op("GatherElements", flat, wide, axis=2)
                pull = to.times(to.summed(to.times(g, value), [1]), inside)
                slopes[0].append(to.times(pull, part_y, to.number(sign_x)))
                slopes[1].append(to.times(pull, part_x, to.number(sign_y)))
    found = {0: to.reshaped(back, s.shape())} if 0 in s.wanted else {}
    if 1 in s.wanted:
        parts = []
        for axis, terms in zip(axes, slopes, strict=True):
            total = to.times(to.op("Sum", *terms), axis.slope)
            parts.append(to.reshaped(total, [batch, rows, columns, 1]))
        found[1] = to.op("Concat", *parts, axis=3)
    return found


class _SampledAxis:
    """The places along one axis that a grid names: ``low`` and the next, and how far between."""

    def __init__(self, low: str, share: str, size: int, slope: str) -> None:
        self._low, self._share, self._size, self.slope = low, share, size, slope

    def corner(self, to: GradientWriter, upper: int) -> tuple[str, str, str, float]:
        """A neighbour's place, whether it is inside, its share, and the sign of that's slope."""
        last = to.number(float(self._size - 1))
        place = to.op("Add", self._low, to.number(1.0)) if upper else self._low
        clipped = to.op("Clip", place, to.number(0.0), last)
        inside = to.as_float(to.op("Equal", place, clipped))
        share = self._share if upper else to.op("Sub", to.number(1.0), self._share)
        return clipped, inside, share, 1.0 if upper else -1.0


def _sampled_axis(
    s: Site, number: int, size: int, shape: Sequence[int], bounded: bool
) -> _SampledAxis:
    """Axis ``number`` of the grid, in places of the image."""
    to, aligned = s.to, bool(s.attribute("align_corners", 0))
    grid = to.op("Slice", s.x(1), to.ints([number]), to.ints([number + 1]), to.ints([3]))
    factor = (size - 1) / 2.0 if aligned else size / 2.0
    moved = to.op("Add", to.reshaped(grid, shape), to.number(1.0))
    place = to.times(moved, to.number(factor))
    if not aligned:
        place = to.op("Sub", place, to.number(0.5))
    slope = to.number(factor)
    if bounded:
        held = to.op("Clip", place, to.number(0.0), to.number(float(size - 1)))
        slope = to.times(to.as_float(to.op("Equal", place, held)), slope)
        place = held
    low = to.op("Floor", place)
    return _SampledAxis(low, to.op("Sub", place, low), size, slope)


RULES_OF_ALL: dict[str, Rule] = {
    **RULES,
    "Gather": _moved(_gathered),
    "GatherElements": _moved(_gathered_elements),
    "GatherND": _moved(_gathered_nd),
    **dict.fromkeys(("Reshape", "Flatten", "Squeeze", "Unsqueeze"), _shape_only),
    "Transpose": _transpose,
    "Expand": _expand,
    "Tile": _tile,
    "Concat": _concat,
    "Split": _split,
    "Slice": _slice,
    "Pad": _pad,
    "DepthToSpace": _depth_to_space,
    "SpaceToDepth": _space_to_depth,
    "TopK": _top_k,
    "CumSum": _cumulative,
    "Trilu": _triangle,
    "MaxPool": _max_pool,
    "AveragePool": _average_pool,
    **dict.fromkeys(("Resize", "Upsample"), _resize),
    "GridSample": _grid_sample,
}
"""Every rule, by operator type."""
