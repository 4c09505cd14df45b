"""Sensitivity: what each layer does to the outputs when it alone is reduced.

It is measured layer by layer, from one exact history. A layer that breaks the requirement alone
must be pinned in every passing plan of a monotone model. The signed effects of the others let the
search predict sets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bisect_trt.base.errors import RunnerFailedError
from bisect_trt.base.outcomes import Finding
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.evaluate.cache import Row
from bisect_trt.metrics.error_sample import prediction_order
from bisect_trt.steps.context import Context
from bisect_trt.steps.problem import Problem

TIME_BUDGET_S = 20.0
"""Where one row for each layer usually takes longer, only the most suspicious layers get one: by
count and not by the clock, so that the same command gives the same answer."""

_DISTURBED_ELEMENTS = 64

SensitivityRow = tuple[float, NDArray[np.float32]]
"""A layer's score on one sample, and its signed errors."""

Rows = Mapping[str, Sequence[SensitivityRow]]
"""Of each layer, one for each sample."""


@dataclass(frozen=True)
class Sensitivity:
    """``sensitivities`` are each layer's signed errors in tolerances, ``scores`` its scores alone.

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
        by = np.float32(limit)
        sensitivities = {name: row / by for name, row in self.sensitivities.items()}
        scores = {name: score / limit for name, score in self.scores.items()}
        return replace(self, sensitivities=sensitivities, scores=scores, base=self.base / by)

    @property
    def must_pin(self) -> frozenset[str]:
        """The layers that miss the requirement alone."""
        return frozenset(name for name, score in self.scores.items() if not score <= 1.0)

    @property
    def breaks(self) -> frozenset[str]:
        """The layers that alone leave outputs that are not finite."""
        return frozenset(name for name, score in self.scores.items() if not math.isfinite(score))


def affordable(layers: int, evaluation_seconds: float, budget_s: float | None = None) -> int:
    """How many of ``layers`` there is time for, where one inference takes ``evaluation_seconds``.

    Each goes through half of the network.
    """
    budget_s = TIME_BUDGET_S if budget_s is None else min(budget_s, TIME_BUDGET_S)
    return min(layers, int(max(0.0, budget_s) / max(evaluation_seconds / 2.0, 1e-6)))


def measure_sensitivity(
    problem: Problem,
    context: Context,
    suspicion: Mapping[str, float],
    samples: Sequence[Sample],
    reduced: PrecisionPlan,
    count: int,
) -> Sensitivity:
    """One row for each of the ``count`` most suspicious layers and each of ``samples``."""
    base = [_base(context, sample, reduced) for sample in samples]
    order = sorted(problem.names, key=lambda n: -suspicion.get(n, -math.inf))
    asked = set(order[:count])
    if len(asked) < len(order):
        context.note(_cut_short(len(asked), len(order)))
    names = [name for name in problem.names if name in asked]
    found, runs = sensitivity_rows(problem, context, samples, reduced, names)
    return Sensitivity(
        {name: np.concatenate([row for _, row in rows]) for name, rows in found.items()},
        _scores(problem, found),
        np.concatenate(base),
        prediction_order(problem.requirements),
        _strength(found, base),
        runs,
        tuple(samples),
    )


def sensitivity_rows(
    problem: Problem,
    context: Context,
    samples: Sequence[Sample],
    reduced: PrecisionPlan,
    layers: Sequence[str],
) -> tuple[dict[str, list[SensitivityRow]], int]:
    """The rows of ``layers`` on each of ``samples``, and how many were not known.

    They are cached every half second, so that an interrupted pass goes on where it stopped.
    """
    rows: dict[str, list[SensitivityRow]] = {name: [] for name in layers}
    runs, every = 0, len(layers) * len(samples)
    for sample in samples:
        keys = {name: _key(context, sample, reduced, name) for name in layers}
        missing = []
        for name, key in keys.items():
            known = context.cache.recall(key)
            if known is None:
                missing.append(name)
            else:
                rows[name].append((float(known[0]), np.frombuffer(known[1], np.float32)))
        every -= len(layers) - len(missing)
        if not missing:
            continue
        runner = context.emulator_pool or context.emulator
        chosen = context.disturbed(sample, reduced)
        try:
            for name, outputs in runner.sensitivities(sample, problem.settings.precision, missing):
                score, vector = math.inf, np.full(chosen.size, np.nan, np.float32)
                if outputs is not None:
                    score = problem.requirements.score(context.references.of(sample), outputs)
                    vector = chosen.errors(outputs)
                row = Row(keys[name], "sensitivity", score, vector.tobytes())
                context.cache.record_later(row)
                rows[name].append((score, vector))
                runs += 1
                context.observer.progress(runs, every, f"effect of {name} alone")
        finally:
            context.cache.record([])
    return rows, runs


def _key(context: Context, sample: Sample, reduced: PrecisionPlan, layer: str) -> str:
    return context.evaluator.key("sensitivity", reduced.digest, sample.digest, layer)


def _scores(problem: Problem, rows: Rows) -> dict[str, float]:
    """The worst of each layer.

    Where a metric sees all inputs at once, which says nothing of one, only what is not finite has a
    score: others would be said to meet what nobody looked at.
    """
    silent = problem.requirements.tells_of_all
    worst = {name: max(0.0, *(score for score, _ in its)) for name, its in rows.items()}
    return {name: score for name, score in worst.items() if not silent or math.isinf(score)}


def _cut_short(count: int, layers: int) -> Finding:
    message = (
        f"{count:,} of {layers:,} layers were measured alone, the most suspicious first: as many "
        "as there is time for; the others are ranked behind them by the error that they introduce"
    )
    return Finding("measured", "", message)


def _strength(rows: Rows, base: Sequence[NDArray[np.float32]]) -> dict[str, float]:
    """The mean square of each layer's effect over the samples."""
    return {
        name: float(np.mean([_mean_square(row, b) for (_, row), b in zip(its, base, strict=True)]))
        for name, its in rows.items()
    }


def _mean_square(sensitivity: NDArray[np.float32], base: NDArray[np.float32]) -> float:
    """Of ``sensitivity`` at the elements that everything reduced disturbs most.

    Infinite where it is not finite, and at all elements where ``base`` is not.
    """
    size = np.abs(base)
    if np.isfinite(size).all() and size.size > _DISTURBED_ELEMENTS:
        sensitivity = sensitivity[np.argpartition(-size, _DISTURBED_ELEMENTS)[:_DISTURBED_ELEMENTS]]
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


def suspicion_of(table: pd.DataFrame, alone: Mapping[str, float] | None = None) -> dict[str, float]:
    """How suspicious each layer is: by its score alone where that was measured, else by its error.

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
