"""Chooses how many new inputs a plan is validated on, and makes them.

There is one rule. A validation takes ``copies`` perturbed and as many augmented inputs that
neither the search nor another validation has used. It passes if at most ``misses`` of each kind
fail. A plan that passes on less than the wanted share of such inputs is validated with a
probability of at most ``risk``: ``copies`` is the smallest number for which the exact binomial
bound (Clopper and Pearson, 1934) with ``misses`` failures reaches the share at the confidence
``1 - risk``.

A run may validate several plans until one passes. Its 5 % risk is split over them beforehand, so
that by the union bound (Bonferroni) all of them together keep to it: the first validation gets two
thirds, and each later one half of the rest. So 95 % of the plans called *validated* hold.

Three misses are allowed where the copies for them take at most 20 s, else fewer or none. (A share
below 95 % allows more, in proportion.) With 3, 2, 1 or no misses the first validation passes 92,
85, 72 or 51 % of the plans that hold on 99 % of inputs. Where even the copies without a miss take
longer than 150 s, as many are made as fit. They bound less than the wanted share, and the verdict
is inconclusive.
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
"""The share of unseen inputs that a plan shall pass, where ``--robust`` names no other."""

MAX_TESTS = 13
"""The most validations of a search: one of everything reduced, two in each round."""

VERIFYING = 100
"""The number of the validation in ``verify``, whose stream no search uses."""

TRADEOFF = MAX_TESTS + 2
"""The stream of the trade-off curve's copies, on which no row was tuned."""

TRADEOFF_COPIES = 4
"""The fewest copies of a kind for a row of the trade-off curve."""

FIRST_RISK_SHARE = 2.0 / 3.0
"""The part of the 5 % risk that the first validation of a run takes."""


@dataclass(frozen=True)
class ValidationTest:
    """One validation: ``misses`` of ``copies`` new inputs of each kind may fail.

    ``stream`` seeds its inputs.
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
        """How many of ``tested`` inputs may fail: fewer than ``misses`` where copies ran out."""
        wanted, allowed = wanted_of_unseen(problem), 0
        while (
            allowed < self.misses and copies_needed(wanted, self.confidence, allowed + 1) <= tested
        ):
            allowed += 1
        return allowed

    def within(
        self, problem: Problem, usual_seconds: float, limit_s: float, least: int = 8
    ) -> ValidationTest:
        """The same with as many copies as take ``limit_s``, but at least ``least``."""
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
    # A smaller share needs fewer copies and expects more of them to fail.
    scale = max(1.0, (1.0 - wanted) / (1.0 - WANTED))
    limits = problem.settings.limits
    misses = 0 if problem.settings.fitted else round(limits.max_misses * scale)
    while misses and copies_needed(wanted, 1.0 - risk, misses) * seconds > limits.misses_time_s:
        misses -= 1
    # Where several graphs are validated, there may be more tests than a search has.
    stream = number + 1 + (TRADEOFF <= number + 1 < VERIFYING)
    test = ValidationTest(stream, risk, copies_needed(wanted, 1.0 - risk, misses), misses)
    if not misses:
        test = test.within(problem, usual_seconds, limits.validation_time_s)
    return test


def next_test(problem: Problem, context: Context) -> ValidationTest:
    """The next validation of a run, which is counted, so that no risk is spent twice."""
    context.tests += 1
    return planned_test(problem, context.tests - 1, context.pace.usual_seconds, last=False)


def _seconds_a_copy(problem: Problem, usual_seconds: float) -> float:
    """The time of two emulations and a reference for each input of a set, of each kind."""
    kinds = 2.0 if wants_augmented(problem) else 1.0
    return max(3.0 * usual_seconds * set_size(problem) * kinds, 1e-6)


class ValidationCopies:
    """The new inputs of ``test``, made once, but those whose digests are in ``without``."""

    # Augmented inputs come first: they refuse plans more often, which ends a test.
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
        """The inputs of ``kind``, perturbed or augmented."""
        made = self._made[kind] if kind in self._made else self._new(kind)
        self._made[kind], copies = tee(made)
        rest = (sample for sample in copies if sample.digest not in self.without)
        return islice(rest, self.test.copies * set_size(self._problem))

    def _new(self, kind: InputKind) -> Iterator[Sample]:
        problem, context, stream = self._problem, self._context, self.test.stream
        count = self.test.copies * set_size(problem)
        if kind == InputKind.AUGMENTED:
            return augmented(problem, context, stream, count)
        return perturbs(problem, context, stream, count, emulated=self._emulated)


def spared(problem: Problem, kind: InputKind, count: int) -> int:
    """How many of ``count`` samples of ``kind`` may fail in a search."""
    if set_size(problem) > 1:
        count //= set_size(problem)
    if kind == InputKind.GIVEN:
        return count - at_least(wanted_of_given(problem), count)
    # A validation bounds the share, so that about half as many may fail there. A plan that just
    # keeps the share on the search set would be refused.
    of_augmented = kind == InputKind.AUGMENTED
    wanted = wanted_of_augmented(problem) if of_augmented else wanted_of_unseen(problem)
    return count - at_least((1.0 + wanted) / 2.0, count)


def set_size(problem: Problem) -> int:
    """How many inputs are judged together: all where a requirement is on a set, else one."""
    return len(problem.samples) if problem.requirements.of_sets else 1


def each_must_hold(problem: Problem) -> bool:
    """Whether each given input must meet the requirement by itself."""
    return problem.settings.share_of_given >= 1.0 and set_size(problem) == 1


def wanted_of_given(problem: Problem) -> float:
    """The share of the given inputs that must pass: all where they are judged together."""
    return problem.settings.share_of_given if set_size(problem) == 1 else 1.0


def wanted_of_unseen(problem: Problem) -> float:
    """The share of unseen inputs that must pass, or is reported where the plan is fitted."""
    settings = problem.settings
    # Copies of an input that fails mostly fail too, so that their share cannot be larger.
    of_given = settings.share_of_given if set_size(problem) == 1 else 1.0
    return settings.robust or min(WANTED, of_given)


def wanted_of_augmented(problem: Problem) -> float:
    """The share of augmented inputs that must pass; 0 where they are not tested."""
    return wanted_of_unseen(problem) if wants_augmented(problem) else 0.0


def missed_on(problem: Problem, evaluator: Evaluator, plan: PrecisionPlan) -> str:
    """A sentence, after a space, that counts the given inputs on which ``plan`` fails.

    It is empty where none has failed yet, one input is given, or all are judged together.
    """
    count = len(problem.samples)
    if count == 1 or set_size(problem) > 1:
        return ""
    results = ((evaluator.known(plan, sample), sample.name) for sample in problem.samples)
    failed = [(r.score, name) for r, name in results if r is not None and not r.score <= 1.0]
    if not failed:
        return ""
    sentence = f" It misses on {len(failed)} of {count} given inputs, most on {max(failed)[1]}."
    # A few failures are often near ties of a decision, and not wrong numbers.
    if len(failed) <= count / 10.0 and problem.settings.share_of_given == 1.0:
        share = math.floor(100.0 * (count - len(failed)) / count) / 100.0
        sentence += f" If those are near ties, --allow-misses {1.0 - share:.3g} lets so many miss."
    return sentence
