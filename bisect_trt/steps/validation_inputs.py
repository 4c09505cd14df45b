"""How many new inputs a plan is validated on, and those inputs.

There is one rule. A validation is made of ``copies`` perturbed and as many augmented inputs that
neither the search nor another validation has used; it is passed if at most ``misses`` of either
kind fail. A plan that holds on less than the wanted share of such inputs passes with a probability
of ``risk`` at most: ``copies`` is the smallest number for which the exact binomial bound (Clopper
and Pearson, 1934) with ``misses`` failures reaches the share at the confidence ``1 - risk``.

A run may validate several plans until one passes. Its 5 % risk is split over them beforehand, so
that by the union bound (Bonferroni) all of them together keep to it: the first validation gets two
thirds, and each one after it half of what is left. So 95 % of the plans called *validated* hold.

Three misses (of a share below 95 % more, in proportion to what may miss) are let pass where the
copies for that usually take no more than 20 s, else fewer, or none: of plans that hold on 99 % of
inputs the first validation then passes 92, 85, 72 or 51 %. A model so slow that even the copies
without a miss take longer than 150 s gets as many as fit. They bound less than the wanted share,
and the verdict is inconclusive.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, tee

from bisect_trt.base.outcomes import CONFIDENCE, InputKind, at_least
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.evaluate.evaluator import Evaluator
from bisect_trt.metrics.statistics import copies_needed
from bisect_trt.steps.context import Context
from bisect_trt.steps.problem import Problem
from bisect_trt.steps.samples import augmented, perturbs, wants_augmented

WANTED = 0.95
"""The share of unseen inputs that a plan shall hold on, where nobody asks for another."""

MAX_TESTS = 13
"""The most validations of a run before it decides: one of everything reduced, two a round."""

VERIFYING = 100
"""The number of a validation that no search has made: its copies are no other's."""

TRADEOFF = MAX_TESTS + 2
"""The stream of the trade-off curve's copies: no row was tuned on them."""

TRADEOFF_COPIES = 4
"""Copies of a kind for each row of the slowest model's trade-off curve."""

FIRST_RISK_SHARE = 2.0 / 3.0
"""The part of the 5 % risk that the first validation of a run takes."""

MAX_MISSES = 3
"""How many copies of a kind may fail in a quick model's validation."""

MISSES_TIME_S = 20.0
"""How long the copies may take that each further miss asks for."""

VALIDATION_TIME_S = 150.0
"""How long the copies of a slow model may take; fewer bound less than the wanted share."""

REFUSED_TIME_S = 25.0
"""Time to measure how badly a plan does that cannot be validated any more."""


@dataclass(frozen=True)
class ValidationTest:
    """One validation: on ``copies`` new inputs of each kind, at most ``misses`` of which may fail.

    ``stream`` is the number that its inputs are made from.
    """

    stream: int
    risk: float
    copies: int
    misses: int

    @property
    def confidence(self) -> float:
        """The confidence of its bounds."""
        return 1.0 - self.risk

    def may_miss(self, problem: Problem, tested: int) -> int:
        """How many of ``tested`` inputs may fail, where no more could be made."""
        if problem.settings.pick is not None:
            return tested - at_least(problem.settings.pick, tested)
        wanted, most = wanted_of_unseen(problem), 0
        while most < self.misses and copies_needed(wanted, self.confidence, most + 1) <= tested:
            most += 1
        return most

    def within(
        self, problem: Problem, usual_seconds: float, limit_s: float, least: int = 8
    ) -> ValidationTest:
        """The same with no more copies than usually take ``limit_s``, but with ``least``."""
        copies = max(least, limit_s / _seconds_a_copy(problem, usual_seconds))
        return self if copies >= self.copies else replace(self, copies=int(copies), misses=0)


def planned_test(
    problem: Problem, number: int, usual_seconds: float, *, last: bool
) -> ValidationTest:
    """The validation of a run with this ``number`` (from 0); ``last`` if it is the only one."""
    risk = 1.0 - CONFIDENCE
    if not last:
        risk *= FIRST_RISK_SHARE if number == 0 else (1.0 - FIRST_RISK_SHARE) / 2.0**number
    wanted, seconds = wanted_of_unseen(problem), _seconds_a_copy(problem, usual_seconds)
    # Of a smaller share more may miss: with three misses of a few inputs hardly a plan would pass.
    more = max(1.0, (1.0 - wanted) / (1.0 - WANTED))
    misses = 0 if problem.settings.fitted else round(MAX_MISSES * more)
    while misses and copies_needed(wanted, 1.0 - risk, misses) * seconds > MISSES_TIME_S:
        misses -= 1
    test = ValidationTest(number + 1, risk, copies_needed(wanted, 1.0 - risk, misses), misses)
    if not misses:
        test = test.within(problem, usual_seconds, VALIDATION_TIME_S)
    if problem.settings.pick is None:
        return test
    # What is picked has to hold on that share of the copies, and not to bound it.
    return replace(test, misses=test.copies - at_least(problem.settings.pick, test.copies))


def next_test(problem: Problem, context: Context) -> ValidationTest:
    """The next validation of a run, which counts it: no two steps get one risk."""
    context.tests += 1
    return planned_test(problem, context.tests - 1, context.pace.usual_seconds, last=False)


def _seconds_a_copy(problem: Problem, usual_seconds: float) -> float:
    """Two emulations and a reference for each input of a set, of each kind."""
    kinds = 2.0 if wants_augmented(problem) else 1.0
    return max(3.0 * usual_seconds * set_size(problem) * kinds, 1e-6)


class ValidationCopies:
    """The new inputs of ``test``, made once however often they are asked for.

    Those whose digests are in ``without`` are left out.
    """

    # Augmented inputs refuse more often, and what is refused need not be tested to its end.
    kinds = (InputKind.AUGMENTED, InputKind.PERTURBED)

    def __init__(
        self, problem: Problem, context: Context, judges: Sequence[Evaluator], test: ValidationTest
    ) -> None:
        self.test = test
        self.without = set[str]()
        self._problem, self._context = problem, context
        self._emulated = context.engine not in judges
        self._made: dict[InputKind, Iterator[Sample]] = {}

    def of(self, kind: InputKind) -> Iterator[Sample]:
        """Those of ``kind``, perturbed or augmented inputs."""
        made = self._made[kind] if kind in self._made else self._new(kind)
        self._made[kind], copies = tee(made)
        left = (sample for sample in copies if sample.digest not in self.without)
        return islice(left, self.test.copies * set_size(self._problem))

    def _new(self, kind: InputKind) -> Iterator[Sample]:
        problem, context, stream = self._problem, self._context, self.test.stream
        count = self.test.copies * set_size(problem)
        if kind == InputKind.AUGMENTED:
            return augmented(problem, context, stream, count)
        return perturbs(problem, context, stream, count, emulated=self._emulated)


def spared(problem: Problem, kind: InputKind, count: int) -> int:
    """How many of ``count`` samples of ``kind`` may miss the requirement in a search."""
    if set_size(problem) > 1:
        count //= set_size(problem)
    if problem.settings.pick is not None:
        return count - at_least(problem.settings.pick, count)
    if kind == InputKind.GIVEN:
        return count - at_least(wanted_of_given(problem), count)
    # A validation bounds the share, and lets about half as many miss. What just kept to the share
    # on the search set would be refused there, and the search would have learnt nothing.
    augmented_kind = kind == InputKind.AUGMENTED
    wanted = wanted_of_augmented(problem) if augmented_kind else wanted_of_unseen(problem)
    return count - at_least((1.0 + wanted) / 2.0, count)


def set_size(problem: Problem) -> int:
    """How many inputs are judged together: all where a condition is on a set of them, else one."""
    return len(problem.samples) if problem.requirements.of_sets else 1


def each_must_hold(problem: Problem) -> bool:
    """Whether every given input must meet the requirement by itself."""
    return problem.settings.share_of_given >= 1.0 and set_size(problem) == 1


def wanted_of_given(problem: Problem) -> float:
    """The share of the given inputs that must hold: all where they are judged together."""
    return problem.settings.share_of_given if set_size(problem) == 1 else 1.0


def wanted_of_unseen(problem: Problem) -> float:
    """The share of unseen inputs that is asked for, or spoken of where a set is fitted."""
    settings = problem.settings
    # A copy of an input that misses mostly misses too: no more is asked of copies than of inputs.
    held = settings.share_of_given if set_size(problem) == 1 else settings.pick or 1.0
    return problem.settings.robust or min(WANTED, held)


def wanted_of_augmented(problem: Problem) -> float:
    """The share of augmented inputs that is asked for; 0 where they are not tested."""
    return wanted_of_unseen(problem) if wants_augmented(problem) else 0.0


def missed_on(problem: Problem, evaluator: Evaluator, plan: PrecisionPlan) -> str:
    """A sentence that counts the given inputs on which ``plan`` misses, after a space.

    Empty where none is known to miss, one input is given, or all are judged together.
    """
    count = len(problem.samples)
    if count == 1 or set_size(problem) > 1:
        return ""
    known = ((evaluator.known(plan, sample), sample.name) for sample in problem.samples)
    scores = [(f.score, name) for f, name in known if f is not None and not f.score <= 1.0]
    if not scores:
        return ""
    said = f" It misses on {len(scores)} of {count} given inputs, most on {max(scores)[1]}."
    # On so few it is they that are near ties, and not the model that is wrong.
    if len(scores) <= count / 10.0 and problem.settings.share_of_given == 1.0:
        share = math.floor(100.0 * (count - len(scores)) / count) / 100.0
        said += f" If those are near ties, --allow-misses {1.0 - share:.3g} lets so many miss."
    return said
