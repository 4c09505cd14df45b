"""One runtime on one GPU family: how TensorRT for RTX 1.6.1.120 computes FP16 layers on Hopper.

As far as it could be reproduced bit for bit, seen layer by layer against the engine on an H100
(``benchmarks/engines/arithmetic.py``): matrix products and convolutions keep their sums in FP16,
rounded after every 16 terms, as a tensor core's FP16 accumulator does, and a bias is added to the
rounded sum. Spatial convolutions sum blocks of 32 channels one after the other, place by place
within a block; few channels are padded to a power of two, so that a rounding covers several places.
A BatchNormalization's constants become one scale and one shift, each rounded. A HardSigmoid's slope
is rounded, and so are a Softmax's exponentials and their sum. Depthwise convolutions and means sum
in FP32, as the emulator does. Forms that were not reproduced are left to the emulator.

Arrays are float32 and hold FP16 values, as everywhere in the emulator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from bisect_trt.core.machine.cores import thread_count
from bisect_trt.core.machine.threads import in_order
from bisect_trt.runners.emulator.rtx.rounded_sums import FEWEST_COLUMNS, rounded_sum, rounded_sums

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
:func:`bisect_trt.core.machine.memory.keep_large_blocks_apart`).
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
    pieces = -(-a.shape[-1] // TERMS)
    left, right = (
        np.broadcast_to(_padded(x, axis, pieces * TERMS), (*batch, *end)).reshape(-1, *end)
        for x, axis, end in (
            (a, -1, (a.shape[-2], pieces * TERMS)),
            (b, -2, (pieces * TERMS, b.shape[-1])),
        )
    )
    total = rounded_sums(
        np.moveaxis(left.reshape(len(left), -1, pieces, TERMS), 2, 0),
        np.moveaxis(right.reshape(len(right), pieces, TERMS, -1), 1, 0),
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
    """A 2-D convolution.

    Args:
        x: (n, c, h, w) float32 that holds FP16 values.
        w: (m, c, kh, kw), likewise.
        bias: (m,), likewise, or None.
        strides: of rows and columns.
        pads: top, left, bottom, right, in elements.
        dilations: of rows and columns.

    Returns:
        (n, m, rows, columns) float32 that holds FP16 values.
    """
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
    """The terms of a window in the order in which the engine adds them.

    Args:
        values: (channels, height, width, ...) of a window; more than FEW channels, or those of a
            single place, are a multiple of TERMS.

    Returns:
        (roundings, TERMS, ...), zeros where a rounding is of fewer terms.
    """
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
    """``x`` times one rounded scale plus one rounded shift, each a channel's.

    Args:
        x: (n, c, ...) float32 that holds FP16 values.
        scale: (c,) float32, as are the next three.
        bias: added at the end.
        mean: of the channel.
        variance: of the channel.
        epsilon: added to the variance.

    Returns:
        The shape of ``x``, float32 that holds FP16 values.
    """
    factor = half(scale / np.sqrt(variance + np.float32(epsilon)))
    shift = half(bias - mean * factor)
    shape = (1, -1, *(1,) * (x.ndim - 2))
    return half(x * factor.reshape(shape) + shift.reshape(shape))


def hard_sigmoid(x: Array, alpha: float, beta: float) -> Array:
    """``alpha`` and ``beta`` rounded, then one rounding of the result.

    Args:
        x: float16 values in a float32 array of any shape.
        alpha: the slope.
        beta: the offset.
    """
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
