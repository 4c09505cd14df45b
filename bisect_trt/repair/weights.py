"""Chooses which way each weight is rounded, so that the layer's outputs change least.

GPTQ (Frantar et al., arXiv 2210.17323) on a grid of floating point numbers, bounded: every weight
becomes one of the two numbers next to it. It costs no time at inference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.base.plan import Precision
from bisect_trt.metrics.arrays import slices
from bisect_trt.metrics.rounding import STORAGE_DTYPE, to_storage
from bisect_trt.repair.matrices import Matrices

DAMPING = 1e-4
"""What is added to the diagonal of the second moments, of its mean."""

MOST_DAMPING = 1e-1
"""Where this does not make the moments positive definite, weights keep the nearest rounding."""

WIDEST = 4096
"""Columns whose moments are kept together; more are taken in blocks."""

APART = 5
"""Every such row is kept apart, to judge the choice on."""

STEP = 128
"""Columns that are rounded before their errors are carried on to all others."""

SMALLEST_NORMAL = {Precision.FP16: 2.0**-14, Precision.BF16: 2.0**-126}
"""Below it a format has fewer significant bits."""


def neighbours(values: Matrices, precision: Precision) -> tuple[Matrices, Matrices]:
    """The nearest number of ``precision`` to each value, and the one on the value's other side.

    They are the same where the other one must not be taken: the value is such a number itself, or
    the other one is subnormal, zero or not finite.
    """
    stored = to_storage(values, precision)
    near = stored.astype(np.float64)
    # The bits of floats are ordered as their magnitudes are.
    bits = stored.view(np.uint16)
    with np.errstate(invalid="ignore"):
        away = np.abs(near) < np.abs(values)
        other = np.where(away, bits + np.uint16(1), bits - np.uint16(1)).astype(np.uint16)
        beyond = other.view(STORAGE_DTYPE[precision]).astype(np.float64)
        free = np.isfinite(near) & np.isfinite(beyond) & (near != values)
        free &= np.abs(beyond) >= SMALLEST_NORMAL[precision]
    return near, np.where(free, beyond, near)


class Moments:
    """The second moments of a layer's rows, block by block of columns, in float64.

    Every fifth row counts for :attr:`apart`, the others for :attr:`fitted`: a (groups, k, k) array
    for each block.
    """

    def __init__(self, groups: int, width: int) -> None:
        self.blocks = list(slices(width, WIDEST))
        sizes = [(groups, b.stop - b.start, b.stop - b.start) for b in self.blocks]
        self.fitted = [np.zeros(size) for size in sizes]
        self.apart = [np.zeros(size) for size in sizes]
        self._count = 0

    def add(self, rows: Matrices) -> None:
        """Adds rows, (rows, groups, width)."""
        number = np.arange(self._count, self._count + len(rows))
        self._count += len(rows)
        for sums, chosen in ((self.fitted, number % APART > 0), (self.apart, number % APART == 0)):
            own = np.ascontiguousarray(rows[chosen].transpose(1, 0, 2))
            for block, total in zip(self.blocks, sums, strict=True):
                part = own[:, :, block]
                total += part.transpose(0, 2, 1) @ part

    @staticmethod
    def nbytes(groups: int, width: int) -> int:
        """The memory of both moments."""
        return 16 * sum(groups * (b.stop - b.start) ** 2 for b in slices(width, WIDEST))


@dataclass(frozen=True)
class Choice:
    """The weights that a layer should have, (groups, K, columns).

    ``moved`` is the share that takes the farther neighbour. ``signal``, ``before`` and ``after``
    are mean squares on the rows apart: of the outputs, of the error with every weight rounded to
    the nearest, and of the error as chosen.
    """

    matrices: Matrices
    moved: float
    signal: float
    before: float
    after: float

    @property
    def helps(self) -> bool:
        """Whether the error on the rows apart falls."""
        return self.after < self.before


def choose(matrices: Matrices, moments: Moments, precision: Precision) -> Choice:
    """Rounds each weight of ``matrices``, (groups, K, columns), to one of its two neighbours."""
    near, other = neighbours(matrices, precision)
    chosen = near.copy()
    for block, fitted in zip(moments.blocks, moments.fitted, strict=True):
        part = (slice(None), block)
        chosen[part] = _fitted(matrices[part], near[part], other[part], fitted)
    finite = np.isfinite(near)
    exact = np.where(finite, matrices, 0.0)

    def power(values: Matrices) -> float:
        found = 0.0
        for block, apart in zip(moments.blocks, moments.apart, strict=True):
            found += float(np.sum((apart @ values[:, block]) * values[:, block]))
        return max(found, 0.0)

    before, after = (power(np.where(finite, v, 0.0) - exact) for v in (near, chosen))
    moved = float(np.mean(chosen != near)) if near.size else 0.0
    return Choice(chosen, moved, power(exact), before, after)


def _fitted(exact: Matrices, near: Matrices, other: Matrices, moments: Matrices) -> Matrices:
    """One of ``near`` and ``other`` for each weight; ``near`` where the moments cannot be used."""
    order = np.argsort(-np.diagonal(moments, axis1=1, axis2=2), axis=1, kind="stable")
    factor = _factor(moments, order)
    if factor is None:
        return near
    index = order[:, :, None]
    exact, near, other = (np.take_along_axis(a, index, 1) for a in (exact, near, other))
    # What cannot be rounded has no error to carry on.
    exact = np.where(np.isfinite(near), exact, near)
    chosen, errors = near.copy(), np.zeros_like(near)
    # The moments are R R^T with an upper triangular R, so that the error e costs |R^T e|^2: each
    # column in turn cancels what those before it have left in its own term.
    for part in slices(near.shape[1], STEP):
        carried = factor[:, : part.start, part].transpose(0, 2, 1) @ errors[:, : part.start]
        for column in range(part.start, part.stop):
            inside = slice(part.start, column)
            left = carried[:, column - part.start] + np.matmul(
                factor[:, None, inside, column], errors[:, inside]
            ).squeeze(1)
            target = exact[:, column] + left / factor[:, column, column, None]
            with np.errstate(invalid="ignore"):
                nearer = np.abs(target - near[:, column]) <= np.abs(target - other[:, column])
                chosen[:, column] = np.where(nearer, near[:, column], other[:, column])
                error = exact[:, column] - chosen[:, column]
            errors[:, column] = np.where(np.isfinite(error), error, 0.0)
    back = np.empty_like(chosen)
    np.put_along_axis(back, np.broadcast_to(index, chosen.shape), chosen, 1)
    return back


def _factor(moments: Matrices, order: NDArray[np.intp]) -> Matrices | None:
    """The upper triangular R of R R^T = the moments in ``order``; damped until there is one."""
    sorted_ = np.take_along_axis(moments, order[:, :, None], 1)
    sorted_ = np.take_along_axis(sorted_, order[:, None, :], 2)
    mean = np.diagonal(moments, axis1=1, axis2=2).mean(axis=1)
    damping = DAMPING
    while damping <= MOST_DAMPING:
        more = np.where(mean > 0.0, damping * mean, 1.0)
        try:
            flipped = (sorted_ + more[:, None, None] * np.eye(order.shape[1]))[:, ::-1, ::-1]
            return np.linalg.cholesky(flipped)[:, ::-1, ::-1]
        except np.linalg.LinAlgError:
            damping *= 10.0
    return None
