"""What speaks against a plan: given inputs, and fresh draws that no search has seen."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import islice

from bisect_trt.core.holds import InputKind
from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.core.sample import Sample
from bisect_trt.probe.prober import Prober
from bisect_trt.probe.result import PanelResult
from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.case.case import Case
from bisect_trt.stations.draws.all_judges import judge_all
from bisect_trt.stations.draws.evidence import Refusal
from bisect_trt.stations.draws.fresh_draws import Draws
from bisect_trt.stations.draws.fresh_test import (
    FreshTest,
    set_size,
    spared,
)


def first_refusal(
    case: Case,
    bench: Bench,
    judges: Sequence[Prober],
    plan: PrecisionPlan,
    draws: Draws,
    limit: float,
) -> Refusal | None:
    """What speaks against ``plan``; None where nothing does. A plan that would just pass may be
    refused: a test that is going badly ends early.

    What the first judge refuses the others are not asked about. It is the same test: what misses by
    one of them misses.

    Args:
        case: the given inputs, and what is asked for.
        bench: where the draws' references are.
        judges: who must pass each sample; the first is the one that is asked most cheaply.
        plan: with the precision that a pin really runs in, for the emulators.
        draws: of the test.
        limit: how many tolerances each may use.
    """
    size, test = set_size(case), draws.test
    for asked in dict.fromkeys((1, len(judges))):
        some = judges[:asked]
        against = refused_by(case, bench, some, plan, limit)
        if against is not None:
            return against
        for kind in tuple(draws.kinds):
            found, missed = on_draws(
                bench, some, plan, draws.of(kind), test, limit=limit, size=size
            )
            count, misses = len(found.results), found.missed(limit)
            # Without a miss the first look is enough; where no more could be made fewer tell.
            may = test.misses if count >= test.draws else test.may_miss(count, case)
            if misses > may or (misses > test.may_miss_first and count < test.draws):
                spares = may if case.settings.pick is not None and misses > may else 0
                return Refusal(kind, missed, max(count, draws.seen(kind)), found.score(spares))
            draws.hear(kind, found)
    return None


def refused_by(
    case: Case,
    bench: Bench,
    judges: Sequence[Prober],
    plan: PrecisionPlan,
    limit: float,
    given: Sequence[Sample] | None = None,
) -> Refusal | None:
    """The given inputs that speak against ``plan``; None if enough of them meet the requirement.

    Args:
        case: the given inputs, and how many of them must.
        bench: knows which judge builds engines.
        judges: who must pass each.
        plan: with the precision that a pin really runs in, for the emulators.
        limit: how many tolerances each may use.
        given: some of the given inputs; None for all.
    """
    given = case.samples if given is None else given
    size = min(set_size(case), len(given))
    may = spared(case, InputKind.GIVEN, len(given)) if size == 1 else 0
    found, missed = judge_all(
        bench, judges, plan, given, limit=limit, misses=may, size=size, of=len(given) // size
    )
    if found.missed(limit) <= may:
        return None
    # What must come down is the worst of those that are not spared.
    return Refusal(InputKind.GIVEN, missed, len(found.results), found.score(may))


def on_draws(
    bench: Bench,
    judges: Sequence[Prober],
    plan: PrecisionPlan,
    samples: Iterable[Sample],
    test: FreshTest,
    *,
    limit: float = math.inf,
    size: int,
) -> tuple[PanelResult, tuple[Sample, ...]]:
    """What :func:`judge_all` finds on a kind's draws: on ``enough`` of them where none missed, else
    on all. Where ``limit`` makes it a test, until so many did that it is refused.

    Args:
        bench: knows which judge builds engines.
        judges: who must pass each.
        plan: with the precision that a pin really runs in, for the emulators.
        samples: the kind's draws, made as they are taken.
        test: how many there may be, and miss.
        limit: how many tolerances each may use, where it is a test.
        size: how many are judged together.

    Returns:
        What was found, and the samples that missed.
    """
    stream = iter(samples)
    first = islice(stream, test.enough * size)
    few, enough = test.may_miss_first, test.enough
    found, missed = judge_all(
        bench, judges, plan, first, limit=limit, misses=few, size=size, of=enough
    )
    seen = found.missed(min(1.0, limit))
    ended = len(found.results) < test.enough  # no more samples, or no more time
    if seen == 0 or ended or (math.isfinite(limit) and seen > test.may_miss_first):
        return found, missed
    left = test.misses - seen
    further = test.draws - enough
    rest = islice(stream, further * size)
    more, others = judge_all(
        bench, judges, plan, rest, limit=limit, misses=left, size=size, of=further
    )
    together = PanelResult(plan, found.names + more.names, found.results + more.results)
    return together, missed + others
