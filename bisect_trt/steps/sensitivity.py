"""Sensitivity: what each layer does to the outputs when it alone is reduced."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bisect_trt.base.errors import MachineError, RunnerFailedError
from bisect_trt.base.limits import thread_count
from bisect_trt.base.outcomes import Finding
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.base.sample import Sample, evenly
from bisect_trt.evaluate.cache import Row
from bisect_trt.metrics.error_sample import prediction_order
from bisect_trt.runners.device import CPU
from bisect_trt.steps.context import Context
from bisect_trt.steps.problem import Problem

DISTURBED_ELEMENTS = 64
"""The output elements that a layer's strength is measured on."""

WEIGHINGS = 16
"""Random sums of these elements, from whose squares a layer's mean square is estimated."""

MIN_WEIGHINGS = 8
"""The fewest on one input, where several share them."""

PASS_EVALUATIONS = 80
"""What a reverse pass takes on one input, in evaluations."""

CHECKED_LAYERS = 24
"""Layers run alone to hold the estimates against, spread over the network."""

MIN_CHECKED_LAYERS = 8
"""The fewest layers that say whether estimates rank better than the layers' own errors."""

NODE_SECONDS = 3e-5
"""What the interpreter takes for a node that is run by itself."""

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
    ``strength``: the mean square of each layer's errors on the most disturbed elements, measured
    or estimated.
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


def passes_affordable(
    samples: int, evaluation_seconds: float, usual_s: float, budget_s: float
) -> int:
    """The number of samples for reverse passes, where an inference takes ``evaluation_seconds``.

    As many as fit in ``usual_s``, or else one, but none beyond the budget.
    """
    pass_s = max(PASS_EVALUATIONS * evaluation_seconds, 1e-6)
    if pass_s > budget_s or usual_s <= 0.0:
        return 0
    return min(samples, max(1, int(min(usual_s, budget_s) / pass_s)))


def measure_sensitivity(
    problem: Problem,
    context: Context,
    suspicion: Mapping[str, float],
    samples: Sequence[Sample],
    reduced: PrecisionPlan,
    count: int,
    passes: int = 0,
) -> Sensitivity:
    """The sensitivity of ``count`` layers on ``samples``, and an estimated strength of the others.

    These are the most suspicious layers, or those that a reverse pass on ``passes`` of the samples
    finds the strongest.
    """
    # A set is predicted from the errors of everything reduced, less those of its layers.
    base = [_base(context, sample, reduced) for sample in samples]
    order = sorted(problem.names, key=lambda n: -suspicion.get(n, -math.inf))
    measured = _Measured(problem, context, samples, reduced)
    estimates: Mapping[str, float] = {}
    check = None
    if count < len(order) and passes:
        count = max(count, min(MIN_CHECKED_LAYERS, len(order)))
        estimates, broken = _estimated(problem, context, samples[:passes], base, reduced)
        if estimates:
            # The other half is for the strongest.
            several = min(CHECKED_LAYERS, max(MIN_CHECKED_LAYERS, count // 2))
            measured.add(evenly([n for n in problem.names if n in estimates], several))
            check = _Check.of(estimates, suspicion, _strength(measured.rows, base))
        if check is not None and check.helps:
            measured.add(broken)  # what overflows has no estimate: all of it is run
            # A layer without an estimate stands before an operator without a rule.
            order.sort(key=lambda n: -estimates.get(n, math.inf))
            uncovered = len(set(order).difference(estimates, measured.rows))
            count = max(count, len(measured.rows) + min(count, uncovered))
        else:
            estimates = {}
    left = [name for name in order if name not in measured.rows]
    measured.add(left[: max(0, count - len(measured.rows))])
    if count < len(order):
        context.note(_cut_short(len(measured.rows), len(order), check))
    rows = {name: measured.rows[name] for name in problem.names if name in measured.rows}
    factor = check.factor if check is not None else 1.0
    return Sensitivity(
        {name: np.concatenate([row for _, row in of_layer]) for name, of_layer in rows.items()},
        _scores(problem, rows),
        np.concatenate(base),
        prediction_order(problem.requirements),
        {name: factor * value for name, value in estimates.items()} | _strength(rows, base),
        measured.runs,
        tuple(samples),
    )


class _Measured:
    """The rows of the layers that were run alone; ``runs`` were not in the cache."""

    def __init__(
        self,
        problem: Problem,
        context: Context,
        samples: Sequence[Sample],
        reduced: PrecisionPlan,
    ) -> None:
        self._of = problem, context, samples, reduced
        self.rows: dict[str, list[SensitivityRow]] = {}
        self.runs = 0

    def add(self, layers: Iterable[str]) -> None:
        """Runs those of ``layers`` that were not run yet, in the network's order."""
        problem, *_ = self._of
        chosen = set(layers).difference(self.rows)
        rows, runs = _rows(*self._of, [name for name in problem.names if name in chosen])
        self.rows |= rows
        self.runs += runs


def _estimated(
    problem: Problem,
    context: Context,
    samples: Sequence[Sample],
    base: Sequence[NDArray[np.float32]],
    reduced: PrecisionPlan,
) -> tuple[dict[str, float], frozenset[str]]:
    """The mean squares that reverse passes estimate, and the layers whose own error is infinite.

    A layer that a pass does not cover has no estimate; where a pass cannot run, none has.
    """
    found: list[Mapping[str, float]] = []
    broken: set[str] = set()
    weighings = max(MIN_WEIGHINGS, WEIGHINGS // len(samples))
    for number, (sample, errors) in enumerate(zip(samples, base, strict=False), 1):
        key = context.evaluator.key("first order", reduced.digest, sample.digest, str(weighings))
        cached = context.cache.recall(key)
        if cached is None:
            one = _pass(problem, context, sample, errors, reduced, weighings)
            if one[0]:  # what failed for lack of memory may run elsewhere
                context.cache.record([Row(key, "first-order", one)])
        else:
            one = cached[0]
        found.append(one[0])
        broken.update(one[1])
        context.observer.progress(number, len(samples), "reverse pass")
    covered = [name for name in problem.names if all(name in of for of in found)]
    estimates = {name: float(np.mean([of[name] for of in found])) for name in covered}
    return estimates, frozenset(broken.intersection(problem.names))


def _pass(
    problem: Problem,
    context: Context,
    sample: Sample,
    base: NDArray[np.float32],
    reduced: PrecisionPlan,
    count: int,
) -> tuple[dict[str, float], list[str]]:
    """The mean square of each layer that a reverse pass covers, and the layers that overflow."""
    places, random = _most_disturbed(base), np.random.default_rng(0)
    weighings, chosen = [], context.disturbed(sample, reduced)
    for _ in range(count):
        factors = np.zeros(base.size)
        factors[places] = random.choice([-1.0, 1.0], places.size)
        weighings.append(chosen.weights(factors))
    if not weighings[0]:  # every output is of integers
        return {}, []
    try:
        found = context.emulator.first_order_effects(sample, problem.settings.precision, weighings)
    except (RunnerFailedError, MachineError):  # single-layer runs need less memory
        return {}, []
    # The squared sum of elements with random signs is in the mean the sum of their squares.
    estimates = {
        name: float(np.mean(np.square(effects, dtype=np.float64)) / places.size)
        for name, effects in found.effects.items()
        if name not in found.uncovered
    }
    return estimates, sorted(found.broken)


@dataclass(frozen=True)
class _Check:
    """How estimates rank the layers that were run alone, and how the layers' own errors do.

    ``factor``: the median of measured over estimated strength.
    """

    layers: int
    by_estimate: float
    by_own_error: float
    factor: float

    @classmethod
    def of(
        cls,
        estimates: Mapping[str, float],
        suspicion: Mapping[str, float],
        measured: Mapping[str, float],
    ) -> _Check:
        """Compare the ranks of the ``measured`` layers."""
        table = pd.DataFrame(
            {
                "measured": pd.Series(measured),
                "estimate": pd.Series({name: estimates[name] for name in measured}),
                "own error": pd.Series({name: suspicion.get(name, -1e9) for name in measured}),
            }
        )
        ranks = table.rank().corr().fillna(0.0)["measured"]
        shown = table[(table["measured"] > 0.0) & (table["estimate"] > 0.0)]
        shown = shown[np.isfinite(shown["measured"])]
        factor = float((shown["measured"] / shown["estimate"]).median()) if len(shown) else 1.0
        return cls(len(table), float(ranks["estimate"]), float(ranks["own error"]), factor)

    @property
    def helps(self) -> bool:
        """Whether the estimates rank better."""
        return self.by_estimate > self.by_own_error


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
    alone = (context.emulator_pool or context.emulator).sensitivities
    here = context.emulator_pool is None and context.emulator.device == CPU
    nodes, threads = len(problem.graph.names), thread_count(problem.settings.threads)
    if here and begin_at_layers(nodes, context.pace.usual_seconds, threads):
        alone = context.emulator.sensitivities_from_there
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
            for name, outputs in alone(sample, problem.settings.precision, missing):
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


def begin_at_layers(nodes: int, usual_seconds: float, threads: int) -> bool:
    """Whether single-layer runs take less time where each begins at its layer.

    Both ways give the same outputs. ``usual_seconds`` is what an inference takes on two cores.
    """
    # The interpreter handles one node at a time, on however many cores.
    return nodes * NODE_SECONDS <= usual_seconds * 2.0 / threads


def _key(context: Context, sample: Sample, reduced: PrecisionPlan, layer: str) -> str:
    return context.evaluator.key("sensitivity", reduced.digest, sample.digest, layer)


def _scores(problem: Problem, rows: Rows) -> dict[str, float]:
    """The worst score of each layer."""
    worst = {name: max(0.0, *(score for score, _ in of_layer)) for name, of_layer in rows.items()}
    if not problem.requirements.tells_of_all:
        return worst
    # A metric of all inputs at once says nothing of one, unless its outputs are not finite.
    return {name: score for name, score in worst.items() if math.isinf(score)}


def _cut_short(count: int, layers: int, check: _Check | None) -> Finding:
    message = f"{count:,} of {layers:,} layers were measured alone"
    if check is None:
        message += (
            ", the most suspicious first: as many as there is time for; the others are ranked "
            "behind them by the error that they introduce"
        )
        return Finding("measured", "", message)
    ranks = f"{check.by_estimate:.2f} with {check.layers} of them, {check.by_own_error:.2f} by"
    used = "all are ranked" if check.helps else "the others are not ranked"
    message += (
        f", as many as there is time for; {used} by reverse passes (rank correlation {ranks} the "
        "errors that the layers introduce)"
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
    values = errors[_most_disturbed(base)].astype(np.float64)
    return float(np.mean(values * values)) if np.isfinite(values).all() else math.inf


def _most_disturbed(base: NDArray[np.float32]) -> NDArray[np.intp]:
    """The elements that ``base`` disturbs most; all where it is not finite."""
    size = np.abs(base)
    if np.isfinite(size).all() and size.size > DISTURBED_ELEMENTS:
        return np.argpartition(-size, DISTURBED_ELEMENTS)[:DISTURBED_ELEMENTS]
    return np.arange(size.size)


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
