"""What a test of a plan takes, and the inputs it takes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from bisect_trt.base.outcomes import CONFIDENCE, InputKind, at_least
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.evaluate.evaluator import Evaluator
from bisect_trt.evaluate.result import SearchSetResult
from bisect_trt.metrics.statistics import copies_needed
from bisect_trt.steps.context import Context
from bisect_trt.steps.problem import Problem
from bisect_trt.steps.samples import augmented, perturbs, wants_augmented

WANTED = 0.95
"""The share of unseen inputs that a plan shall hold on, where nobody asks for another."""

MAX_TESTS = 13
"""The most tests that a run makes before it decides: one of everything reduced, two a round."""

VERIFYING = 100
"""The number of a test that no search has made: its copies are no other test's."""

TRADEOFF, TRADEOFF_COPIES = MAX_TESTS + 2, 4
"""The stream of the trade-off curve's copies, so that what a row says was not tuned on them, and
how many of a kind there are of the slowest model."""

_AT_ONCE = 2.0
_OF_REST = 0.6
"""The part of a run's last minutes that perturbed copies and augmented inputs get; the report comes
after."""

_TELLING = 32
"""So many at least: of a share of 0.9 they see one of 0.78 to 0.97 in nineteen cases of twenty."""

_TOLD = 25.0
"""Seconds that telling on how little a refused plan holds may take."""

_FIRST_TEST = 2.0 / 3.0
"""The part of a run's risk that its first test gets: many runs end there, and with more risk it
asks for fewer copies."""

_FEWEST, _MOST, _FURTHER, _LONGEST = 8, 300, 40.0, 150.0
"""A test is made of as many copies as it needs at least, up to 150 s; of fewer for slow models,
whose bound is then what it is. Where some miss it goes on to as many as usually take 40 s, so that
a plan which holds on a little more than is asked for may pass; not with ``--robust 0``."""


@dataclass(frozen=True)
class ValidationTest:
    """One test on new copies of stream ``stream``, of each kind that is tested: passed if none of
    the first ``enough`` of a kind fails, or a few do (:attr:`may_miss_first`) and at most
    ``misses`` of its ``copies``.

    A plan below the share passes it with the probability ``risk`` at most, of which each look has
    half where there are two. What holds on all that it meets passes at the first; of what holds on
    99 % of it a third to a half does, where 95 % are asked for, and most others at the second. (A
    second look with a fifth of the risk left the demo's detector 156 pins instead of 112.)
    """

    stream: int
    risk: float
    copies: int
    misses: int
    enough: int

    @property
    def confidence(self) -> float:
        """That of the bound of either look."""
        return 1.0 - (self.risk / 2.0 if self.copies > self.enough else self.risk)

    @property
    def may_miss_first(self) -> int:
        """How many of the first ``enough`` may miss for it to go on: one more than their part of
        ``misses``. Of what misses more often little passes, and whoever gives up early says
        *validated* no more often than it should be said.
        """
        part = round(self.misses * self.enough / self.copies)
        return min(self.misses, part + 1)

    def may_miss(self, tested: int, problem: Problem) -> int:
        """How many of ``tested`` copies may miss where there are no others: as many as leave the
        share bounded, or of what is picked that share met.
        """
        pick = problem.settings.pick
        if pick is not None:
            return tested - at_least(pick, tested)
        wanted, most = wanted_of_unseen(problem), 0
        while most < self.misses and copies_needed(wanted, self.confidence, most + 1) <= tested:
            most += 1
        return most


def planned_test(
    problem: Problem, number: int, usual_seconds: float, *, last: bool
) -> ValidationTest:
    """The test number ``number`` (from 0); ``last`` if it is the only one that will be made.

    Whoever tests until something passes is right more rarely than each test says: the first test
    gets two thirds of what may go wrong, each other half of the rest, so that together they keep to
    95 %.
    """
    risk = 1.0 - CONFIDENCE
    if not last:
        risk *= _FIRST_TEST if number == 0 else (1.0 - _FIRST_TEST) / 2.0**number
    share = wanted_of_unseen(problem)
    seconds = _seconds_a_copy(problem, usual_seconds)
    enough = copies_needed(share, 1.0 - risk)
    if enough * seconds > _LONGEST:
        enough = max(_FEWEST, int(_LONGEST / seconds))
    once = ValidationTest(number + 1, risk, enough, 0, enough)
    # Where no share is asked for the word is a courtesy: no copies beyond the fewest that tell.
    allowed = 0.0 if problem.settings.fitted else _FURTHER
    each = 1.0 - risk / 2.0
    enough = copies_needed(share, each)
    most = min(max(_MOST, 2 * enough), int(allowed / seconds))
    misses, copies = 0, enough
    while (more := copies_needed(share, each, misses + 1)) <= most:
        misses, copies = misses + 1, more
    return ValidationTest(number + 1, risk, copies, misses, enough) if misses else once


def next_test(problem: Problem, context: Context) -> ValidationTest:
    """The next test of a run, which counts it: whichever step makes it, no two get one risk."""
    context.tests += 1
    return asked(
        problem, planned_test(problem, context.tests - 1, context.pace.usual_seconds, last=False)
    )


def asked(problem: Problem, test: ValidationTest) -> ValidationTest:
    """``test``, or where a point of the trade-off curve is picked one of all its copies: what is
    picked has to hold on that share of them, and not to bound it.
    """
    pick = problem.settings.pick
    if pick is None:
        return test
    return replace(test, misses=test.copies - at_least(pick, test.copies), enough=test.copies)


def shortened(test: ValidationTest, problem: Problem, usual_seconds: float) -> ValidationTest:
    """``test`` of at most as many copies as usually take 25 s, and of a few at least: of a plan
    that other tests have refused, it tells how badly.
    """
    fitting = int(_TOLD / _seconds_a_copy(problem, usual_seconds))
    return _within(test, max(_TELLING, fitting))


def out_of_reach(
    test: ValidationTest, problem: Problem, usual_seconds: float, seen: int
) -> ValidationTest:
    """``test`` of at most as many copies as usually take 25 s, and of eight at least: no pins pass
    it any more, but those that are missing are still looked for.
    """
    fitting = int(_TOLD / _seconds_a_copy(problem, usual_seconds))
    return _within(test, max(_FEWEST, fitting, min(seen, test.copies)))


def fitted(
    test: ValidationTest, problem: Problem, evaluation_seconds: float, left_s: float
) -> ValidationTest:
    """``test`` with as many copies as can be made in ``left_s`` seconds, at least a few; its bound
    is then what it is.
    """
    # Inferences are made side by side; where that is too hopeful the clock ends them.
    seconds = _seconds_a_copy(problem, evaluation_seconds) / _AT_ONCE
    if test.copies * seconds <= _OF_REST * left_s:
        return test
    return _within(test, max(_FEWEST, int(_OF_REST * left_s / seconds)))


def _within(test: ValidationTest, most: int) -> ValidationTest:
    """``test`` of at most so many copies: of one look where there is no room for a second."""
    if most > test.enough:
        return replace(test, copies=min(test.copies, most))
    return replace(test, copies=most, misses=0, enough=most)


def _seconds_a_copy(problem: Problem, evaluation_seconds: float) -> float:
    """Two emulations and a reference for each input of a set, of each kind."""
    kinds = 2.0 if wants_augmented(problem) else 1.0
    return max(3.0 * evaluation_seconds * set_size(problem) * kinds, 1e-6)


def spared(problem: Problem, kind: InputKind, count: int) -> int:
    """How many of ``count`` samples of ``kind`` may miss the requirement."""
    if set_size(problem) > 1:
        count //= set_size(problem)
    if problem.settings.pick is not None:
        return count - at_least(problem.settings.pick, count)
    if kind == InputKind.GIVEN:
        share = wanted_of_given(problem)
    else:
        wanted = (
            wanted_of_augmented(problem)
            if kind == InputKind.AUGMENTED
            else wanted_of_unseen(problem)
        )
        # What bounds a share lets about half as many miss: what just keeps to the share on a
        # search set would be refused, and the search set would have learnt nothing.
        share = (1.0 + wanted) / 2.0
    return count - at_least(share, count)


def set_size(problem: Problem) -> int:
    """How many inputs are judged together: all that are given where a condition is on a set of
    them (a mean, a metric of all inputs), else each alone.
    """
    return len(problem.samples) if problem.requirements.of_sets else 1


def each_must_hold(problem: Problem) -> bool:
    """Whether every given input must meet the requirement by itself."""
    return problem.settings.share_of_given >= 1.0 and set_size(problem) == 1


def wanted_of_given(problem: Problem) -> float:
    """The share of the given inputs that must hold: of inputs judged together none is let miss."""
    return problem.settings.share_of_given if set_size(problem) == 1 else 1.0


def wanted_of_unseen(problem: Problem) -> float:
    """The share of unseen inputs that is asked for, or spoken of where a set is fitted.

    Where some of the given inputs need not meet the requirement no more of the unseen ones need to
    by themselves: a copy of an input that misses mostly misses too. Of inputs that are judged
    together none is let miss, but what is picked (``--pick``) is picked of their sets.
    """
    settings = problem.settings
    held = settings.share_of_given if set_size(problem) == 1 else settings.pick or 1.0
    return problem.settings.robust or min(WANTED, held)


def wanted_of_augmented(problem: Problem) -> float:
    """The share that must be a bound of the augmented inputs too: all that is asked for, where they
    are tested at all.

    Perturbed inputs say little of other inputs, and a few augmented inputs are too few: a plan for
    UniMatch that passed 190 of 192 copies and 24 of 24 augmented inputs held on 89.5 % of 200
    augmented inputs, and on 89.3 % of unseen inputs (benchmarks/results/search.md).
    """
    return wanted_of_unseen(problem) if wants_augmented(problem) else 0.0


_MOST_REMEMBERED = 1 << 14
"""So many are remembered: a kilobyte each, for what they hold is made again when it is read."""


class TestCopies:
    """The perturbed copies and augmented inputs of ``test``, made once however often they are asked
    for; more than some thousands, as inputs that are judged in sets may be, each time anew.

    ``kinds`` is the order in which a test asks for them: what refuses a plan soonest comes first.
    Those whose digests are in ``without`` are left out.
    """

    def __init__(
        self, problem: Problem, context: Context, judges: Sequence[Evaluator], test: ValidationTest
    ) -> None:
        self.test = test
        # Augmented inputs refuse more often, and what is refused need not be tested to its end.
        self.kinds = [InputKind.AUGMENTED, InputKind.PERTURBED]
        self._problem, self._context = problem, context
        self._emulated = context.engine not in judges
        self._count = test.copies * set_size(problem)
        self.without = set[str]()
        self._made: dict[InputKind, tuple[list[Sample], Iterator[Sample]]] = {}
        self._worst: dict[InputKind, float] = {}
        self._seen: dict[InputKind, int] = {}

    def of(self, kind: InputKind) -> Iterator[Sample]:
        """Those of ``kind``, perturbed or augmented inputs."""
        if self._count > _MOST_REMEMBERED:
            copied = self._copied(kind)
        else:
            if kind not in self._made:
                self._made[kind] = [], self._copied(kind)
            copied = _again(*self._made[kind])
        return (s for s in copied if s.digest not in self.without) if self.without else copied

    def hear(self, kind: InputKind, found: SearchSetResult) -> None:
        """Let what one judge passed be asked of the next one worst first: either look of a test
        counts the same copies in any order, and what will be refused is by the first few.
        """
        self._seen[kind] = len(found.results)
        self._worst[kind] = found.score()
        self.kinds.sort(key=lambda k: -self._worst.get(k, 0.0))
        samples = self._made[kind][0] if kind in self._made else []
        if len(found.results) > len(samples) or set_size(self._problem) > 1 or self.without:
            return
        scores = [r.score for r in found.results]
        order = sorted(range(len(scores)), key=lambda i: (i >= self.test.enough, -scores[i]))
        samples[: len(scores)] = [samples[i] for i in order]

    def seen(self, kind: InputKind) -> int:
        """On how many of ``kind`` a judge was heard."""
        return self._seen.get(kind, 0)

    def _copied(self, kind: InputKind) -> Iterator[Sample]:
        problem, context, stream = self._problem, self._context, self.test.stream
        if kind == InputKind.AUGMENTED:
            return augmented(problem, context, stream, self._count)
        return perturbs(problem, context, stream, self._count, emulated=self._emulated)


def _again(made: list[Sample], stream: Iterator[Sample]) -> Iterator[Sample]:
    """What was made before, and then what ``stream`` still gives."""
    place = 0
    while True:
        if place == len(made):
            following = next(stream, None)
            if following is None:
                return
            made.append(following)
        yield made[place]
        place += 1


_FEW = 0.1
"""Where strict FP32 misses on no more of the inputs, it is they that are near ties, and not the
model that is wrong."""


def missed_on(problem: Problem, evaluator: Evaluator, plan: PrecisionPlan) -> str:
    """A sentence that counts the given inputs on which ``plan`` misses the requirement, names the
    worst, and where they are few, says how to let so many miss; begins with a space. Nothing where
    one input is given or all are judged together.
    """
    count = len(problem.samples)
    if count == 1 or set_size(problem) > 1:
        return ""
    scores = [
        (found.score, sample.name)
        for sample in problem.samples
        if (found := evaluator.known(plan, sample)) is not None and not found.score <= 1.0
    ]
    if not scores:
        return ""
    said = f" It misses on {len(scores)} of {count} given inputs, most on {max(scores)[1]}."
    if len(scores) <= _FEW * count and problem.settings.share_of_given == 1.0:
        share = math.floor(100.0 * (count - len(scores)) / count) / 100.0
        said += f" If those are near ties, --allow-misses {1.0 - share:.3g} lets so many miss."
    return said
