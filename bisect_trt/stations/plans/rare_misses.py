"""Layers that miss the requirement on few inputs only: what disturbs most on others says nothing of
them, and a prefix of the ranking that reaches them pins all between.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.core.sample import Sample, evenly
from bisect_trt.search.tolerance_share import Room
from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.case.case import Case
from bisect_trt.stations.cause.effect_rows import EffectRows
from bisect_trt.stations.cause.sensitivity import TIME_BUDGET_S
from bisect_trt.stations.draws.evidence import Refusal
from bisect_trt.stations.draws.fresh_test import set_size
from bisect_trt.stations.draws.panel import Panel
from bisect_trt.stations.plans.panel_sets import MOST_SHRUNK, shortest_passing

_LOOKS, _LOOKED_AT = 4, 4
"""Each at some of the inputs that half of the prefix misses."""

_RARE, _FAR, _WORST = 0.25, 4.0, 2
"""Where half of a prefix misses more of a panel's samples, or by fewer tolerances, it is long
because the error is spread; where it does not, what misses the worst of them alone is looked for.
"""

_GUILTY = 0.1
"""Of the layers: where more miss such a sample alone it is a near tie, and no layer's fault."""

_LONG = 0.5
"""A prefix of so many of the layers is looked at for values that are not finite, however many
samples have them."""


def without_rare_misses(
    case: Case,
    bench: Bench,
    panel: Panel,
    ranking: Sequence[str],
    room: Room,
    shortest: int,
    strength: Mapping[str, float],
    length: int,
) -> tuple[list[str], int]:
    """A ranking, and its shortest prefix that passes: with those layers further in front that miss
    the requirement alone on a few inputs, where the prefix has many layers for their sake.

    Args:
        case: says whether inputs may be missed.
        bench: runs single layers.
        panel: asks about sets.
        ranking: the layers, most harmful first.
        room: the share of the tolerance that a set is held to.
        shortest: fewer are not asked for.
        strength: the mean square of each layer's effect.
        length: of the shortest prefix of ``ranking`` that passes.
    """
    for _ in range(_LOOKS if _each_tells(case) else 0):
        half = frozenset(ranking[: length // 2])
        if length <= MOST_SHRUNK or not half:
            break
        missed = _missed(panel, half, length >= _LONG * len(ranking))
        again = as_searched(case, _first_that_miss(case, bench, panel.base, missed, ranking))
        if again == list(ranking):
            break
        left = [strength.get(name, 0.0) for name in again]
        shorter = shortest_passing(panel, again, room, shortest, left)
        if shorter is None or shorter >= length:
            break
        ranking, length = again, shorter
    return list(ranking), length


def after_refusal(
    case: Case,
    bench: Bench,
    base: PrecisionPlan,
    refused: Sequence[Refusal],
    ranking: Sequence[str],
) -> list[str]:
    """``ranking`` with those layers first that miss the requirement alone on what fresh draws
    refused, where that is few draws by far; else as it is.

    Args:
        case: says whether inputs may be missed.
        bench: runs single layers.
        base: the plan without pins.
        refused: what spoke against sets of one round.
        ranking: the layers, most harmful first.
    """
    if not _each_tells(case):
        return list(ranking)
    size = set_size(case)
    far = [r for r in refused if r.score >= _FAR and len(r.samples) <= _RARE * size * r.tested]
    samples = [sample for refusal in far for sample in refusal.samples[:_WORST]]
    most = max(1.0, _GUILTY * len(ranking))
    return as_searched(case, _first_that_miss(case, bench, base, samples[:_WORST], ranking, most))


def as_searched(case: Case, ranking: Sequence[str]) -> list[str]:
    """``ranking`` with the layers of an older plan first, in their order.

    Args:
        case: says which plan to begin at, if any.
        ranking: most harmful first.
    """
    return sorted(ranking, key=lambda name: name not in case.begin)


def _each_tells(case: Case) -> bool:
    """Whether none of the inputs may be missed, and each can be judged by itself."""
    return case.settings.share_of_given >= 1.0 and not case.requirements.tells_of_all


def _missed(panel: Panel, pins: frozenset[str], long: bool) -> list[Sample]:
    """The worst of the samples that ``pins`` miss, where they are few and far off; else, of a
    ``long`` prefix, some of those with values that are not finite.
    """
    scores = panel.scores(pins)
    missed = sorted((found for found in scores if not found[1] <= 1.0), key=lambda f: -f[1])
    if missed and len(missed) <= max(1.0, _RARE * len(scores)) and missed[0][1] >= _FAR:
        return [sample for sample, _ in missed[:_WORST]]
    broken = [sample for sample, score in missed if long and not math.isfinite(score)]
    return evenly(broken, _LOOKED_AT)


def _first_that_miss(
    case: Case,
    bench: Bench,
    base: PrecisionPlan,
    samples: Sequence[Sample],
    ranking: Sequence[str],
    most: float = math.inf,
) -> list[str]:
    """``ranking`` with the layers first that miss the requirement alone on some of ``samples``,
    the worst first; as it is where none does, more than ``most`` do by finite scores, or the layers
    are too many to be asked.
    """
    # By count and not by the clock, so that the same command gives the same answer.
    expected_s = len(samples) * len(ranking) * bench.pace.usual_seconds
    if not samples or expected_s > TIME_BUDGET_S:
        return list(ranking)
    rows = EffectRows(case, bench, samples, base.with_pins(ranking))
    rows.take(list(ranking), math.inf)
    bench.further_rows += rows.runs
    worst = {name: max(score for score, _ in its) for name, its in rows.rows.items()}
    guilty = {name for name, score in worst.items() if not score <= 1.0}
    finite = all(math.isfinite(worst[name]) for name in guilty)
    if finite and len(guilty) > most:
        return list(ranking)
    return sorted(ranking, key=lambda name: -worst[name] if name in guilty else 0.0)
