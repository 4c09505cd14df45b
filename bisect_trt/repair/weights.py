"""Chooses which way each weight is rounded, so that the layer's outputs change least.

GPTQ (Frantar et al., arXiv 2210.17323) on a grid of floating point numbers, bounded: every weight
becomes one of the two numbers next to it. It costs no time at inference.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

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

PASSES = 2
"""How often each column is rounded anew, once all are."""

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

    def __init__(self, groups: int, width: int, widest: int = WIDEST) -> None:
        self.blocks = list(slices(width, widest))
        sizes = [(groups, b.stop - b.start, b.stop - b.start) for b in self.blocks]
        self.fitted = [np.zeros(size) for size in sizes]
        self.apart = [np.zeros(size) for size in sizes]
        self.count = 0

    def add(self, rows: Matrices) -> None:
        """Adds rows, (rows, groups, width)."""
        number = np.arange(self.count, self.count + len(rows))
        self.count += len(rows)
        for sums, chosen in ((self.fitted, number % APART > 0), (self.apart, number % APART == 0)):
            own = np.ascontiguousarray(rows[chosen].transpose(1, 0, 2))
            for block, total in zip(self.blocks, sums, strict=True):
                part = own[:, :, block]
                total += part.transpose(0, 2, 1) @ part

    @staticmethod
    def nbytes(groups: int, width: int) -> int:
        """The memory of both moments."""
        return 16 * groups * sum(int(b.stop - b.start) ** 2 for b in slices(width, WIDEST))


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


def choose(
    matrices: Matrices, moments: Moments, precision: Precision, *, biased: bool = False
) -> Choice:
    """Rounds each weight of ``matrices``, (groups, K, columns), to one of its two neighbours.

    With ``biased`` the first row is a bias. It is rounded first, so that the weights make up for
    it, and takes up the mean of the error that they leave.
    """
    near, other = neighbours(matrices, precision)
    # What cannot be rounded makes no error here.
    finite = np.isfinite(near)
    exact, low, high = (np.where(finite, values, 0.0) for values in (matrices, near, other))
    chosen = low.copy()
    if moments.count >= APART:
        for block, fitted in zip(moments.blocks, moments.fitted, strict=True):
            part, first = (slice(None), block), biased and block.start == 0
            chosen[part] = _fitted(exact[part], low[part], high[part], fitted, first)
            if first:
                chosen[:, 0] = _corrected(exact[part], chosen[part], fitted, precision)
    return Choice(
        matrices=np.where(finite, chosen, near),
        moved=float(np.mean(chosen != low)),
        signal=_power(exact, moments),
        before=_power(exact - low, moments),
        after=_power(exact - chosen, moments),
    )


def _power(matrices: Matrices, moments: Moments) -> float:
    """The sum of the squares that ``matrices`` give on the rows apart."""
    return sum(
        max(0.0, float(np.sum((apart @ matrices[:, block]) * matrices[:, block])))
        for block, apart in zip(moments.blocks, moments.apart, strict=True)
    )


def _fitted(
    exact: Matrices, low: Matrices, high: Matrices, moments: Matrices, biased: bool
) -> Matrices:
    """One of ``low``, the nearest, and ``high`` for each weight, so that the error is small."""
    sizes = np.array(np.diagonal(moments, axis1=1, axis2=2))
    sizes[:, :biased] = np.inf  # the bias comes first
    order = np.argsort(-sizes, axis=1, kind="stable")[:, :, None]
    exact, low, high = (np.take_along_axis(a, order, 1) for a in (exact, low, high))
    moments = np.take_along_axis(moments, order, 1)
    moments = np.take_along_axis(moments, order.transpose(0, 2, 1), 2)
    factor, damped = _factor(moments, biased)
    starts = [low] if factor is None else [_carried_on(exact, low, high, factor), low]
    ends = [_descended(exact, low, high, start, damped, biased) for start in starts]
    costs = [np.sum((damped @ (exact - e)) * (exact - e), axis=1, keepdims=True) for e in ends]
    chosen = np.where(costs[0] <= costs[-1], ends[0], ends[-1])
    back = np.empty_like(chosen)
    np.put_along_axis(back, order, chosen, 1)
    return back


def _factor(moments: Matrices, biased: bool) -> tuple[Matrices | None, Matrices]:
    """An upper triangular R with R R^T = the moments, and these; damped until there is one."""
    sizes = np.diagonal(moments, axis1=1, axis2=2)[:, biased:]
    mean = sizes.mean(axis=1) if sizes.size else np.zeros(len(moments))
    steps = np.diag(np.arange(len(moments[0])) >= biased)  # the bias is not damped
    damping = DAMPING
    while True:
        damped = moments + np.where(mean > 0.0, damping * mean, 1.0)[:, None, None] * steps
        try:
            return np.linalg.cholesky(damped[:, ::-1, ::-1])[:, ::-1, ::-1], damped
        except np.linalg.LinAlgError:
            if damping >= MOST_DAMPING:
                return None, damped
            damping *= 10.0


def _carried_on(exact: Matrices, low: Matrices, high: Matrices, factor: Matrices) -> Matrices:
    """Rounds column after column, each so that it cancels what those before it did.

    The error e costs |R^T e|^2, of which each term has the errors of the columns up to its own.
    """
    chosen, errors = low.copy(), np.zeros_like(low)
    for part in slices(low.shape[1], STEP):
        before = factor[:, : part.start, part].transpose(0, 2, 1) @ errors[:, : part.start]
        for column in range(part.start, part.stop):
            inside = slice(part.start, column)
            left = before[:, column - part.start]
            left = left + (factor[:, None, inside, column] @ errors[:, inside])[:, 0]
            target = exact[:, column] + left / factor[:, column, column, None]
            chosen[:, column] = _nearer(target, low[:, column], high[:, column])
            errors[:, column] = exact[:, column] - chosen[:, column]
    return chosen


def _descended(
    exact: Matrices,
    low: Matrices,
    high: Matrices,
    start: Matrices,
    moments: Matrices,
    biased: bool,
) -> Matrices:
    """Rounds each column of ``start`` anew, given how all others are; the bias stays."""
    chosen = start.copy()
    for part in [*slices(low.shape[1], STEP)] * PASSES:
        slopes = moments[:, part] @ (exact - chosen)
        for column in range(max(part.start, biased), part.stop):
            size = moments[:, column, column, None]
            target = chosen[:, column] + slopes[:, column - part.start] / size
            new = _nearer(target, low[:, column], high[:, column])
            left = slice(column + 1, part.stop)  # the slopes of others are not read again
            change = (chosen[:, column] - new)[:, None]
            slopes[:, left.start - part.start :] += moments[:, left, column, None] * change
            chosen[:, column] = new
    return chosen


def _nearer(target: Matrices, low: Matrices, high: Matrices) -> Matrices:
    return np.where(np.abs(target - low) <= np.abs(target - high), low, high)


def _corrected(
    exact: Matrices, chosen: Matrices, moments: Matrices, precision: Precision
) -> Matrices:
    """The biases, in the first rows, that take up the mean of the weights' errors."""
    means = moments[:, :1, 1:] / moments[:, :1, :1]
    wanted = exact[:, 0] + (means @ (exact - chosen)[:, 1:])[:, 0]
    stored = to_storage(wanted, precision).astype(np.float64)
    usable = np.isfinite(stored) & (np.abs(stored) >= SMALLEST_NORMAL[precision])
    return np.where(usable & (exact[:, 0] != 0.0), stored, chosen[:, 0])
