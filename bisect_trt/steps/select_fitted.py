"""Finds the layers to keep in FP32 for the given inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bisect_trt.base.outcomes import Validation, Verdict
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.evaluate.result import Evaluation, Vector
from bisect_trt.search import find_pins
from bisect_trt.search.grow import Trial, grow
from bisect_trt.search.minimise import one_minimal
from bisect_trt.steps.context import Context
from bisect_trt.steps.problem import Problem
from bisect_trt.steps.sensitivity import Sensitivity

MAX_GROWTH_EVALUATIONS = 400
"""The most evaluations in which a set is grown before the search does without it."""

Judge = Callable[[Sequence[frozenset[str]]], list[Evaluation]]


@dataclass(frozen=True)
class Bisection:
    """``pinned`` passes on both emulators; ``proof`` maps pins to failing evaluations without them.

    ``limit``: the share of the tolerance that the set was searched within.
    ``complete``: whether every pin is proved.
    ``violations``: pins that the search needed and the verification did not, none in a monotone
    model.
    ``validation``: the one that a validated search ended with.
    ``ranked``: whether the set is a prefix of ``ranking``, along which the search went.
    """

    pinned: frozenset[str]
    proof: Mapping[str, Evaluation]
    limit: float
    complete: bool
    violations: int = 0
    validation: Validation | None = None
    ranked: bool = False
    ranking: tuple[str, ...] = ()


class FittedSearch:
    """Searches with the first emulator and confirms with the second, on the given inputs.

    ``limit``: the share of the tolerance that a set may use.
    """

    def __init__(
        self,
        problem: Problem,
        context: Context,
        base: PrecisionPlan,
        limit: float,
        suspicion: Mapping[str, float],
        sensitivity: Sensitivity,
    ) -> None:
        self._base, self._limit = base, limit
        self._begin, self._layers = problem.begin, list(problem.names)
        self._evaluator, self._second = context.evaluator, context.second
        self._suspicion, self._sensitivity = suspicion, sensitivity

    def run(self) -> Bisection:
        """Search and verify. All pins are known to pass, no pins to fail."""
        found = self._small_set(self._sensitivity.must_pin, self._by_first)
        # The second emulator opens a session for each plan, so it judges the first one's answer.
        if not self._by_both([found])[0].verdict.passed:
            found = self._small_set(found, self._by_both)
        return self._verified(found)

    def _small_set(self, start: frozenset[str], judge: Judge) -> frozenset[str]:
        """A set that ``judge`` passes, 1-minimal by the search's certificate."""
        # An older plan that still passes need not be grown.
        grown: frozenset[str] | None = self._begin
        if not self._begin or not judge([self._begin])[0].verdict.passed:
            grown = self._grown(start | self._begin, judge)
        found = find_pins(
            self._layers if grown is None else [n for n in self._layers if n in grown],
            lambda pins: judge([pins])[0].verdict,
            suspicion=self._suspicion,
            workers=self._evaluator.workers,
        )
        return found.pinned if found.feasible else frozenset(self._layers)

    def _grown(self, start: frozenset[str], judge: Judge) -> frozenset[str] | None:
        """A passing set grown from ``start``, None if growing stalls."""
        sensitivity = self._sensitivity

        def evaluate(sets: Sequence[frozenset[str]]) -> list[Trial]:
            return [
                Trial(s, r.verdict.passed, r.score, self._vector(r))
                for s, r in zip(sets, judge(sets), strict=True)
            ]

        first = evaluate([start])[0]
        if first.vector is None and not start:
            # The sensitivities were measured with the errors of everything reduced.
            first = Trial(start, first.passed, first.score, sensitivity.base)
        if math.isinf(first.score):
            # Infinite errors predict nothing: the pins that finite outputs need come first.
            first = evaluate([self._made_finite() | start])[0]
        grown = grow(
            first,
            sensitivity.sensitivities,
            sensitivity.order,
            evaluate,
            max_trials=MAX_GROWTH_EVALUATIONS,
        )
        return grown.pinned if grown.passed else None

    def _vector(self, result: Evaluation) -> Vector | None:
        """The signed errors behind ``result``, in units of what a set may use."""
        evaluator = self._second if result.runner == self._second.runner.name else self._evaluator
        found = evaluator.vector(result.plan)
        return None if found is None else found / np.float32(self._limit)

    def _made_finite(self) -> frozenset[str]:
        """The pins that finite outputs need, whatever their error."""

        def outcome(pinned: frozenset[str]) -> Verdict:
            result = self._by_first([pinned])[0]
            return Verdict.PASS if math.isfinite(result.score) else result.verdict

        workers = self._evaluator.workers
        return find_pins(self._layers, outcome, suspicion=self._suspicion, workers=workers).pinned

    def _verified(self, pinned: frozenset[str]) -> Bisection:
        """The set after every removal was tried, until a whole round removes nothing."""
        found = one_minimal(
            [name for name in self._layers if name in pinned],
            lambda pins: self._by_both([pins])[0],
            lambda result: result.verdict.passed,
            ahead=self._by_first,  # on several workers at once
            workers=self._evaluator.workers,
        )
        complete = self._by_both([found.pinned])[0].verdict.passed
        return Bisection(found.pinned, found.proof, self._limit, complete, found.removed)

    def _by_first(self, sets: Sequence[frozenset[str]]) -> list[Evaluation]:
        plans = [self._base.with_pins(s) for s in sets]
        return [r.under(self._limit) for r in self._evaluator.evaluate_many(plans)]

    def _by_both(self, sets: Sequence[frozenset[str]]) -> list[Evaluation]:
        """The first emulator's result where it fails, else the worse of the two."""
        results = self._by_first(sets)
        # What the first one fails needs no second opinion, which costs a session.
        passing = [r.plan for r in results if r.verdict.passed]
        second = {r.plan: r.under(self._limit) for r in self._second.evaluate_many(passing)}
        return [max(r, second.get(r.plan, r), key=lambda x: x.score) for r in results]
