"""On what a plan holds: the given inputs, fresh draws that no search has seen, inputs kept
apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

from bisect_trt.core.holds import Holding, Holds
from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.core.sample import Sample
from bisect_trt.core.stop import BudgetSpentError
from bisect_trt.numerics.confidence import lower_bound
from bisect_trt.probe.prober import Prober
from bisect_trt.probe.result import GIVEN, PanelResult, SampleResult, meets
from bisect_trt.stations.bench import Bench
from bisect_trt.stations.case import Case
from bisect_trt.stations.drawn import REDRAWN, VARIANTS, redraws, variants
from bisect_trt.stations.fresh_test import (
    CONFIDENCE,
    WANTED,
    FreshTest,
    set_size,
    spared,
    wanted_of_variants,
)

_CHUNK, _LARGE_CHUNK = 16, 64
"""So many samples go to one judge after the other; more where a judge's turn costs something, as an
engine's workers and the opening of sessions do."""

_CHUNK_BYTES = 16 << 20
"""Of a large chunk's samples."""


@dataclass(frozen=True)
class Refusal:
    """What spoke against a plan: samples of one ``kind`` that missed, of so many ``tested``, the
    worst of them with ``score`` times the tolerance.
    """

    kind: str
    samples: tuple[Sample, ...]
    tested: int
    score: float


def measure_holds(
    case: Case, bench: Bench, judges: Sequence[Prober], plan: PrecisionPlan, test: FreshTest
) -> Holds:
    """Everything that is claimed of ``plan``, tested.

    Args:
        case: the given inputs and those kept apart.
        bench: where the draws' references are.
        judges: who must pass each sample.
        plan: with the precision that a pin really runs in, for the emulators.
        test: which draws, and the confidence of their bounds.
    """
    size = set_size(case)
    given = judge_all(bench, judges, plan, case.samples, size=size)[0]
    drawn = [
        _tested(bench, judges, plan, draws, test, size=size)[0]
        for draws in _draws(case, bench, judges, test)
    ]
    apart = size if size == 1 else max(1, len(case.holdout))
    held_out = judge_all(bench, judges, plan, case.holdout, size=apart)[0]
    return Holds(
        _holding(given, None),
        _holding(drawn[0], test.confidence),
        _holding(drawn[1], test.confidence),
        _holding(held_out, CONFIDENCE),
        case.settings.robust or WANTED,
        wanted_of_variants(case),
        not case.settings.robust,
        1.0 if size > 1 else case.settings.share_of_given,
        size,
    )


def first_refusal(
    case: Case,
    bench: Bench,
    judges: Sequence[Prober],
    plan: PrecisionPlan,
    test: FreshTest,
    limit: float,
) -> Refusal | None:
    """What speaks against ``plan``; None if :func:`measure_holds` would find it robust.

    Args:
        case: the given inputs, and what is asked for.
        bench: where the draws' references are.
        judges: who must pass each sample.
        plan: with the precision that a pin really runs in, for the emulators.
        test: which draws.
        limit: how many tolerances each may use.
    """
    against = refused_by(case, bench, judges, plan, limit)
    if against is not None:
        return against
    size = set_size(case)
    # Variants refuse more often, and what is refused need not be tested to its end.
    redrawn, varied = _draws(case, bench, judges, test)
    for kind, samples in ((VARIANTS, varied), (REDRAWN, redrawn)):
        found, missed = _tested(bench, judges, plan, samples, test, limit=limit, size=size)
        if found.missed(limit) > test.may_miss(len(found.results)):
            return Refusal(kind, missed, len(found.results), found.score())
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
    may = spared(case, GIVEN, len(given)) if size == 1 else 0
    found, missed = judge_all(bench, judges, plan, given, limit=limit, misses=may, size=size)
    if found.missed(limit) <= may:
        return None
    return Refusal(GIVEN, missed, len(found.results), found.score())


def _draws(
    case: Case, bench: Bench, judges: Sequence[Prober], test: FreshTest
) -> tuple[Iterator[Sample], Iterator[Sample]]:
    """The test's redrawn copies, and variants."""
    count = test.draws * set_size(case)
    return (
        redraws(case, bench, test.stream, count, emulated=bench.engine not in judges),
        variants(case, bench, test.stream, count),
    )


def _tested(
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
    """
    stream = iter(samples)
    first = islice(stream, test.enough * size)
    found, missed = judge_all(
        bench, judges, plan, first, limit=limit, misses=test.may_miss_first, size=size
    )
    seen = found.missed(min(1.0, limit))
    if seen == 0 or (math.isfinite(limit) and seen > test.may_miss_first):
        return found, missed
    left = test.misses - seen
    more, others = judge_all(bench, judges, plan, stream, limit=limit, misses=left, size=size)
    together = PanelResult(plan, found.names + more.names, found.results + more.results)
    return together, missed + others


def judge_all(
    bench: Bench,
    judges: Sequence[Prober],
    plan: PrecisionPlan,
    samples: Iterable[Sample],
    *,
    limit: float = math.inf,
    misses: int = 0,
    size: int = 1,
) -> tuple[PanelResult, tuple[Sample, ...]]:
    """``plan`` on ``samples`` by every judge, the worst of them for each sample.

    Args:
        bench: knows which judge builds engines.
        judges: who runs the plan.
        plan: with the precision that a pin really runs in.
        samples: may be a generator, of which a few are in memory at a time.
        limit: how many tolerances each may use; if it is finite, the run ends once more than
            ``misses`` of them use more.
        misses: how many may.
        size: how many samples make a set that is judged together.

    Returns:
        The results, and the samples that missed ``limit``.
    """
    names: list[str] = []
    results: list[SampleResult] = []
    missed: list[Sample] = []
    # A few samples are in memory at a time.
    for panel in _chunks(bench, judges, samples, size):
        left = misses - len(missed) // size
        found: list[PanelResult] = []
        with _in_time(limit):
            found = [
                j.judge(bench.plan_for(j, plan), panel, limit=limit, misses=left, size=size)
                for j in judges
            ]
        if not found:
            break
        shortest = min(len(f.results) for f in found)
        names += found[0].names[:shortest]
        together = zip(*(f.results[:shortest] for f in found), strict=True)
        for place, each in enumerate(together):
            results.append(max(each, key=lambda r: (not meets(r, limit), r.score)))
            if not meets(results[-1], limit):
                missed += panel[place * size : (place + 1) * size]
        done, failed = len(results), len(missed) // size
        with _in_time(limit):
            bench.tell(f"{done} inputs or draws, {failed} violate")
        if math.isfinite(limit) and len(missed) > misses * size:
            break
    return PanelResult(plan, tuple(names), tuple(results)), tuple(missed)


def _chunks(
    bench: Bench, judges: Sequence[Prober], samples: Iterable[Sample], size: int
) -> Iterator[list[Sample]]:
    """``samples`` in whole sets of ``size``, so many at once as the judges like."""
    stream = iter(samples)
    for first in stream:
        at_once = _CHUNK
        if bench.engine in judges:
            at_once = _LARGE_CHUNK
        elif bench.in_turn:
            each = sum(array.nbytes for array in first.arrays.values())
            at_once = min(_LARGE_CHUNK, max(_CHUNK, _CHUNK_BYTES // max(1, each)))
        yield [first, *islice(stream, -(-at_once // size) * size - 1)]


@contextmanager
def _in_time(limit: float) -> Iterator[None]:
    """Where the time ends a measurement, what it has tested counts: the clock knows no outcome.
    Half a test, which ``limit`` makes it, is none.
    """
    try:
        yield
    except BudgetSpentError:
        if math.isfinite(limit):
            raise


def _holding(panel: PanelResult, confidence: float | None) -> Holding:
    if not panel.results:
        return Holding()
    passed, tested = panel.passed(), len(panel.results)
    bound = lower_bound(passed, tested, confidence) if confidence is not None else 0.0
    name, score = panel.worst
    return Holding(passed, tested, bound, score, name)
