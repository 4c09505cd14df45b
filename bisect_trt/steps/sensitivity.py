"""Sensitivity: what each layer does to the outputs when it alone is reduced."""

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

DISTURBED_ELEMENTS = 64
"""The output elements that a layer's strength is measured on."""

SensitivityRow = tuple[float, NDArray[np.float32]]
"""A layer's score on one sample, and its signed errors."""

Rows = Mapping[str, Sequence[SensitivityRow]]
"""A row for each sample, by layer."""


@dataclass(frozen=True)
class Sensitivity:
    """The scores and errors of layers that are reduced alone, in tolerances.

    ``sensitivities``: the signed errors of each layer, from which the search predicts sets.
    ``scores``: the worst score of each layer.
    ``base``: the signed errors with everything reduced.
    ``order``: the norm to rank predictions by.
    ``strength``: the mean square of each layer's errors on the most disturbed elements.
    ``runs``: how many rows were computed rather than recalled.
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


def affordable(layers: int, evaluation_seconds: float, budget_s: float) -> int:
    """The number of layers that there is time for, where an inference takes ``evaluation_seconds``.

    By the usual time and not by the clock, so that the same command gives the same answer.
    """
    # A layer alone goes through half of the network in the mean.
    return min(layers, int(max(0.0, budget_s) / max(evaluation_seconds / 2.0, 1e-6)))


def measure_sensitivity(
    problem: Problem,
    context: Context,
    suspicion: Mapping[str, float],
    samples: Sequence[Sample],
    reduced: PrecisionPlan,
    count: int,
) -> Sensitivity:
    """The sensitivity of the ``count`` most suspicious layers on ``samples``."""
    # A set is predicted from the errors of everything reduced, less those of its layers.
    base = [_base(context, sample, reduced) for sample in samples]
    order = sorted(problem.names, key=lambda n: -suspicion.get(n, -math.inf))
    if count < len(order):
        context.note(_cut_short(count, len(order)))
    chosen = set(order[:count])
    names = [name for name in problem.names if name in chosen]
    found, runs = _rows(problem, context, samples, reduced, names)
    return Sensitivity(
        {name: np.concatenate([row for _, row in rows]) for name, rows in found.items()},
        _scores(problem, found),
        np.concatenate(base),
        prediction_order(problem.requirements),
        _strength(found, base),
        runs,
        tuple(samples),
    )


def _rows(
    problem: Problem,
    context: Context,
    samples: Sequence[Sample],
    reduced: PrecisionPlan,
    layers: Sequence[str],
) -> tuple[dict[str, list[SensitivityRow]], int]:
    """The rows of ``layers`` on each of ``samples``, and how many were not in the cache."""
    rows: dict[str, list[SensitivityRow]] = {name: [] for name in layers}
    runs, expected = 0, len(layers) * len(samples)
    runner = context.emulator_pool or context.emulator
    for sample in samples:
        keys = {name: _key(context, sample, reduced, name) for name in layers}
        missing = []
        for name, key in keys.items():
            cached = context.cache.recall(key)
            if cached is None:
                missing.append(name)
            else:
                rows[name].append((float(cached[0]), np.frombuffer(cached[1], np.float32)))
        expected -= len(layers) - len(missing)  # progress counts what is computed
        if not missing:
            continue
        chosen = context.disturbed(sample, reduced)
        try:
            for name, outputs in runner.sensitivities(sample, problem.settings.precision, missing):
                # Without outputs a layer after it could not be computed: as bad as infinite ones.
                score, vector = math.inf, np.full(chosen.size, np.nan, np.float32)
                if outputs is not None:
                    score = problem.requirements.score(context.references.of(sample), outputs)
                    vector = chosen.errors(outputs)
                row = Row(keys[name], "sensitivity", score, vector.tobytes())
                context.cache.record_later(row)
                rows[name].append((score, vector))
                runs += 1
                context.observer.progress(runs, expected, f"effect of {name} alone")
        finally:
            # An interrupted pass goes on where it stopped.
            context.cache.record([])
    return rows, runs


def _key(context: Context, sample: Sample, reduced: PrecisionPlan, layer: str) -> str:
    return context.evaluator.key("sensitivity", reduced.digest, sample.digest, layer)


def _scores(problem: Problem, rows: Rows) -> dict[str, float]:
    """The worst score of each layer."""
    worst = {name: max(0.0, *(score for score, _ in of_layer)) for name, of_layer in rows.items()}
    if not problem.requirements.tells_of_all:
        return worst
    # A metric of all inputs at once says nothing of one, unless its outputs are not finite.
    return {name: score for name, score in worst.items() if math.isinf(score)}


def _cut_short(count: int, layers: int) -> Finding:
    message = (
        f"{count:,} of {layers:,} layers were measured alone, the most suspicious first: as many "
        "as there is time for; the others are ranked behind them by the error that they introduce"
    )
    return Finding("measured", "", message)


def _strength(rows: Rows, base: Sequence[NDArray[np.float32]]) -> dict[str, float]:
    """The mean square of each layer's errors over the samples."""
    strength = {}
    for name, of_layer in rows.items():
        pairs = zip(of_layer, base, strict=True)
        strength[name] = float(np.mean([_mean_square(errors, b) for (_, errors), b in pairs]))
    return strength


def _mean_square(errors: NDArray[np.float32], base: NDArray[np.float32]) -> float:
    """The mean square of ``errors`` at the elements that everything reduced disturbs most."""
    size = np.abs(base)
    if np.isfinite(size).all() and size.size > DISTURBED_ELEMENTS:
        errors = errors[np.argpartition(-size, DISTURBED_ELEMENTS)[:DISTURBED_ELEMENTS]]
    values = errors.astype(np.float64)
    return float(np.mean(values * values)) if np.isfinite(values).all() else math.inf


def _base(context: Context, sample: Sample, reduced: PrecisionPlan) -> NDArray[np.float32]:
    """The signed errors under ``reduced``."""
    key = context.evaluator.key("base", reduced.digest, sample.digest)
    cached = context.cache.recall(key)
    if cached is not None:
        return np.frombuffer(cached[1], np.float32)
    chosen = context.disturbed(sample, reduced)
    try:
        outputs = next(iter(context.emulator.outputs(reduced, [sample])))
        vector = chosen.errors(outputs)
    except RunnerFailedError:
        vector = np.full(chosen.size, np.nan, np.float32)
    context.cache.record([Row(key, "base", None, vector.tobytes())])
    return vector


def suspicion_of(table: pd.DataFrame, alone: Mapping[str, float] | None = None) -> dict[str, float]:
    """The suspicion of each layer: by its score alone where measured, else by its error."""
    # The scale only orders: measured layers come before others, non-finite ones first of each.
    suspicion = {}
    for row in table.to_dict(orient="records"):
        value = -float(row["introduced_snr_db"]) if row["introduced_finite"] else 1e6
        measured = alone.get(str(row["layer"])) if alone else None
        if measured is not None:
            value = 1e9 if math.isinf(measured) else 1e3 + 20.0 * math.log10(max(measured, 1e-9))
        suspicion[str(row["layer"])] = -1e9 if math.isnan(value) or value == -math.inf else value
    return suspicion
