"""What each layer does to the outputs when it alone is lowered: measured, layer by layer, from one
exact history.

A layer that breaks the requirement alone must be pinned in every passing plan of a monotone model.
The signed effects of the others let the search predict sets. Rows are journalled every half second,
so an interrupted pass goes on where it stopped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bisect_trt.core.errors import RunnerFailedError
from bisect_trt.core.finding import Finding
from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.core.sample import Sample
from bisect_trt.numerics.error_sample import prediction_order
from bisect_trt.probe.journal import Row, RowBuffer
from bisect_trt.stations.bench import Bench
from bisect_trt.stations.case import Case

_DISTURBED = 64
TIME_BUDGET_S = 30.0
"""Where one row for each layer would take longer, only the most suspicious layers get one."""

_FIRST_ROUND = 32
"""Layers are measured in rounds that double, each from the start of the network."""

_EffectRow = tuple[float, NDArray[np.float32]]
"""A layer's score on one sample, and its signed errors."""


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
    suspicion: Mapping[str, float],
    samples: Sequence[Sample],
    lowered: PrecisionPlan,
    probe_seconds: float,
) -> Sensitivity:
    """One row for each layer over ``samples``, or where that takes too long for the most suspicious
    layers; recalled from the journal where it is there.

    Args:
        case: the model, its layers and the requirements.
        bench: runs each layer lowered alone.
        suspicion: by layer, the larger the sooner.
        samples: those to measure on.
        lowered: the plan whose errors say which elements are looked at: everything lowered, or all
            but the layers that overflow, whose errors would hide where the others' are.
        probe_seconds: about what one inference takes.
    """
    base = [_base(bench, sample, lowered) for sample in samples]
    order = sorted(case.names, key=lambda n: -suspicion.get(n, -math.inf))
    measured = _Measured(case, bench, samples, lowered)
    # What a slower or busier run was content with: a repeated command measures no further.
    digests = [sample.digest for sample in samples]
    key = bench.prober.key("measured", lowered.digest, *digests)
    before = bench.journal.recall(key)
    if before is not None:
        measured.take(before[0], math.inf)
    else:
        measured.take_while(order, time.monotonic() + TIME_BUDGET_S, probe_seconds)
        if len(measured.rows) < len(order):
            bench.journal.record([Row(key, "measured", list(measured.rows))])
    if len(measured.rows) < len(order):
        bench.note(_cut_short(len(measured.rows), len(order)))
    names = [name for name in case.names if name in measured.rows]
    found = {name: measured.rows[name] for name in names}
    strength = {
        name: float(np.mean([_mean_square(row, b) for (_, row), b in zip(rows, base, strict=True)]))
        for name, rows in found.items()
    }
    return Sensitivity(
        {name: np.concatenate([row for _, row in rows]) for name, rows in found.items()},
        {name: max(0.0, *(score for score, _ in rows)) for name, rows in found.items()},
        np.concatenate(base),
        prediction_order(case.requirements),
        strength,
        measured.runs,
    )


def _cut_short(count: int, layers: int) -> Finding:
    message = (
        f"{count:,} of {layers:,} layers were measured alone, the most suspicious first, within "
        f"the {TIME_BUDGET_S:.0f} s that this may take; the others are ranked behind them by the "
        "error that they introduce"
    )
    return Finding("measured", "", message)


class _Measured:
    """Layers measured on all samples: ``rows`` has each one's scores and signed errors, ``runs``
    counts the inferences made for them.
    """

    def __init__(
        self, case: Case, bench: Bench, samples: Sequence[Sample], lowered: PrecisionPlan
    ) -> None:
        self._case, self._bench, self._samples, self._lowered = case, bench, samples, lowered
        self.rows: dict[str, list[_EffectRow]] = {}
        self.runs = 0

    def take_while(self, order: Sequence[str], deadline: float, probe_seconds: float) -> None:
        """Measure layers in rounds of growing size until ``deadline``; a round is as long as what
        is left, by the last one's pace.

        Args:
            order: the layers, the first ones first.
            deadline: by the monotonic clock.
            probe_seconds: about what one inference takes.
        """
        a_layer = max(len(self._samples) * probe_seconds, 1e-6)
        size = max(1, min(_FIRST_ROUND, int(TIME_BUDGET_S / 4.0 / a_layer)))
        done = 0
        while done < len(order):
            began = time.monotonic()
            fitting = int((deadline - began) / a_layer) if done else size
            asked = order[done : done + max(0, min(size, fitting))]
            if not asked or not self.take(asked, deadline):
                return
            a_layer = max((time.monotonic() - began) / len(asked), 1e-6)
            done, size = done + len(asked), 2 * size

    def take(self, layers: Sequence[str], deadline: float) -> bool:
        """Measure ``layers``; false where ``deadline`` came before the last of them."""
        found: dict[str, list[_EffectRow]] = {name: [] for name in layers}
        for sample in self._samples:
            if not self._on(sample, found, deadline):
                break
        complete = {n: rows for n, rows in found.items() if len(rows) == len(self._samples)}
        self.rows.update(complete)
        return len(complete) == len(found)

    def _on(self, sample: Sample, found: dict[str, list[_EffectRow]], deadline: float) -> bool:
        """Add a row for ``sample`` to each layer; false where ``deadline`` ended it."""
        bench, lowered = self._bench, self._lowered
        keys = {name: _key(bench, sample, lowered, name) for name in found}
        missing = []
        for name, key in keys.items():
            known = bench.journal.recall(key)
            if known is None:
                missing.append(name)
            else:
                found[name].append((float(known[0]), np.frombuffer(known[1], np.float32)))
        buffer = RowBuffer(bench.journal)
        try:
            for name, score, vector in _effects(self._case, bench, sample, missing, lowered):
                buffer.add(Row(keys[name], "effect", score, vector.tobytes()))
                found[name].append((score, vector))
                self.runs += 1
                expected = len(self._case.names) * len(self._samples)
                bench.observer.progress(self.runs, expected, f"effect of {name} alone")
                if time.monotonic() > deadline:
                    return False
        finally:
            buffer.flush()
        return True


def _mean_square(effect: NDArray[np.float32], base: NDArray[np.float32]) -> float:
    """Of ``effect`` at the elements that everything lowered disturbs most; infinite where it is not
    finite, and at all elements where ``base`` is not.
    """
    size = np.abs(base)
    if np.isfinite(size).all() and size.size > _DISTURBED:
        effect = effect[np.argpartition(-size, _DISTURBED)[:_DISTURBED]]
    values = effect.astype(np.float64)
    return float(np.mean(values * values)) if np.isfinite(values).all() else math.inf


def _effects(
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
    key = bench.prober.key("base", lowered.digest, sample.digest)
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
    return bench.prober.key("effect", lowered.digest, sample.digest, layer)


def affordable(layers: int, probe_seconds: float) -> int:
    """About how many of ``layers`` the time budget has rows for, where one inference takes
    ``probe_seconds``: each goes through half of the network.
    """
    return min(layers, int(TIME_BUDGET_S / max(probe_seconds / 2.0, 1e-6)))


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
