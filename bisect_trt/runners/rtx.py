"""Sums as one runtime computes them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import helper

from bisect_trt.base.limits import in_order, thread_count
from bisect_trt.base.plan import Precision
from bisect_trt.model.precision_rules import FLOAT, STORAGE_TYPE
from bisect_trt.runners.ort_session import node_session

Floats = NDArray[np.float32]


FEWEST_COLUMNS = 64
"""Below which a core has nothing to gain."""


def rounded_sums(a: Floats, b: Floats) -> Floats:
    """``a[0] @ b[0] + a[1] @ b[1] + ...``, rounded to FP16 after each product."""
    batch = max(a.shape[1], b.shape[1])
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)  # once, and not by each part
    total = np.empty((batch, a.shape[2], b.shape[3]), np.float32)

    def fill(part: tuple[slice, slice]) -> None:
        some, columns = part
        left = a[:, some] if a.shape[1] > 1 else a
        right = (b[:, some] if b.shape[1] > 1 else b)[..., columns]
        total[some, :, columns] = rounded_sum(left, right)

    for _ in in_order(fill, _parts(batch, b.shape[3], thread_count())):
        pass
    return total


def rounded_sum(a: Floats, b: Floats) -> Floats:
    """As :func:`rounded_sums`, in the caller's thread alone."""
    rows = a.shape[2]
    if rows == 1:  # ONNX Runtime adds the terms of a single row in an order that the columns tell
        a = np.concatenate([a, np.zeros_like(a)], axis=2)
    shape = max(a.shape[1], b.shape[1]), a.shape[2], b.shape[3]
    feed = {"a": np.ascontiguousarray(a), "b": np.ascontiguousarray(b)}
    found: Floats = _session().run(["total"], {"zero": np.zeros(shape, np.float32), **feed})[0]
    return found[:, :rows]


def _parts(batch: int, columns: int, most: int) -> Iterator[tuple[slice, slice]]:
    """At most ``most`` parts of about the same size, by columns where there are enough of them, or
    by the products of a batch.
    """
    by_columns = min(most, columns // FEWEST_COLUMNS)
    if by_columns >= min(most, batch):
        for begin, end in _borders(columns, max(1, by_columns)):
            yield slice(None), slice(begin, end)
        return
    for begin, end in _borders(batch, min(most, batch)):
        yield slice(begin, end), slice(None)


def _borders(size: int, parts: int) -> Iterator[tuple[int, int]]:
    for part in range(parts):
        yield part * size // parts, (part + 1) * size // parts


_own = threading.local()


def _session() -> ort.InferenceSession:
    """Any number of pieces of any shapes; the calling thread's own, made once: the steps of sixteen
    threads that share one wait for its arena most of the time.
    """
    session: ort.InferenceSession | None = getattr(_own, "session", None)
    if session is None:
        session = _own.session = node_session(_model(), 1, own_arena=True)
    return session


@cache
def _model() -> onnx.ModelProto:
    """The Scan over the pieces."""

    def values(**shapes: list[str]) -> list[onnx.ValueInfoProto]:
        return [helper.make_tensor_value_info(n, FLOAT, shape) for n, shape in shapes.items()]

    body = helper.make_graph(
        [
            helper.make_node("MatMul", ["piece_a", "piece_b"], ["product"]),
            helper.make_node("Add", ["before", "product"], ["sum"]),
            helper.make_node("Cast", ["sum"], ["stored"], to=STORAGE_TYPE[Precision.FP16]),
            helper.make_node("Cast", ["stored"], ["after"], to=FLOAT),
        ],
        "subgraph",
        values(before=["z", "m", "n"], piece_a=["za", "m", "t"], piece_b=["zb", "t", "n"]),
        values(after=["z", "m", "n"]),
    )
    scan = helper.make_node("Scan", ["zero", "a", "b"], ["total"], body=body, num_scan_inputs=2)
    graph = helper.make_graph(
        [scan],
        "rounded_sums",
        values(zero=["z", "m", "n"], a=["s", "za", "m", "t"], b=["s", "zb", "t", "n"]),
        values(total=["z", "m", "n"]),
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


Array = NDArray[np.float32]

TERMS = 16
"""The products that one tensor-core instruction adds before its FP16 result is rounded."""

BLOCK, FEW = 32, 8
"""Channels that a spatial convolution sums one after the other, and up to how many it pads
instead.
"""

_WINDOWS = 7 << 16
"""So many floats of what a convolution's windows meet and of its results each thread has at a time:
more work in a step than the step itself costs, in a block that is not given back each time (see
:func:`bisect_trt.base.limits.keep_large_blocks_apart`).
"""

_AT_ONCE = 1 << 16
"""Values that a thread goes through at a time."""

_SMALLEST_NORMAL, _LARGEST = np.float32(2.0**-14), np.float32(65504.0)
_TINY = np.float32(0.75)
"""Beside it a float32 keeps multiples of 2^-24, FP16's smallest number."""


def half(values: Array) -> Array:
    """Rounded to FP16 (to nearest, ties to even; beyond 65504 infinite) and held in float32.

    On the bits of float32: NumPy's own casts to float16 and back take three times as long.
    """
    exact = np.asarray(values, np.float32)
    bits = exact.view(np.uint32)
    # A half of the last kept bit, less one where that bit is even; the carry may run on.
    kept = ((bits + (((bits >> 13) & 1) + np.uint32(0xFFF))) & np.uint32(0xFFFFE000)).view(
        np.float32
    )
    size = np.abs(exact)
    result: Array = np.where(size < _SMALLEST_NORMAL, (exact + _TINY) - _TINY, kept)
    large = np.abs(result) > _LARGEST
    if large.any():
        result[large] = np.copysign(np.float32(np.inf), result[large])
    undefined = np.isnan(exact)
    if undefined.any():
        result[undefined] = np.nan
    # The sum and difference lose the sign of a zero.
    result = np.copysign(result, exact)
    return result


def matrix_product(a: Array, b: Array) -> Array:
    """``a @ b`` of shapes (..., m, k) and (..., k, n), the sums rounded to FP16 after every 16
    terms.
    """
    rows = a.shape[:-1]
    if b.ndim == 2:  # weights: one large product, not many that each have a copy of them
        a = a.reshape(-1, a.shape[-1])
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    subgraphs = -(-a.shape[-1] // TERMS)
    left, right = (
        np.broadcast_to(_padded(x, axis, subgraphs * TERMS), (*batch, *end)).reshape(-1, *end)
        for x, axis, end in (
            (a, -1, (a.shape[-2], subgraphs * TERMS)),
            (b, -2, (subgraphs * TERMS, b.shape[-1])),
        )
    )
    total = rounded_sums(
        np.moveaxis(left.reshape(len(left), -1, subgraphs, TERMS), 2, 0),
        np.moveaxis(right.reshape(len(right), subgraphs, TERMS, -1), 1, 0),
    )
    return total.reshape(*(rows if b.ndim == 2 else (*batch, a.shape[-2])), b.shape[-1])


def _padded(values: Array, axis: int, size: int) -> Array:
    """Zeros behind ``values`` up to ``size`` along ``axis``: they add nothing."""
    if values.shape[axis] == size:
        return values
    widths = [(0, 0)] * values.ndim
    widths[axis] = (0, size - values.shape[axis])
    return np.pad(values, widths)


def convolution(
    x: Array,
    w: Array,
    bias: Array | None,
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int],
) -> Array:
    """A 2-D convolution."""
    height, width = w.shape[2:]
    spare = (-w.shape[1]) % TERMS if w.shape[1] > FEW or height * width == 1 else 0
    padded = np.pad(x, ((0, 0), (0, spare), (pads[0], pads[2]), (pads[1], pads[3])))
    spans = (height - 1) * dilations[0] + 1, (width - 1) * dilations[1] + 1
    met = np.lib.stride_tricks.sliding_window_view(padded, spans, (2, 3))
    met = met[:, :, :: strides[0], :: strides[1], :: dilations[0], :: dilations[1]]
    rows, columns = met.shape[2:4]
    met = met.transpose(1, 4, 5, 0, 2, 3)  # (c, kh, kw, n, rows, columns), a view
    weights = _by_rounding(np.pad(w, ((0, 0), (0, spare), (0, 0), (0, 0))).transpose(1, 2, 3, 0))
    weights = weights.swapaxes(1, 2)[:, None]
    total = np.empty((len(x), len(w), rows, columns), np.float32)

    def fill(some: range) -> None:
        terms = _by_rounding(met[..., some.start : some.stop, :])
        terms = terms.reshape(*terms.shape[:3], -1).swapaxes(1, 2)
        found = rounded_sum(weights, terms)
        if bias is not None:
            with np.errstate(over="ignore", invalid="ignore"):  # of each thread
                found = half(found + bias[:, None])
        total[:, :, some.start : some.stop] = found.reshape(*found.shape[:2], -1, columns)

    for _ in in_order(fill, _bands(rows, columns, len(x) * (len(weights) * TERMS + len(w)))):
        pass
    return total


def _bands(rows: int, columns: int, each: int) -> Iterator[range]:
    """Rows of the output that a thread goes through at a time, with ``each`` floats for each of
    their places in memory.
    """
    least = -(-FEWEST_COLUMNS // columns)
    step = max(1, min(_WINDOWS // (each * columns), max(least, -(-rows // thread_count()))))
    for first in range(0, rows, step):
        yield range(first, min(first + step, rows))


def _by_rounding(values: Array) -> Array:
    """The terms of a window in the order in which the engine adds them."""
    channels, height, width, *rest = values.shape
    if channels <= FEW and height * width > 1:
        at_once = TERMS // max(2, 1 << (channels - 1).bit_length())
        places = height * width
        found = np.zeros((-(-places // at_once), TERMS, *rest), np.float32)
        for place, (i, j) in enumerate(np.ndindex(height, width)):
            first = place % at_once * channels
            found[place // at_once, first : first + channels] = values[:, i, j]
        return found
    found = np.empty((channels // TERMS * height * width, TERMS, *rest), np.float32)
    block, filled = channels if height * width == 1 else BLOCK, 0
    whole = channels // block * block
    for some in (values[:whole], values[whole:]):
        if len(some):
            parts = some.reshape(-1, min(block, len(some)) // TERMS, TERMS, *values.shape[1:])
            parts = np.moveaxis(parts, (3, 4), (1, 2))  # (blocks, height, width, parts, TERMS, ...)
            end = filled + len(some) // TERMS * height * width
            found[filled:end].reshape(parts.shape)[...] = parts
            filled = end
    return found


def batch_normalization(
    x: Array, scale: Array, bias: Array, mean: Array, variance: Array, epsilon: float
) -> Array:
    """``x`` times one rounded scale plus one rounded shift, each a channel's."""
    factor = half(scale / np.sqrt(variance + np.float32(epsilon)))
    shift = half(bias - mean * factor)
    shape = (1, -1, *(1,) * (x.ndim - 2))
    return half(x * factor.reshape(shape) + shift.reshape(shape))


def hard_sigmoid(x: Array, alpha: float, beta: float) -> Array:
    """``alpha`` and ``beta`` rounded, then one rounding of the result."""
    slope, offset = half(np.asarray([alpha, beta], np.float32))
    return half(np.clip(x * slope + offset, 0.0, 1.0))


def softmax(x: Array, axis: int) -> Array:
    """The difference from the largest, its exponential and their sum each rounded, then the
    quotient.
    """
    found = np.empty_like(x)

    def fill(part: tuple[slice, ...]) -> None:
        some = x[part]
        with np.errstate(over="ignore", invalid="ignore"):  # of each thread
            powers = half(np.exp(half(some - some.max(axis=axis, keepdims=True))))
            found[part] = half(powers / half(powers.sum(axis=axis, keepdims=True)))

    for _ in in_order(fill, _rows(x, axis)):
        pass
    return found


def _rows(x: Array, axis: int) -> Iterator[tuple[slice, ...]]:
    """Parts along the longest other axis, of so many values that a thread is worth it."""
    axis %= x.ndim
    others = [a for a in range(x.ndim) if a != axis]
    if not others:
        yield (slice(None),)
        return
    longest = max(others, key=lambda a: x.shape[a])
    step = max(1, _AT_ONCE * x.shape[longest] // max(1, x.size))
    for start in range(0, x.shape[longest], step):
        yield (*(slice(None),) * longest, slice(start, start + step))


def run_operator(node: onnx.NodeProto, inputs: Sequence[Array], opset: int = 13) -> Array | None:
    """The output of an FP16 layer as the engine computes it."""
    if any(a.size == 0 for a in inputs) or len(node.output) > 1:
        return None
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    if node.op_type == "Softmax":
        attributes.setdefault("axis", 1 if opset < 13 else -1)
    # Overflow is a finding, and NumPy's business to tell nobody.
    with np.errstate(over="ignore", invalid="ignore"):
        return OPERATORS[node.op_type](attributes, inputs)


def _conv(attributes: Mapping[str, Any], inputs: Sequence[Array]) -> Array | None:
    x, w = inputs[:2]
    if x.ndim == 3:  # a row of places
        flat = {
            name: (0, values[0], 0, values[1]) if name == "pads" else (1, *values)
            for name, values in _geometry(attributes, 1).items()
        }
        result = _conv({**attributes, **flat}, [x[:, :, None], w[:, :, None], *inputs[2:]])
        return None if result is None else result[:, :, 0]
    channels, places = w.shape[1], w.shape[2:]
    measured = places == (1, 1) or channels <= FEW or (channels >= BLOCK and channels % TERMS == 0)
    if (
        x.ndim != 4
        or not measured
        or attributes.get("group", 1) != 1
        or attributes.get("auto_pad", b"NOTSET") != b"NOTSET"
    ):
        return None
    return convolution(x, w, inputs[2] if len(inputs) > 2 else None, **_geometry(attributes, 2))


def _geometry(attributes: Mapping[str, Any], axes: int) -> dict[str, Sequence[int]]:
    defaults = {"strides": (1,) * axes, "pads": (0,) * 2 * axes, "dilations": (1,) * axes}
    return {name: tuple(attributes.get(name, default)) for name, default in defaults.items()}


def _matmul(attributes: Mapping[str, Any], inputs: Sequence[Array]) -> Array | None:
    a, b = inputs
    return matrix_product(a, b) if a.ndim > 1 and b.ndim > 1 else None


def _gemm(attributes: Mapping[str, Any], inputs: Sequence[Array]) -> Array | None:
    if attributes.get("alpha", 1.0) != 1.0 or attributes.get("beta", 1.0) != 1.0:
        return None
    a, b = (
        m.T if attributes.get(flag, 0) else m
        for m, flag in zip(inputs[:2], ("transA", "transB"), strict=True)
    )
    total = matrix_product(a, b)
    return half(total + inputs[2]) if len(inputs) > 2 else total


def _batch_normalization(attributes: Mapping[str, Any], inputs: Sequence[Array]) -> Array | None:
    x, scale, bias, mean, variance = inputs
    if x.ndim < 2 or scale.ndim != 1 or attributes.get("training_mode", 0):
        return None
    return batch_normalization(x, scale, bias, mean, variance, attributes.get("epsilon", 1e-5))


def _hard_sigmoid(attributes: Mapping[str, Any], inputs: Sequence[Array]) -> Array:
    return hard_sigmoid(inputs[0], attributes.get("alpha", 0.2), attributes.get("beta", 0.5))


def _softmax(attributes: Mapping[str, Any], inputs: Sequence[Array]) -> Array | None:
    """Over the last axis, where every version of the operator means the same."""
    x = inputs[0]
    return softmax(x, -1) if attributes["axis"] in (-1, x.ndim - 1) else None


OPERATORS: dict[str, Callable[[Mapping[str, Any], Sequence[Array]], Array | None]] = {
    "BatchNormalization": _batch_normalization,
    "Conv": _conv,
    "Gemm": _gemm,
    "HardSigmoid": _hard_sigmoid,
    "MatMul": _matmul,
    "Softmax": _softmax,
}
"""The measured operators."""
