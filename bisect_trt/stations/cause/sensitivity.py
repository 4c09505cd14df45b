"""What each layer does to the outputs when it alone is lowered: measured, layer by layer, from one
exact history.

A layer that breaks the requirement alone must be pinned in every passing plan of a monotone model.
The signed effects of the others let the search predict sets. Rows are journalled every half second,
so an interrupted pass goes on where it stopped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bisect_trt.core.errors import RunnerFailedError
from bisect_trt.core.finding import Finding
from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.core.sample import Sample
from bisect_trt.numerics.requirements.error_sample import prediction_order
from bisect_trt.probe.journal import Row, content_key
from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.case.case import Case
from bisect_trt.stations.cause.effect_rows import EffectRow, EffectRows

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
    """``effects``: each layer's signed errors in tolerances; ``scores``: its score when it alone is
    lowered, where one input has a score.

    ``base`` is the error vector with everything lowered, ``order`` the norm to rank predictions by,
    ``strength`` the mean square of each layer's effect on the most disturbed elements, ``runs`` how
    many rows were computed rather than recalled, ``samples`` what they are of.
    """

    effects: Mapping[str, NDArray[np.float32]]
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
        effects = {name: row / np.float32(limit) for name, row in self.effects.items()}
        scores = {name: score / limit for name, score in self.scores.items()}
        return replace(self, effects=effects, scores=scores, base=self.base / np.float32(limit))

    @property
    def must_pin(self) -> frozenset[str]:
        """The layers that miss the requirement alone."""
        return frozenset(name for name, score in self.scores.items() if not score <= 1.0)

    @property
    def breaks(self) -> frozenset[str]:
        """The layers that alone leave outputs that are not finite."""
        return frozenset(name for name, score in self.scores.items() if not math.isfinite(score))


def measure_sensitivity(
    case: Case,
    bench: Bench,
    suspicion: Mapping[str, float],
    samples: Sequence[Sample],
    lowered: PrecisionPlan,
    budget_s: float,
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
        budget_s: the most seconds for all of them.
        probe_seconds: about what one inference takes.
    """
    base = [_base(bench, sample, lowered) for sample in samples]
    order = sorted(case.names, key=lambda n: -suspicion.get(n, -math.inf))
    measured = EffectRows(case, bench, samples, lowered)
    # What a slower or busier run was content with: a repeated command measures no further.
    digests = [sample.digest for sample in samples]
    asked = content_key(case.names)
    key = bench.prober.key("measured", str(case.settings.budget), asked, lowered.digest, *digests)
    before = bench.journal.recall(key)
    if before is not None:
        measured.take(before[0], math.inf)
    else:

        def worth(reachable: int) -> bool:
            few = not case.settings.fitted and reachable < _FEW * len(order)
            return not few or not _is_spread(measured, base, len(order))

        measured.take_while(order, budget_s, probe_seconds, worth)
        if len(measured.rows) < len(order):
            bench.journal.record([Row(key, "measured", list(measured.rows))])
    if len(measured.rows) < len(order):
        spread = _is_spread(measured, base, len(order))
        bench.note(_cut_short(len(measured.rows), len(order), spread))
    names = [name for name in case.names if name in measured.rows]
    found = {name: measured.rows[name] for name in names}
    strength = _strength(found, base)
    return Sensitivity(
        {name: np.concatenate([row for _, row in rows]) for name, rows in found.items()},
        _scores(case, found),
        np.concatenate(base),
        prediction_order(case.requirements),
        strength,
        measured.runs,
        tuple(samples),
    )


def _scores(case: Case, rows: Mapping[str, Sequence[EffectRow]]) -> dict[str, float]:
    """The worst of each layer. Where a metric sees all inputs at once, which says nothing of one,
    only what is not finite has a score: others would be said to meet what nobody looked at.
    """
    silent = case.requirements.tells_of_all
    worst = {name: max(0.0, *(score for score, _ in its)) for name, its in rows.items()}
    return {name: score for name, score in worst.items() if not silent or math.isinf(score)}


def time_allowed(expected_s: float) -> float:
    """The most seconds for rows that should take ``expected_s``."""
    return TIME_BUDGET_S if expected_s > TIME_BUDGET_S else _PATIENCE * TIME_BUDGET_S


def _is_spread(measured: EffectRows, base: Sequence[NDArray[np.float32]], layers: int) -> bool:
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
    rows: Mapping[str, Sequence[EffectRow]], base: Sequence[NDArray[np.float32]]
) -> dict[str, float]:
    """The mean square of each layer's effect over the samples."""
    return {
        name: float(np.mean([_mean_square(row, b) for (_, row), b in zip(its, base, strict=True)]))
        for name, its in rows.items()
    }


def _mean_square(effect: NDArray[np.float32], base: NDArray[np.float32]) -> float:
    """Of ``effect`` at the elements that everything lowered disturbs most; infinite where it is not
    finite, and at all elements where ``base`` is not.
    """
    size = np.abs(base)
    if np.isfinite(size).all() and size.size > _DISTURBED:
        effect = effect[np.argpartition(-size, _DISTURBED)[:_DISTURBED]]
    values = effect.astype(np.float64)
    return float(np.mean(values * values)) if np.isfinite(values).all() else math.inf


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
