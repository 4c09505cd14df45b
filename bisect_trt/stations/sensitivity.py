"""What each layer does to the outputs when it alone is lowered: measured, layer by layer, from one
exact history.

A layer that breaks the requirement alone must be pinned in every passing plan of a monotone model.
The signed effects of the others let the search predict sets. Rows are journalled every half second,
so an interrupted pass goes on where it stopped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bisect_trt.core.errors import RunnerFailedError
from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.core.sample import Sample
from bisect_trt.numerics.error_sample import prediction_order
from bisect_trt.probe.journal import Row, RowBuffer
from bisect_trt.stations.bench import Bench
from bisect_trt.stations.case import Case

_DISTURBED = 64
TIME_BUDGET_S = 120.0
"""Where one row for each layer would take longer, only the most suspicious layers get one."""


@dataclass(frozen=True)
class Sensitivity:
    """``effects``: each layer's signed errors in tolerances; ``scores``: its score when it alone is
    lowered.

    ``base`` is the error vector with everything lowered, ``order`` the norm to rank predictions by,
    ``strength`` the mean square of each layer's effect on the most disturbed elements, ``runs`` how
    many rows were computed rather than recalled.
    """

    effects: Mapping[str, NDArray[np.float32]]
    scores: Mapping[str, float]
    base: NDArray[np.float32]
    order: float
    strength: Mapping[str, float]
    runs: int

    def under(self, limit: float) -> Sensitivity:
        """The same measurements in units of ``limit`` times the tolerance."""
        if limit == 1.0:
            return self
        effects = {name: row / np.float32(limit) for name, row in self.effects.items()}
        scores = {name: score / limit for name, score in self.scores.items()}
        return replace(self, effects=effects, scores=scores, base=self.base / np.float32(limit))

    @property
    def must_pin(self) -> frozenset[str]:
        """The layers that break the requirement alone."""
        return frozenset(name for name, score in self.scores.items() if not score <= 1.0)


def measure_sensitivity(
    case: Case,
    bench: Bench,
    layers: Sequence[str],
    samples: Sequence[Sample],
    lowered: PrecisionPlan,
) -> Sensitivity:
    """One row for each of ``layers``, over ``samples``; recalled from the journal where it is
    there.

    Args:
        case: the model and the requirements.
        bench: runs each layer lowered alone.
        layers: those to measure.
        samples: those to measure on.
        lowered: the plan whose errors say which elements are looked at: everything lowered, or all
            but the layers that overflow, whose errors would hide where the others' are.
    """
    squares: dict[str, list[float]] = {name: [] for name in layers}
    rows: dict[str, list[NDArray[np.float32]]] = {name: [] for name in layers}
    scores = dict.fromkeys(layers, 0.0)
    runs, base = 0, []
    for number, sample in enumerate(samples):
        base.append(_base(bench, sample, lowered))
        keys = {name: _key(bench, sample, lowered, name) for name in layers}
        known = {name: bench.journal.recall(key) for name, key in keys.items()}
        missing = [name for name, row in known.items() if row is None]
        buffer = RowBuffer(bench.journal)
        try:
            for name, score, vector in _measured(case, bench, sample, missing, lowered):
                buffer.add(Row(keys[name], "effect", score, vector.tobytes()))
                known[name] = (score, vector.tobytes())
                runs += 1
                expected = len(missing) * (len(samples) - number)
                bench.observer.progress(runs, expected, f"effect of {name} alone")
        finally:
            buffer.flush()
        for name, found in known.items():
            if found is not None:
                scores[name] = max(scores[name], float(found[0]))
                row = np.frombuffer(found[1], np.float32)
                rows[name].append(row)
                squares[name].append(_mean_square(row, base[-1]))
    complete = {n: np.concatenate(p) for n, p in rows.items() if len(p) == len(samples)}
    order = prediction_order(case.requirements)
    strength = {name: float(np.mean(found)) for name, found in squares.items() if found}
    return Sensitivity(complete, scores, np.concatenate(base), order, strength, runs)


def _mean_square(effect: NDArray[np.float32], base: NDArray[np.float32]) -> float:
    """Of ``effect`` at the elements that everything lowered disturbs most; infinite where it is not
    finite, and at all elements where ``base`` is not.
    """
    size = np.abs(base)
    if np.isfinite(size).all() and size.size > _DISTURBED:
        effect = effect[np.argpartition(-size, _DISTURBED)[:_DISTURBED]]
    values = effect.astype(np.float64)
    return float(np.mean(values * values)) if np.isfinite(values).all() else math.inf


def _measured(
    case: Case, bench: Bench, sample: Sample, layers: Sequence[str], lowered: PrecisionPlan
) -> Iterator[tuple[str, float, NDArray[np.float32]]]:
    """(layer, score, signed errors) for each of ``layers`` lowered alone on ``sample``."""
    if not layers:
        return
    runner = bench.fleet or bench.emulator
    chosen = bench.disturbed(sample, lowered)
    for name, outputs in runner.effects(sample, case.settings.precision, layers):
        if outputs is None:
            yield name, math.inf, np.full(chosen.size, np.nan, np.float32)
        else:
            score = case.requirements.score(bench.references.of(sample), outputs)
            yield name, score, chosen.errors(outputs)


def _base(bench: Bench, sample: Sample, lowered: PrecisionPlan) -> NDArray[np.float32]:
    """The signed errors under ``lowered``."""
    key = bench.prober.key("base", lowered.to_json(), sample.digest)
    found = bench.journal.recall(key)
    if found is None:
        chosen = bench.disturbed(sample, lowered)
        try:
            outputs = next(iter(bench.emulator.outputs(lowered, [sample])))
            vector = chosen.errors(outputs)
        except RunnerFailedError:
            vector = np.full(chosen.size, np.nan, np.float32)
        bench.journal.record([Row(key, "base", None, vector.tobytes())])
        return vector
    return np.frombuffer(found[1], np.float32)


def _key(bench: Bench, sample: Sample, lowered: PrecisionPlan, layer: str) -> str:
    return bench.prober.key("effect", lowered.to_json(), sample.digest, layer)


def affordable(
    layers: Sequence[str],
    suspicion: Mapping[str, float],
    probe_seconds: float,
    budget_s: float = TIME_BUDGET_S,
) -> list[str]:
    """The layers that rows fit into the time budget for: all of them, or the most suspicious
    ones.

    Args:
        layers: in network order; so is the answer.
        suspicion: by layer, the larger the sooner.
        probe_seconds: what one inference takes.
        budget_s: the most seconds for all of them, where the run has less than usual.
    """
    count = int(min(budget_s, TIME_BUDGET_S) / max(probe_seconds / 2.0, 1e-6))
    if count >= len(layers):
        return list(layers)
    chosen = set(sorted(layers, key=lambda n: -suspicion.get(n, -math.inf))[:count])
    return [name for name in layers if name in chosen]


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
