"""What "good enough" means: conditions on outputs, read from text, scored in multiples of the
tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.core.holds import at_least
from bisect_trt.numerics.arrays import Arrays
from bisect_trt.numerics.errors.tensor_error import SHAPE_CHANGED, TensorError, tensor_error
from bisect_trt.numerics.requirements.aggregates import WORST, aggregate
from bisect_trt.numerics.requirements.boxes import BoxMatch
from bisect_trt.numerics.requirements.decisions import TIE, decision, is_decision
from bisect_trt.numerics.requirements.scales import Scale
from bisect_trt.numerics.scores import MOST, beyond, elementwise, fraction

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
        """The metric's value for one output.

        Args:
            reference: one output, any shape, any numeric or boolean dtype.
            candidate: the same output of a plan, of the same shape.
            error: what :func:`~bisect_trt.numerics.errors.tensor_error.tensor_error` says of the
                two.
            scale: of the output over all inputs, where it is known.
            ties: as for :func:`~bisect_trt.numerics.requirements.decisions.decision`.

        Returns:
            In the metric's unit, for an elementwise tolerance the share of it that is used; NaN
            where a value is not finite.
        """
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
    (see :func:`~bisect_trt.numerics.requirements.decisions.gaps`).
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
        """The score alone of :meth:`judge`."""
        return self.judge(reference, candidate).score

    def judge(self, reference: Arrays, candidate: Arrays) -> Judged:
        """One sample's outputs held against the reference.

        Args:
            reference: arrays by output name, any numeric or boolean dtype.
            candidate: the same outputs of a plan; a changed shape is an error without numbers.

        Returns:
            Each output's errors, each condition's value, and the largest score of any
            (see :meth:`Requirement.score_of`): at most 1 passes, infinite where a value is not
            finite. Conditions on outputs that are finite keep their values beside one that is not,
            where another condition looks at that. The shape of an output that none looks at decides
            nothing.

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

        Args:
            references: the outputs of each input, arrays by name.
            candidates: the same of a plan.

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
        """The score of several inputs together.

        Args:
            values: of each input, the ``values`` of :meth:`judge`.
            share: of the inputs that must meet the conditions on each: the worst of the others
                does not count.
            collective: what :meth:`judge_all` gave.
        """
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

        Args:
            values: as for :meth:`together`.
            share: likewise.
            collective: likewise; NaN, which no score passes, where there are none.
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
