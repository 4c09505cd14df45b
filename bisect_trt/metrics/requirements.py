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
from bisect_trt.metrics.arrays import Arrays, flat, slices
from bisect_trt.metrics.decisions import TIE, BoxMatch, decision, is_decision
from bisect_trt.metrics.errors import SHAPE_CHANGED, TensorError, tensor_error
from bisect_trt.metrics.scales import Scale

NOTHING_ALLOWED = 1e9
"""The score of a finite error where none is allowed; infinity means NaN or infinite outputs."""

MAX_SCORE = 9.99e8
"""The largest score of an error where some is allowed."""

WORST = "worst"
_PERCENTILE = re.compile(r"^p(\d{1,3}(?:\.\d+)?)$")


def brief(score: float) -> str:
    """A score in a word or a number."""
    if math.isnan(score):
        return "not measured"
    if math.isinf(score):
        return "no number"
    if score >= NOTHING_ALLOWED:
        return "none allowed"
    return f"{'> ' if score >= MAX_SCORE else ''}{score:.3g} \u00d7"


def times(score: float, outcome: str = "") -> str:
    """A score in words; ``outcome`` explains one that is not finite."""
    if math.isnan(score):
        return "not measured"
    if math.isinf(score):
        if outcome == "fail":
            return "an output of another shape"
        has_outputs = outcome in ("", "non-finite")
        return "NaN or infinite values" if has_outputs else "no outputs: the run breaks"
    if score >= NOTHING_ALLOWED:
        return "a miss where none is allowed"
    if score >= MAX_SCORE:
        return f"more than {MAX_SCORE:.3g} times the tolerance"
    near = abs(score - 1.0) < 5e-3  # a miss by a hair must not read as "1 times"
    return f"{score:.6g} times the tolerance" if near else f"{score:.3g} times the tolerance"


def elementwise(
    reference: NDArray[Any], candidate: NDArray[Any], absolute: float, relative: float
) -> float:
    """The score of the worst element among those that are finite in the reference."""
    ref, got = flat(reference), flat(candidate)
    worst = 0.0
    for part in slices(ref.size, 1 << 16):
        exact = ref[part].astype(np.float64)
        error = np.abs(got[part].astype(np.float64) - exact)
        with np.errstate(divide="ignore", invalid="ignore"):
            used = error / (absolute + relative * np.abs(exact))
        used = used[(error > 0.0) & np.isfinite(exact)]
        worst = max(worst, float(used.max(initial=0.0)))
    return NOTHING_ALLOWED if math.isinf(worst) else min(worst, MAX_SCORE)


def fraction(value: float, limit: float) -> float:
    """The score of an error ``value`` with a tolerance of ``limit``, in the same unit."""
    if value <= 0.0:
        return 0.0
    return min(value / limit, MAX_SCORE) if limit > 0.0 else NOTHING_ALLOWED


def beyond(excess: float, limit: float) -> float:
    """The score of a value ``excess`` beyond its limit: 1 plus the excess over the limit."""
    score = 1.0 + excess / (abs(limit) or 1.0)
    # A miss by a last bit must not round to 1.
    least = math.nextafter(1.0, 2.0) if excess > 0.0 else 0.0
    return min(max(score, least), MAX_SCORE)


def is_aggregate(text: str) -> bool:
    """Whether ``text`` is ``worst``, ``mean``, ``median`` or a percentile such as ``p95``."""
    percentile = _PERCENTILE.match(text)
    named = text in (WORST, "mean", "median")
    return named or (percentile is not None and 0.0 < float(percentile[1]) <= 100.0)


def aggregate(kind: str, values: Sequence[float], *, at_least: bool) -> float:
    """The aggregate of one value for each input; NaN where a NaN among them decides it."""
    worse = -math.inf if at_least else math.inf
    numbers = np.asarray([worse if math.isnan(v) else v for v in values], np.float64)
    if kind in ("mean", "median"):
        # The decibels of an exact output are infinite, which would hide the other inputs. They
        # count as 200, more than float32 resolves.
        exact = numbers == math.inf
        if at_least and exact.any():
            numbers[exact] = max(float(numbers[~exact].max(initial=0.0)), 200.0)
        with np.errstate(invalid="ignore"):
            result = float(numbers.mean() if kind == "mean" else np.median(numbers))
        result = worse if math.isnan(result) else result  # inf - inf
    else:
        percentile = _PERCENTILE.match(kind)
        share = float(percentile[1]) / 100.0 if percentile is not None else 1.0
        ordered = np.sort(numbers)[::-1] if at_least else np.sort(numbers)
        result = float(ordered[max(math.ceil(share * len(ordered) - 1e-9), 1) - 1])
    return math.nan if result == worse and any(map(math.isnan, values)) else result


TaskMetric = Callable[[Arrays, Arrays], float]
CollectiveMetric = Callable[[Sequence[Arrays], Sequence[Arrays]], float]

Part = tuple[tuple[int | None, int | None, int | None], ...]
"""A slice (start, stop, step) of each of an output's first axes; empty for the whole output."""

METRICS = ("max_abs", "mean_abs", "median_abs", "rmse", "rel_range", "cosine", "snr_db", "psnr_db")


@dataclass(frozen=True)
class Requirement:
    """One condition on ``output``, or on every output.

    ``text``: as the user wrote it. ``metric``: its name; 'atol' for an elementwise tolerance.
    ``limit``: the bound, from above or, if ``at_least``, from below; the absolute part of 'atol'.
    ``relative``: the part of 'atol' that scales with the reference.
    ``aggregate``: what is bounded of several inputs; 'worst' is each of them.
    ``own``: the metric is the user's. ``part``: the slice of the output.
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
        """``part`` as NumPy's slices."""
        return tuple(slice(*bounds) for bounds in self.part)

    @property
    def by_scale(self) -> bool:
        """Whether it is ``snr_db`` of every float output, judged group by group."""
        return self.metric == "snr_db" and self.output is None

    def is_on(self, name: str, kind: str = "f") -> bool:
        """Whether it is on the output ``name`` of NumPy's dtype ``kind``."""
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
        """The score of a metric's ``value``: error over tolerance."""
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
        # Decibels: 20 of them are a factor of 10 in the error.
        return min(float(10.0 ** min((self.limit - value) / 20.0, 9.0)), MAX_SCORE)

    def value_at(self, score: float) -> float:
        """The metric's value that has ``score``: the inverse of :meth:`score_of`.

        NaN where there is none: of a user's metric, an elementwise tolerance, or a score that is
        cut off.
        """
        if self.own or self.metric == "atol" or not score < MAX_SCORE:
            return math.nan
        if not self.at_least:
            return score * self.limit
        if self.metric == "cosine" or is_decision(self.metric):
            return 1.0 - score * (1.0 - self.limit)
        return self.limit - 20.0 * math.log10(score) if score > 0.0 else math.inf


class ReferenceOutputs(dict[str, NDArray[Any]]):
    """The reference's outputs of one input, with the gaps of each output of decisions."""

    def __init__(self, outputs: Arrays, gaps: Mapping[str, NDArray[np.float32]]) -> None:
        super().__init__(outputs)
        self.gaps = dict(gaps)


def gaps_of(reference: Arrays) -> Mapping[str, NDArray[np.float32]]:
    """The gaps of ``reference`` by output, if it has any."""
    return reference.gaps if isinstance(reference, ReferenceOutputs) else {}


@dataclass(frozen=True)
class Judged:
    """One sample's outputs compared with the reference.

    ``values``: by condition, in its metric's unit; NaN for one on all inputs at once.
    """

    score: float
    values: tuple[float, ...]
    errors: Mapping[str, TensorError]


@dataclass(frozen=True)
class Requirements:
    """All conditions of a run.

    ``metrics``: those of one input that are functions. ``collective``: those of all inputs at once.
    ``scales``: of the float outputs, over all given inputs.
    ``limits``: the magnitudes from which on an output's storage type has infinity.
    """

    items: tuple[Requirement, ...]
    metrics: Mapping[str, TaskMetric]
    collective: Mapping[str, CollectiveMetric] = field(default_factory=dict)
    scales: Mapping[str, Scale] = field(default_factory=dict)
    limits: Mapping[str, float] = field(default_factory=dict)

    @property
    def of_sets(self) -> bool:
        """Whether some condition is on all inputs together."""
        return self.tells_of_all or any(item.aggregate != WORST for item in self.items)

    @property
    def rows(self) -> frozenset[str]:
        """The outputs with rows in any number and order, such as an NMS's."""
        matches = [m for m in self.metrics.values() if isinstance(m, BoxMatch)]
        return frozenset(name for match in matches for name in match.outputs)

    @property
    def tells_of_all(self) -> bool:
        """Whether some metric sees all inputs at once."""
        return any(item.metric in self.collective for item in self.items)

    @property
    def proportional(self) -> bool:
        """Whether every score is proportional to the error."""
        # A cosine goes with the square, a decision jumps, and a user's metric is unknown.
        return not any(i.own or i.metric == "cosine" or is_decision(i.metric) for i in self.items)

    def score(self, reference: Arrays, candidate: Arrays) -> float:
        """The score of :meth:`judge`."""
        return self.judge(reference, candidate).score

    def judge(self, reference: Arrays, candidate: Arrays) -> Judged:
        """Compare one sample's outputs with the reference."""
        candidate = {name: self._as_stored(name, array) for name, array in candidate.items()}
        errors = {name: tensor_error(reference[name], candidate[name]) for name in reference}
        bounded = {i.output for i in self.items if not self._sees_all(i)}
        all_bounded = None in bounded or any(self._sees_all(item) for item in self.items)
        # Another shape breaks an output with a condition, but not rows in any number.
        broken = {
            name
            for name, e in errors.items()
            if (not e.finite and e.nonfinite != SHAPE_CHANGED)
            or (
                e.nonfinite == SHAPE_CHANGED
                and (all_bounded or name in bounded)
                and name not in self.rows
            )
        }
        # NaN in an output without a condition means that the plan cannot be used either.
        if broken and None not in bounded and not broken <= bounded:
            return Judged(math.inf, (math.nan,) * len(self.items), errors)
        worst, values = math.inf if broken else 0.0, []
        for item in self.items:
            blind = self._sees_all(item) or item.output is None or item.output in broken
            if item.metric in self.collective or (broken and blind):
                values.append(math.nan)
                continue
            if item.metric in self.metrics:
                by_output = [self.metrics[item.metric](reference, candidate)]
            else:
                by_output = self._values(item, reference, candidate, errors)
            value = max(by_output, key=item.score_of, default=math.nan)
            values.append(value)
            worst = max(worst, item.score_of(value)) if by_output else worst
        return Judged(worst, tuple(values), errors)

    def _values(
        self,
        item: Requirement,
        reference: Arrays,
        candidate: Arrays,
        errors: Mapping[str, TensorError],
    ) -> list[float]:
        """The metric's value for each output that ``item`` is on."""
        ties = {name: gaps <= TIE for name, gaps in gaps_of(reference).items()}
        many = any(array.size != 1 for array in reference.values())
        found = []
        for name, array in reference.items():
            # The cosine of a single value is its sign: it is no condition beside other outputs.
            sign_alone = (
                item.metric == "cosine" and item.output is None and array.size == 1 and many
            )
            if item.is_on(name, array.dtype.kind) and not sign_alone:
                scale, tied = self.scales.get(name), ties.get(name)
                found.append(item.value(array, candidate[name], errors[name], scale, tied))
        return found

    def _as_stored(self, name: str, array: NDArray[Any]) -> NDArray[Any]:
        """``array`` with infinities where the output's type overflows; unrounded elsewhere."""
        limit = self.limits.get(name)
        if limit is None or not np.any(np.abs(array) >= limit):
            return array
        return np.where(np.abs(array) >= limit, np.copysign(np.inf, array), array)

    def _sees_all(self, item: Requirement) -> bool:
        """Whether its metric takes all outputs at once; they must be finite."""
        return item.metric in self.metrics or item.metric in self.collective

    def judge_all(self, references: Sequence[Arrays], candidates: Sequence[Arrays]) -> list[float]:
        """The values of the collective metrics, in the order of their conditions."""
        collective = [self.collective[i.metric] for i in self.items if i.metric in self.collective]
        return [metric(references, candidates) for metric in collective]

    def together(
        self,
        values: Sequence[Sequence[float]],
        share: float = 1.0,
        collective: Sequence[float] = (),
    ) -> float:
        """The score of several inputs together, where ``share`` of them have to pass."""
        scores = self.by_condition(values, share, collective) if values else ()
        return max(scores, default=0.0)

    def by_condition(
        self,
        values: Sequence[Sequence[float]],
        share: float = 1.0,
        collective: Sequence[float] = (),
    ) -> tuple[float, ...]:
        """The score of each condition over one or more inputs.

        Where only a share has to pass, it is over the inputs that are best by all conditions.
        """
        on_each = [
            place
            for place, item in enumerate(self.items)
            if item.aggregate == WORST and item.metric not in self.collective
        ]
        scores = [
            max((self.items[p].score_of(of_one[p]) for p in on_each), default=0.0)
            for of_one in values
        ]
        order = sorted(range(len(values)), key=scores.__getitem__)
        counted = order[: max(1, at_least(share, len(values)))]
        collective_values, condition_scores = iter(collective), []
        for place, item in enumerate(self.items):
            column = [of_one[place] for of_one in values]
            if item.metric in self.collective:
                condition_scores.append(item.score_of(next(collective_values, math.nan)))
            elif item.aggregate != WORST:
                value = aggregate(item.aggregate, column, at_least=item.at_least)
                condition_scores.append(item.score_of(value))
            else:
                condition_scores.append(max(item.score_of(column[number]) for number in counted))
        return tuple(condition_scores)

    @property
    def texts(self) -> tuple[str, ...]:
        """The conditions as the user wrote them."""
        return tuple(item.text for item in self.items)
