"""What each layer does to the outputs when it alone is reduced: measured, layer by layer, from one
exact history.

A layer that breaks the requirement alone must be pinned in every passing plan of a monotone model.
The signed effects of the others let the search predict sets. Rows are cached every half second,
so an interrupted pass goes on where it stopped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bisect_trt.base.errors import RunnerFailedError
from bisect_trt.base.outcomes import Finding
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.evaluate.cache import Row, content_key
from bisect_trt.metrics.error_sample import prediction_order
from bisect_trt.steps.context import Context
from bisect_trt.steps.problem import Problem

_FIRST_ROUND = 32
"""Layers are measured in rounds that double, each from the start of the network."""

SensitivityRow = tuple[float, NDArray[np.float32]]
"""A layer's score on one sample, and its signed errors."""


class SensitivityRows:
    """Layers measured on all samples: ``rows`` has each one's scores and signed errors, ``runs``
    counts the inferences made for them.
    """

    def __init__(
        self, problem: Problem, context: Context, samples: Sequence[Sample], reduced: PrecisionPlan
    ) -> None:
        self._problem, self._context, self._samples, self._reduced = (
            problem,
            context,
            samples,
            reduced,
        )
        self.rows: dict[str, list[SensitivityRow]] = {}
        self.runs = 0
        self._began = time.monotonic()

    def take_while(
        self,
        order: Sequence[str],
        budget_s: float,
        evaluation_seconds: float,
        worth: Callable[[int], bool] = lambda _: True,
    ) -> None:
        """Measure layers in rounds of growing size for ``budget_s`` seconds; a round is no longer
        than what is left, by the last one's pace.
        """
        deadline = time.monotonic() + budget_s
        a_layer = max(len(self._samples) * evaluation_seconds, 1e-6)
        size = max(1, min(_FIRST_ROUND, int(budget_s / 4.0 / a_layer)))
        done = 0
        while done < len(order):
            began = time.monotonic()
            fitting = int((deadline - began) / a_layer) if done else size
            asked = order[done : done + max(0, min(size, fitting))]
            if not asked or not self.take(asked, deadline):
                return
            now = time.monotonic()
            a_layer = max((now - began) / len(asked), 1e-6)
            done, size = done + len(asked), 2 * size
            if done > len(asked) and not worth(done + int((deadline - now) / a_layer)):
                return

    def take(self, layers: Sequence[str], deadline: float) -> bool:
        """Measure ``layers``; false where ``deadline``, by the monotonic clock, came before the
        last of them.
        """
        found: dict[str, list[SensitivityRow]] = {name: [] for name in layers}
        for sample in self._samples:
            if not self._on(sample, found, deadline):
                break
        complete = {n: rows for n, rows in found.items() if len(rows) == len(self._samples)}
        self.rows.update(complete)
        return len(complete) == len(found)

    def _on(self, sample: Sample, found: dict[str, list[SensitivityRow]], deadline: float) -> bool:
        """Add a row for ``sample`` to each layer; false where ``deadline`` ended it."""
        context, reduced = self._context, self._reduced
        keys = {name: _key(context, sample, reduced, name) for name in found}
        missing = []
        for name, key in keys.items():
            known = context.cache.recall(key)
            if known is None:
                missing.append(name)
            else:
                found[name].append((float(known[0]), np.frombuffer(known[1], np.float32)))
        try:
            for name, score, vector in _sensitivities(
                self._problem, context, sample, missing, reduced
            ):
                row = Row(keys[name], "sensitivity", score, vector.tobytes())
                context.cache.record_later(row)
                found[name].append((score, vector))
                self.runs += 1
                now = time.monotonic()
                expected = self._expected(deadline, now)
                context.observer.progress(self.runs, expected, f"effect of {name} alone")
                if now > deadline:
                    return False
        finally:
            context.cache.record([])
        return True

    def _expected(self, deadline: float, now: float) -> int:
        """How many runs there will be in all: every layer's, or as many as there is time for."""
        every = len(self._problem.names) * len(self._samples)
        fitting = self.runs * max(0.0, deadline - now) / max(now - self._began, 1e-6)
        return min(every, self.runs + int(min(fitting, every)))


def _sensitivities(
    problem: Problem,
    context: Context,
    sample: Sample,
    layers: Sequence[str],
    reduced: PrecisionPlan,
) -> Iterator[tuple[str, float, NDArray[np.float32]]]:
    """(layer, score, signed errors) for each of ``layers`` reduced alone on ``sample``."""
    if not layers:
        return
    runner = context.emulator_pool or context.emulator
    chosen = context.disturbed(sample, reduced)
    for name, outputs in runner.sensitivities(sample, problem.settings.precision, layers):
        if outputs is None:
            yield name, math.inf, np.full(chosen.size, np.nan, np.float32)
        else:
            score = problem.requirements.score(context.references.of(sample), outputs)
            yield name, score, chosen.errors(outputs)


def _key(context: Context, sample: Sample, reduced: PrecisionPlan, layer: str) -> str:
    return context.evaluator.key("sensitivity", reduced.digest, sample.digest, layer)


_DISTURBED = 64
TIME_BUDGET_S, _PATIENCE = 20.0, 4.0
"""Where one row for each layer would take longer, only the most suspicious layers get one. What
should fit may take four times as long: a busy machine is no reason for another answer."""

_FEW, _EVEN = 0.1, 10.0
"""Where the time is enough for less than this part of the layers it is not used up once the most
suspicious of them are seen to do no more than a tenth of the error, and no more than ten times what
is their number's part of it: an error spread over thousands of layers is ranked no better by a few
hundred of them. (Two to three times is even: alone a layer rounds what it reads and what it
gives.)"""


@dataclass(frozen=True)
class Sensitivity:
    """``sensitivities``: each layer's signed errors in tolerances; ``scores``: its score when it
    alone is reduced, where one input has a score.

    ``base`` is the error vector with everything reduced, ``order`` the norm to rank predictions by,
    ``strength`` the mean square of each layer's effect on the most disturbed elements, ``runs`` how
    many rows were computed rather than recalled, ``samples`` what they are of.
    """

    sensitivities: Mapping[str, NDArray[np.float32]]
    scores: Mapping[str, float]
    base: NDArray[np.float32]
    order: float
    strength: Mapping[str, float]
    runs: int
    samples: tuple[Sample, ...] = ()

    def under(self, limit: float) -> Sensitivity:
        """The same measurements in units of ``limit`` times the tolerance."""
        if limit == 1.0:
            return self
        sensitivities = {name: row / np.float32(limit) for name, row in self.sensitivities.items()}
        scores = {name: score / limit for name, score in self.scores.items()}
        return replace(
            self, sensitivities=sensitivities, scores=scores, base=self.base / np.float32(limit)
        )

    @property
    def must_pin(self) -> frozenset[str]:
        """The layers that miss the requirement alone."""
        return frozenset(name for name, score in self.scores.items() if not score <= 1.0)

    @property
    def breaks(self) -> frozenset[str]:
        """The layers that alone leave outputs that are not finite."""
        return frozenset(name for name, score in self.scores.items() if not math.isfinite(score))


def measure_sensitivity(
    problem: Problem,
    context: Context,
    suspicion: Mapping[str, float],
    samples: Sequence[Sample],
    reduced: PrecisionPlan,
    budget_s: float,
    evaluation_seconds: float,
) -> Sensitivity:
    """One row for each layer over ``samples``, or where that takes too long for the most suspicious
    layers; recalled from the cache where it is there.
    """
    base = [_base(context, sample, reduced) for sample in samples]
    order = sorted(problem.names, key=lambda n: -suspicion.get(n, -math.inf))
    measured = SensitivityRows(problem, context, samples, reduced)
    # What a slower or busier run was content with: a repeated command measures no further.
    digests = [sample.digest for sample in samples]
    asked = content_key(problem.names)
    key = context.evaluator.key(
        "measured", str(problem.settings.budget), asked, reduced.digest, *digests
    )
    before = context.cache.recall(key)
    if before is not None:
        measured.take(before[0], math.inf)
    else:

        def worth(reachable: int) -> bool:
            few = not problem.settings.fitted and reachable < _FEW * len(order)
            return not few or not _is_spread(measured, base, len(order))

        measured.take_while(order, budget_s, evaluation_seconds, worth)
        if len(measured.rows) < len(order):
            context.cache.record([Row(key, "measured", list(measured.rows))])
    if len(measured.rows) < len(order):
        spread = _is_spread(measured, base, len(order))
        context.note(_cut_short(len(measured.rows), len(order), spread))
    names = [name for name in problem.names if name in measured.rows]
    found = {name: measured.rows[name] for name in names}
    strength = _strength(found, base)
    return Sensitivity(
        {name: np.concatenate([row for _, row in rows]) for name, rows in found.items()},
        _scores(problem, found),
        np.concatenate(base),
        prediction_order(problem.requirements),
        strength,
        measured.runs,
        tuple(samples),
    )


def _scores(problem: Problem, rows: Mapping[str, Sequence[SensitivityRow]]) -> dict[str, float]:
    """The worst of each layer. Where a metric sees all inputs at once, which says nothing of one,
    only what is not finite has a score: others would be said to meet what nobody looked at.
    """
    silent = problem.requirements.tells_of_all
    worst = {name: max(0.0, *(score for score, _ in its)) for name, its in rows.items()}
    return {name: score for name, score in worst.items() if not silent or math.isinf(score)}


def time_allowed(expected_s: float) -> float:
    """The most seconds for rows that should take ``expected_s``."""
    return TIME_BUDGET_S if expected_s > TIME_BUDGET_S else _PATIENCE * TIME_BUDGET_S


def _is_spread(measured: SensitivityRows, base: Sequence[NDArray[np.float32]], layers: int) -> bool:
    """Whether the layers measured are few of all, none of them misses the requirement alone, and
    together they do a small part of the error.
    """
    count, whole = len(measured.rows), np.mean([_mean_square(b, b) for b in base])
    scores = [score for rows in measured.rows.values() for score, _ in rows]
    if not 0 < count < _FEW * layers or not np.isfinite(whole) or not max(scores) <= 1.0:
        return False
    done = sum(_strength(measured.rows, base).values())
    return bool(done <= min(_EVEN * count / layers, _FEW) * whole)


def _cut_short(count: int, layers: int, spread: bool) -> Finding:
    why = "as many as there is time for"
    if spread:
        why = "they do no large part of the error, and there is time for few more"
    message = (
        f"{count:,} of {layers:,} layers were measured alone, the most suspicious first: {why}; "
        "the others are ranked behind them by the error that they introduce"
    )
    return Finding("measured", "", message)


def _strength(
    rows: Mapping[str, Sequence[SensitivityRow]], base: Sequence[NDArray[np.float32]]
) -> dict[str, float]:
    """The mean square of each layer's effect over the samples."""
    return {
        name: float(np.mean([_mean_square(row, b) for (_, row), b in zip(its, base, strict=True)]))
        for name, its in rows.items()
    }


def _mean_square(sensitivity: NDArray[np.float32], base: NDArray[np.float32]) -> float:
    """Of ``sensitivity`` at the elements that everything reduced disturbs most; infinite where it
    is not finite, and at all elements where ``base`` is not.
    """
    size = np.abs(base)
    if np.isfinite(size).all() and size.size > _DISTURBED:
        sensitivity = sensitivity[np.argpartition(-size, _DISTURBED)[:_DISTURBED]]
    values = sensitivity.astype(np.float64)
    return float(np.mean(values * values)) if np.isfinite(values).all() else math.inf


def _base(context: Context, sample: Sample, reduced: PrecisionPlan) -> NDArray[np.float32]:
    """The signed errors under ``reduced``."""
    key = context.evaluator.key("base", reduced.digest, sample.digest)
    found = context.cache.recall(key)
    if found is None:
        chosen = context.disturbed(sample, reduced)
        try:
            outputs = next(iter(context.emulator.outputs(reduced, [sample])))
            vector = chosen.errors(outputs)
        except RunnerFailedError:
            vector = np.full(chosen.size, np.nan, np.float32)
        context.cache.record([Row(key, "base", None, vector.tobytes())])
        return vector
    return np.frombuffer(found[1], np.float32)


def affordable(layers: int, evaluation_seconds: float) -> int:
    """About how many of ``layers`` the time budget has rows for, where one inference takes
    ``evaluation_seconds``: each goes through half of the network.
    """
    return min(layers, int(TIME_BUDGET_S / max(evaluation_seconds / 2.0, 1e-6)))


def suspicion_of(table: pd.DataFrame, alone: Mapping[str, float] | None = None) -> dict[str, float]:
    """How suspicious each layer is: by what it does alone where that was measured, else by the
    error it introduces.

    Non-finite values come first; the scale only orders.
    """
    suspicion = {}
    for row in table.to_dict(orient="records"):
        value = -float(row["introduced_snr_db"]) if row["introduced_finite"] else 1e6
        measured = alone.get(str(row["layer"])) if alone else None
        if measured is not None:
            value = 1e9 if math.isinf(measured) else 1e3 + 20.0 * math.log10(max(measured, 1e-9))
        suspicion[str(row["layer"])] = -1e9 if math.isnan(value) or value == -math.inf else value
    return suspicion
