"""What is told of two large tensors, from one walk over their blocks: a copy of either in float64
would take twice its memory, and as long again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.numerics.blocks import flat, slices

MANY = 1 << 16
"""Elements from which on tensors are walked over."""

_BLOCK = 1 << 16
"""Elements of a block: what fits the processor's cache takes half the time of all at once (tried:
1 << 14 to 1 << 20)."""

_LARGEST = float(np.finfo(np.float32).max)


@dataclass
class BlockSums:
    """Sums in float64 over the elements that are finite in both tensors; ``low`` and ``high`` are
    of those that are finite in the reference.

    ``errors`` are the absolute errors of those, float32 and in no order; ``nonfinite`` counts
    elements that are not finite without the reference being equal there.
    """

    errors: NDArray[np.float32]
    low: float = np.inf
    high: float = -np.inf
    worst: float = 0.0
    error: float = 0.0
    squares: float = 0.0
    reference: float = 0.0
    candidate: float = 0.0
    product: float = 0.0
    nonfinite: int = 0
    ref_nonfinite: int = 0


def applies_to(reference: NDArray[Any], candidate: NDArray[Any]) -> bool:
    """Whether the two are large, and of types whose squares float64 and errors float32 holds."""
    exact = any(a.dtype.kind in "iu" and a.itemsize > 2 for a in (reference, candidate))
    small = max(reference.itemsize, candidate.itemsize) <= 4
    return reference.size >= MANY and small and not exact


def value_range(values: NDArray[np.float64]) -> tuple[float, float]:
    """The smallest and the largest of ``values``; inf and -inf where there is none."""
    return (float(values.min()), float(values.max())) if values.size else (np.inf, -np.inf)


def dot(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """The sum of products of two arrays of one dimension."""
    # einsum, not np.dot: BLAS wakes its threads, which costs more than they save here.
    return float(np.einsum("i,i->", one, other))


def block_sums(reference: NDArray[Any], candidate: NDArray[Any]) -> BlockSums:
    """The sums over two tensors of one shape, of any numeric or boolean types up to 32 bits."""
    sums = BlockSums(np.empty(reference.size, np.float32))
    exact, given, used = flat(reference), flat(candidate), 0
    # The same memory for each block: fresh pages for each cost more than the sums.
    room = np.empty((2, min(exact.size, _BLOCK)))
    for part in slices(exact.size, _BLOCK):
        ref, got = room[:, : part.stop - part.start]
        np.copyto(ref, exact[part], casting="unsafe")
        np.copyto(got, given[part], casting="unsafe")
        reference_square, candidate_square = dot(ref, ref), dot(got, got)
        low, high = value_range(ref)
        if not np.isfinite(reference_square + candidate_square):  # squares of 32 bits fit
            finite = np.isfinite(ref)
            sums.ref_nonfinite += ref.size - int(np.count_nonzero(finite))
            low, high = value_range(ref[finite])
            usable = finite & np.isfinite(got)
            same = (ref == got) | (np.isnan(ref) & np.isnan(got))
            sums.nonfinite += int(np.count_nonzero(~usable & ~same))
            ref, got = ref[usable], got[usable]
            reference_square, candidate_square = dot(ref, ref), dot(got, got)
        sums.low, sums.high = min(sums.low, low), max(sums.high, high)
        if not ref.size:
            continue
        sums.reference += reference_square
        sums.candidate += candidate_square
        sums.product += dot(ref, got)
        got -= ref
        error = np.abs(got, out=got)
        largest = float(error.max())
        fits = largest <= _LARGEST
        sums.errors[used : used + ref.size] = error if fits else np.minimum(error, _LARGEST)
        used += ref.size
        sums.worst = max(sums.worst, largest)
        sums.error += float(error.sum())
        sums.squares += dot(error, error)
    sums.errors = sums.errors[:used]
    return sums
