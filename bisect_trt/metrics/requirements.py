"""Requirements on outputs, and the score of an error against them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.base.outcomes import at_least
from bisect_trt.metrics.arrays import Arrays
from bisect_trt.metrics.decisions import TIE, BoxMatch, decision, is_decision
from bisect_trt.metrics.errors import SHAPE_CHANGED, TensorError, tensor_error
from bisect_trt.metrics.scales import Scale

NOTHING_ALLOWED = 1e9
"""The score of a finite error where none is allowed; infinity is kept for values that are not
finite.
"""

MOST = 9.99e8
"""No other finite score is larger: it stands for all beyond it."""


_NOT_FINITE = "NaN or infinite values"
_NO_SCORE = {"non-finite": _NOT_FINITE, "fail": "an output of another shape"}
"""Why there is no number, by the evaluation's verdict; any other means that nothing came out."""


def brief(score: float) -> str:
    """A score where there is no room for a sentence."""
    if math.isnan(score):
        return "not measured"
    if math.isinf(score):
        return "no number"
    if score >= NOTHING_ALLOWED:
        return "none allowed"
    return f"{'> ' if score >= MOST else ''}{score:.3g} \u00d7"


def times(score: float, outcome: str = "") -> str:
    """A score in words."""
    if math.isnan(score):
        return "not measured"
    if math.isinf(score):
        return _NO_SCORE.get(outcome, "no outputs: the run breaks" if outcome else _NOT_FINITE)
    if score >= NOTHING_ALLOWED:
        return "a miss where none is allowed"
    if score >= MOST:
        return f"more than {MOST:.3g} times the tolerance"
    # A miss by a hair must not read as "1 times".
    near = abs(score - 1.0) < 5e-3
    return f"{score:.6g} times the tolerance" if near else f"{score:.3g} times the tolerance"


_BLOCK = 1 << 14
"""Elements at a time: what is computed of them stays in the cache."""


def elementwise(
    reference: NDArray[Any], candidate: NDArray[Any], absolute: float, relative: float
) -> float:
    """The score of the element that is worst off."""
    ref, got = np.asarray(reference).ravel(), np.asarray(candidate).ravel()
    worst = 0.0
    # The same memory for each block: fresh pages for each cost more than the rest.
    room = np.empty((2, min(ref.size, _BLOCK)))
    for start in range(0, ref.size, _BLOCK):
        block = slice(start, min(start + _BLOCK, ref.size))
        allowed, used = room[:, : block.stop - start]
        np.copyto(allowed, ref[block], casting="unsafe")
        np.copyto(used, got[block], casting="unsafe")
        with np.errstate(divide="ignore", invalid="ignore"):
            used -= allowed
            np.abs(used, out=used)
            np.abs(allowed, out=allowed)
            allowed *= relative
            allowed += absolute
            used /= allowed
        # 0 over 0 where nothing is allowed and nothing is wrong; or the reference is not finite.
        most = float(used.max())
        if not math.isfinite(most):
            finite = np.isfinite(ref[block].astype(np.float64))
            most = float(np.where(finite & ~np.isnan(used), used, 0.0).max())
            if math.isinf(most):
                return NOTHING_ALLOWED
        worst = max(worst, most)
    return min(worst, MOST)


def fraction(value: float, limit: float) -> float:
    """The score of a ``value`` of which ``limit`` is allowed, both in the metric's unit."""
    if value <= 0.0:
        return 0.0
    return min(value / limit, MOST) if limit > 0.0 else NOTHING_ALLOWED


def beyond(excess: float, limit: float) -> float:
    """The score of a value that lies ``excess`` beyond its limit, on a scale that nobody knows: 1
    at the limit, and further by the parts of the limit that it lies beyond, or within.
    """
    score = 1.0 + excess / (abs(limit) or 1.0)
    # What misses by a last bit must not round to 1.
    least = math.nextafter(1.0, 2.0) if excess > 0.0 else 0.0
    return min(max(score, least), MOST)


_EXACT = 200.0
"""Decibels that an exact output counts as: more than float32 resolves."""

WORST, MEAN, MEDIAN = "worst", "mean", "median"
_PERCENTILE = re.compile(r"^p(\d{1,3}(?:\.\d+)?)$")


def is_aggregate(text: str) -> bool:
    """Whether ``text`` is ``worst``, ``mean``, ``median`` or a percentile such as ``p95``."""
    found = _PERCENTILE.match(text)
    return text in (WORST, MEAN, MEDIAN) or (found is not None and 0.0 < float(found[1]) <= 100.0)


def aggregate(kind: str, values: Sequence[float], *, at_least: bool) -> float:
    """One number for ``values``, one an input."""
    worse = -math.inf if at_least else math.inf
    known = np.asarray([worse if math.isnan(v) else v for v in values], np.float64)
    found = _of_known(kind, known, worse, at_least=at_least)
    return math.nan if found == worse and any(map(math.isnan, values)) else found


def _of_known(kind: str, known: NDArray[np.float64], worse: float, *, at_least: bool) -> float:
    """Of values of which the ``worse`` infinity stands for what could not be told."""
    if kind in (MEAN, MEDIAN):
        # Decibels of an exact output are infinite: they must not hide what the others have.
        exact = known == -worse
        if exact.any():
            best = known[~exact].max() if at_least and not exact.all() else _EXACT
            known = np.where(exact, max(best, _EXACT) if at_least else known, known)
        with np.errstate(invalid="ignore"):
            found = float(known.mean() if kind == MEAN else np.median(known))
        return worse if math.isnan(found) else found  # between infinities
    ordered = np.sort(known)[::-1] if at_least else np.sort(known)
    percentile = _PERCENTILE.match(kind)
    share = float(percentile[1]) / 100.0 if percentile is not None else 1.0
    return float(ordered[max(math.ceil(share * len(ordered) - 1e-9), 1) - 1])


TaskMetric = Callable[[Arrays, Arrays], float]
CollectiveMetric = Callable[[Sequence[Arrays], Sequence[Arrays]], float]

Part = tuple[tuple[int | None, int | None, int | None], ...]
"""What is looked at along each of an output's first axes: start, stop, step. Empty for all."""

METRICS = ("max_abs", "mean_abs", "median_abs", "rmse", "rel_range", "cosine", "snr_db", "psnr_db")


@dataclass(frozen=True)
class Requirement:
    """One condition. ``output`` None means every output; ``metric`` is 'atol' for an elementwise
    tolerance.

    ``limit`` bounds the metric from above, or from below if ``at_least``; for a tolerance it is the
    absolute part and ``relative`` the part that scales with the reference. ``aggregate`` says what
    of several inputs is bounded: 'worst' is each of them. ``own`` metrics are the user's, on a
    scale that nobody knows. ``part`` is the slice of the output that is looked at.
    """

    text: str
    metric: str
    limit: float
    at_least: bool = False
    relative: float = 0.0
    output: str | None = None
    aggregate: str = WORST
    own: bool = False
    part: Part = ()

    @property
    def slices(self) -> tuple[slice, ...]:
        """``part`` as NumPy takes it."""
        return tuple(slice(*bounds) for bounds in self.part)

    @property
    def by_scale(self) -> bool:
        """Whether it is the default's kind: ``snr_db`` of every float output, group by group."""
        return self.metric == "snr_db" and self.output is None

    def is_on(self, name: str, kind: str = "f") -> bool:
        """Whether it looks at the output ``name``, of NumPy's dtype ``kind``."""
        return self.output in (None, name) and (kind == "f" or not self.by_scale)

    def value(
        self,
        reference: NDArray[Any],
        candidate: NDArray[Any],
        error: TensorError,
        scale: Scale | None = None,
        ties: NDArray[np.bool_] | None = None,
    ) -> float:
        """The metric's value for one output."""
        if not error.finite:
            return math.nan
        if self.part:
            reference, candidate = reference[self.slices], candidate[self.slices]
            ties = ties[self.slices] if ties is not None else None
            error = tensor_error(reference, candidate)
        if self.metric == "atol":
            return elementwise(reference, candidate, self.limit, self.relative)
        if is_decision(self.metric):
            return decision(self.metric, reference, candidate, ties)
        if self.by_scale and scale is not None:
            return scale.snr_db(reference, candidate, error)
        return float(getattr(error, self.metric))

    def score_of(self, value: float) -> float:
        """How much of the tolerance a metric's ``value`` uses: at most 1 passes, 1.4 misses by
        40 %, inf is not finite.
        """
        if math.isnan(value):
            return math.inf
        if self.metric == "atol":
            return value
        if self.own and (self.at_least or self.limit < 0.0):
            return beyond(self.limit - value if self.at_least else value - self.limit, self.limit)
        if not self.at_least:
            return fraction(value, self.limit)
        if self.metric == "cosine" or is_decision(self.metric):
            return fraction(1.0 - value, 1.0 - self.limit)
        # Decibels; an exponent beyond this leaves float64.
        return min(float(10.0 ** min((self.limit - value) / 20.0, 9.0)), MOST)


class ReferenceOutputs(dict[str, NDArray[Any]]):
    """The reference's outputs of one input; ``gaps`` says, of each output that decides, by how much
    (see :func:`~bisect_trt.metrics.decisions.gaps`).
    """

    def __init__(self, outputs: Arrays, gaps: Mapping[str, NDArray[np.float32]]) -> None:
        super().__init__(outputs)
        self.gaps = dict(gaps)


def gaps_of(reference: Arrays) -> Mapping[str, NDArray[np.float32]]:
    """The gaps that come with ``reference``, by output."""
    return reference.gaps if isinstance(reference, ReferenceOutputs) else {}


@dataclass(frozen=True)
class Judged:
    """One sample's outputs beside the reference: ``score`` in tolerances, taken alone; ``values``
    of each condition in its metric's unit, NaN for one that is told of all inputs at once; errors
    by output.
    """

    score: float
    values: tuple[float, ...]
    errors: Mapping[str, TensorError]


@dataclass(frozen=True)
class Requirements:
    """All conditions of a run. ``metrics`` are the user's own for one input, ``collective`` those
    for all inputs at once. ``scales`` are those of the float outputs over all given inputs.
    ``limits`` are magnitudes from which on the type that an output is stored in has infinity.
    """

    items: tuple[Requirement, ...]
    metrics: Mapping[str, TaskMetric]
    collective: Mapping[str, CollectiveMetric] = field(default_factory=dict)
    scales: Mapping[str, Scale] = field(default_factory=dict)
    limits: Mapping[str, float] = field(default_factory=dict)

    @property
    def of_sets(self) -> bool:
        """Whether some condition is on all inputs together, so that no input passes alone."""
        return self.tells_of_all or any(item.aggregate != WORST for item in self.items)

    @property
    def rows(self) -> frozenset[str]:
        """The outputs that hold rows in any number and order, such as those of an NMS."""
        matches = [m for m in self.metrics.values() if isinstance(m, BoxMatch)]
        return frozenset(name for match in matches for name in match.outputs)

    @property
    def tells_of_all(self) -> bool:
        """Whether some metric sees all inputs at once."""
        return any(item.metric in self.collective for item in self.items)

    @property
    def proportional(self) -> bool:
        """Whether every score is in proportion to the error, as far as is known: a cosine's goes
        with its square, a decision's by jumps, and nobody knows how a user's metric does.
        """
        return not any(i.own or i.metric == "cosine" or is_decision(i.metric) for i in self.items)

    def score(self, reference: Arrays, candidate: Arrays) -> float:
        """The sensitivity of :meth:`judge`."""
        return self.judge(reference, candidate).score

    def judge(self, reference: Arrays, candidate: Arrays) -> Judged:
        """One sample's outputs held against the reference.

        Raises:
            BadInputError: a metric of the user's is at fault.
        """
        candidate = {name: self._as_stored(name, array) for name, array in candidate.items()}
        errors = {name: tensor_error(reference[name], candidate[name]) for name in reference}
        seen = {i.output for i in self.items if not self._is_users(i)}
        of_all = None in seen or any(self._is_users(item) for item in self.items)
        rows = self.rows
        broken = {
            name
            for name, e in errors.items()
            if not e.finite
            and (of_all or name in seen or e.nonfinite != SHAPE_CHANGED)
            and not (name in rows and e.nonfinite == SHAPE_CHANGED)
        }
        if broken and None not in seen and not broken <= seen:  # no condition would say so
            return Judged(math.inf, (math.nan,) * len(self.items), errors)
        worst, values = math.inf if broken else 0.0, []
        for item in self.items:
            blind = self._is_users(item) or item.output is None or item.output in broken
            if item.metric in self.collective or (broken and blind):
                values.append(math.nan)
                continue
            if item.metric in self.metrics:
                found = [self.metrics[item.metric](reference, candidate)]
            else:
                # Of one value the cosine sees the sign alone.
                single = _single_values(reference) if item.metric == "cosine" else frozenset()
                ties = {name: gaps <= TIE for name, gaps in gaps_of(reference).items()}
                found = [
                    item.value(a, candidate[n], errors[n], self.scales.get(n), ties.get(n))
                    for n, a in reference.items()
                    if item.is_on(n, a.dtype.kind) and not (item.output is None and n in single)
                ]
            # Of several outputs the one that is worst off.
            value = max(found, key=item.score_of, default=math.nan)
            values.append(value)
            worst = max(worst, item.score_of(value)) if found else worst
        return Judged(worst, tuple(values), errors)

    def _as_stored(self, name: str, array: NDArray[Any]) -> NDArray[Any]:
        """Infinite where the output's own type cannot hold the value; unrounded elsewhere."""
        limit = self.limits.get(name)
        if limit is None or not np.any(np.abs(array) >= limit):
            return array
        return np.where(np.abs(array) >= limit, np.copysign(np.inf, array), array)

    def _is_users(self, item: Requirement) -> bool:
        """Whether it sees all outputs, and is not for those that are not finite."""
        return item.metric in self.metrics or item.metric in self.collective

    def judge_all(self, references: Sequence[Arrays], candidates: Sequence[Arrays]) -> list[float]:
        """The values of the collective metrics, in the order of their conditions.

        Raises:
            BadInputError: a metric is at fault.
        """
        return [
            self.collective[i.metric](references, candidates)
            for i in self.items
            if i.metric in self.collective
        ]

    def together(
        self,
        values: Sequence[Sequence[float]],
        share: float = 1.0,
        collective: Sequence[float] = (),
    ) -> float:
        """The score of several inputs together."""
        each = self._each(values)
        worst = _worst(each, share) if each else 0.0
        told = iter(collective)
        for place, item in enumerate(self.items):
            if item.metric in self.collective:
                worst = max(worst, item.score_of(next(told)))
            elif item.aggregate != WORST:
                column = [of_one[place] for of_one in values]
                value = aggregate(item.aggregate, column, at_least=item.at_least)
                worst = max(worst, item.score_of(value))
        return worst

    def _each(self, values: Sequence[Sequence[float]]) -> list[float]:
        """The score of each input by the conditions on each."""
        return [
            max(
                (
                    item.score_of(value)
                    for item, value in zip(self.items, of_one, strict=True)
                    if item.aggregate == WORST and item.metric not in self.collective
                ),
                default=0.0,
            )
            for of_one in values
        ]

    def by_condition(
        self,
        values: Sequence[Sequence[float]],
        share: float = 1.0,
        collective: Sequence[float] = (),
    ) -> tuple[float, ...]:
        """The score of each condition over several inputs, one at least; where a share is spared,
        over those that :meth:`together` counts.
        """
        told, found = iter(collective), []
        order = sorted(range(len(values)), key=self._each(values).__getitem__)
        counted = order[: max(1, at_least(share, len(values)))]
        for place, item in enumerate(self.items):
            column = [of_one[place] for of_one in values]
            if item.metric in self.collective:
                found.append(item.score_of(next(told, math.nan)))
            elif item.aggregate != WORST:
                value = aggregate(item.aggregate, column, at_least=item.at_least)
                found.append(item.score_of(value))
            else:
                found.append(max(item.score_of(column[number]) for number in counted))
        return tuple(found)

    @property
    def texts(self) -> tuple[str, ...]:
        """The conditions as the user wrote them."""
        return tuple(item.text for item in self.items)


def _single_values(reference: Arrays) -> frozenset[str]:
    """The outputs of one value, where others have more."""
    found = frozenset(name for name, array in reference.items() if array.size == 1)
    return found if len(found) < len(reference) else frozenset()


def _worst(scores: Sequence[float], share: float) -> float:
    """The largest of ``scores``, one at least, but for so many as need not pass."""
    spared = len(scores) - at_least(share, len(scores))
    return sorted(scores, reverse=True)[min(spared, len(scores) - 1)]
