"""How a plan is tested on fresh draws: how many, how many may fail, with what confidence."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bisect_trt.core.holds import at_least
from bisect_trt.numerics.confidence import draws_needed
from bisect_trt.probe.result import GIVEN
from bisect_trt.stations.case import Case
from bisect_trt.stations.drawn import REDRAWN, VARIANTS, movable, wants_variants

CONFIDENCE = 0.95
WANTED = 0.95
"""The share that is spoken of where ``--robust 0`` asks for none."""

MAX_TESTS = 13
"""The most tests that a run makes before it decides: one of everything lowered, two a round."""

VERIFYING = 100
"""The number of a test that no search has made: its draws are no other test's."""

_VARIANTS = 24
_FEWEST, _MOST, _SECONDS, _LONGEST = 8, 300, 25.0, 150.0
"""A test is made of as many draws as take 25 s, so that a plan which holds on a little more than
is asked for may pass it; of as many as it needs at least, up to 150 s; of fewer for slow models,
whose bound is then what it is."""


@dataclass(frozen=True)
class FreshTest:
    """One test on ``draws`` fresh draws of stream ``stream``, at ``confidence``: passed if at most
    ``misses`` of them fail.
    """

    stream: int
    confidence: float
    draws: int
    misses: int


def steady(seconds: float) -> float:
    """``seconds`` by powers of two, so that a machine's moods do not change what is planned by
    them, and the answer with it.
    """
    return float(2.0 ** round(math.log2(max(seconds, 1e-6))))


def planned_test(case: Case, number: int, probe_seconds: float, *, last: bool) -> FreshTest:
    """The test number ``number`` (from 0); ``last`` if it is the only one that will be made.

    Whoever tests until something passes is right more rarely than each test says: the first test
    gets half of what may go wrong, the next half of the rest, so that together they keep to 95 %.

    Args:
        case: says what share is asked for.
        number: decides the draws, which no other test and no search sees; no two tests share one.
        probe_seconds: about what one emulated inference takes.
        last: whether all of the risk may be spent.
    """
    risk = (1.0 - CONFIDENCE) / (1.0 if last else 2.0 ** (number + 1))
    share = case.settings.robust or WANTED
    # A draw of a set costs two emulations and a reference for each of its inputs.
    seconds = steady(3.0 * probe_seconds * set_size(case))
    draws, misses = draws_needed(share, 1.0 - risk), 0
    if draws * seconds > _LONGEST:
        draws = max(_FEWEST, int(_LONGEST / seconds))
    most = max(_MOST, 2 * draws)
    while True:
        more = draws_needed(share, 1.0 - risk, misses + 1)
        if more > most or more * seconds > _SECONDS:
            return FreshTest(number + 1, 1.0 - risk, draws, misses)
        draws, misses = more, misses + 1


def spared(case: Case, kind: str, count: int) -> int:
    """How many of ``count`` samples of ``kind`` may miss the requirement.

    Args:
        case: says what is asked for.
        kind: given, redrawn or variants.
        count: of samples; where they are judged in sets, the answer counts sets.
    """
    if set_size(case) > 1:
        count //= set_size(case)
    if case.settings.pick is not None:
        return count - at_least(case.settings.pick, count)
    share = {
        GIVEN: case.settings.share_of_given if set_size(case) == 1 else 1.0,
        REDRAWN: case.settings.robust or WANTED,
        VARIANTS: wanted_of_variants(case),
    }[kind]
    return count - at_least(share, count)


def set_size(case: Case) -> int:
    """How many inputs are judged together: all that are given where a condition is on a set of
    them (a mean, a metric of all inputs), else each alone.
    """
    return len(case.samples) if case.requirements.of_sets else 1


def wanted_of_variants(case: Case) -> float:
    """The share of variants that must pass: all that is asked for, where they are tested at all.

    Redrawn roundings say little of other inputs: plans for UniMatch that passed each of 173 of them
    and 22 of 24 variants held on 88 % of unseen inputs, those that passed 24 on 99.5 %
    (benchmarks/results/plans.md).
    """
    return (case.settings.robust or WANTED) if wants_variants(case) else 0.0


def variants_of(case: Case, test: FreshTest, *, emulated: bool) -> int:
    """How many variants are tested: a few, which have to agree, or as many as bound a share where
    nothing can be redrawn.

    Args:
        case: the given inputs.
        test: says how many draws make a bound.
        emulated: whether only emulators judge.
    """
    few = movable(case, emulated=emulated)
    return set_size(case) * (min(test.draws, _VARIANTS) if few else test.draws)
