"""Finds the layers to keep in FP32 for the given inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from bisect_trt.base.interrupt import BudgetSpentError
from bisect_trt.base.outcomes import Validation, Verdict
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.evaluate.result import Evaluation, Vector
from bisect_trt.search import find_pins
from bisect_trt.search.grow import Trial, grow
from bisect_trt.search.minimise import Headroom, one_minimal
from bisect_trt.steps.baselines import Baselines
from bisect_trt.steps.context import Context
from bisect_trt.steps.diagnosis import Triage
from bisect_trt.steps.failing_inputs import UnseenInputs
from bisect_trt.steps.problem import Problem
from bisect_trt.steps.search_set import SearchSet
from bisect_trt.steps.select_robust import RobustSearch, RobustSet, margin
from bisect_trt.steps.sensitivity import Sensitivity, suspicion_of

MAX_GROWTH_EVALUATIONS = 400

PROOF_TIME_S = 4.0
"""What asking the given inputs for proofs may usually take, beside what copies have proved."""

Ask = Callable[[Sequence[frozenset[str]]], list[Evaluation]]


@dataclass(frozen=True)
class Bisection:
    """``pinned`` passes on both emulators; ``proof`` maps pins to failing evaluations without them.

    ``limit`` is the share of the tolerance that it was searched within; ``complete`` is false if a
    pin could not be proved; ``violations`` counts pins that the search took for needed and the
    verification did not, which a monotone model cannot give. ``validation`` is what a validated
    search ended with, ``ranked`` true if the set is a prefix of the ranking.
    """

    pinned: frozenset[str]
    proof: Mapping[str, Evaluation]
    limit: float
    complete: bool
    violations: int = 0
    validation: Validation | None = None
    ranked: bool = False


def bisect(
    problem: Problem,
    context: Context,
    emulated: Baselines,
    triage: Triage,
    limit: float,
    fewest: int = 0,
) -> Bisection | None:
    """A set that both emulators pass; None where even all pins miss ``limit``."""
    if not triage.pinned.under(limit).verdict.passed:
        return None
    if triage.unseen is not None:
        return _robust(problem, context, triage, triage.unseen, limit, fewest)
    sensitivity = triage.sensitivity.under(limit)
    suspicion = suspicion_of(emulated.layers, sensitivity.scores)
    return _Search(problem, context, triage.base, limit).run(suspicion, sensitivity)


def known_strength(problem: Problem, triage: Triage) -> Mapping[str, float]:
    """What each layer does to the outputs, as a mean square; empty where no score follows it."""
    return triage.sensitivity.strength if problem.requirements.proportional else {}


def _robust(
    problem: Problem,
    context: Context,
    triage: Triage,
    unseen: UnseenInputs,
    limit: float,
    fewest: int,
) -> Bisection | None:
    strength = known_strength(problem, triage)
    room = Headroom(limit, triage.pinned.score, margin(problem, context))
    search_set = SearchSet(problem, context, triage.base, unseen.samples)
    if unseen.refused is not None:
        search_set.add(unseen.refused)
    search = RobustSearch(problem, context, search_set, triage.ranking, strength, room)
    found = search.run(fewest)
    if found is None:
        return None
    for judge in (context.evaluator, context.second):  # the tables show it on the given inputs
        judge.evaluate(triage.base.with_pins(found.pinned))
    complete = set(found.proof) == set(found.pinned)
    proof = _told_on_given(problem, context, triage.base, found)
    return Bisection(
        found.pinned, proof, found.limit, complete, validation=found.validation, ranked=found.ranked
    )


def _told_on_given(
    problem: Problem, context: Context, base: PrecisionPlan, found: RobustSet
) -> Mapping[str, Evaluation]:
    """The proofs, with worse ones on the given inputs where copies prove by a margin only.

    A pin may be all that keeps infinities from the given inputs.
    """
    weak = [name for name, result in found.proof.items() if result.score * found.limit <= 1.0]
    if len(weak) * len(problem.samples) * context.pace.usual_seconds > PROOF_TIME_S:
        return found.proof
    proof = dict(found.proof)
    with suppress(BudgetSpentError):
        for name in weak:
            without = context.evaluator.evaluate(base.with_pins(found.pinned - {name}))
            given = without.under(found.limit)
            if given.score > proof[name].score:
                proof[name] = given
    return proof


class _Search:
    """Searches with the first emulator and confirms with the second.

    ``limit`` is the share of the tolerance that a set may use: an engine that errs twice as much
    asks for a half. An older plan's pins are tried before a set is grown.
    """

    def __init__(
        self, problem: Problem, context: Context, base: PrecisionPlan, limit: float
    ) -> None:
        self._limit, self._base = limit, base
        self._begin, self._layers = problem.begin, list(problem.names)
        self._evaluator, self._second = context.evaluator, context.second

    def run(self, suspicion: Mapping[str, float], sensitivity: Sensitivity) -> Bisection:
        """Search and verify. All pins are known to pass, no pins to fail."""
        found = self._small_set(sensitivity.must_pin, suspicion, sensitivity, self._by_first)
        if not self._by_both([found])[0].verdict.passed:
            found = self._small_set(found, suspicion, sensitivity, self._by_both)
        return self._verified(found)

    def _small_set(
        self,
        start: frozenset[str],
        suspicion: Mapping[str, float],
        sensitivity: Sensitivity,
        ask: Ask,
    ) -> frozenset[str]:
        """A set that ``ask`` passes, 1-minimal by the search's certificate."""
        grown: frozenset[str] | None = self._begin
        if not self._begin or not ask([self._begin])[0].verdict.passed:
            grown = self._grown(start | self._begin, suspicion, sensitivity, ask)
        found = find_pins(
            self._layers if grown is None else [n for n in self._layers if n in grown],
            lambda pins: ask([pins])[0].verdict,
            suspicion=suspicion,
            workers=self._evaluator.workers,
        )
        return found.pinned if found.feasible else frozenset(self._layers)

    def _grown(
        self,
        start: frozenset[str],
        suspicion: Mapping[str, float],
        sensitivity: Sensitivity,
        ask: Ask,
    ) -> frozenset[str] | None:
        """A passing set grown from ``start``, None if growing stalls."""

        def evaluate(sets: Sequence[frozenset[str]]) -> list[Trial]:
            results = ask(sets)
            return [
                Trial(s, r.verdict.passed, r.score, self._vector(r))
                for s, r in zip(sets, results, strict=True)
            ]

        first = evaluate([start])[0]
        if first.vector is None and not start:
            first = Trial(start, first.passed, first.score, sensitivity.base)
        if math.isinf(first.score):
            first = evaluate([self._made_finite(suspicion) | start])[0]
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

    def _made_finite(self, suspicion: Mapping[str, float]) -> frozenset[str]:
        """The pins that are needed for finite outputs alone, whatever their error."""

        def probe(pinned: frozenset[str]) -> Verdict:
            result = self._by_first([pinned])[0]
            return Verdict.PASS if math.isfinite(result.score) else result.verdict

        workers = self._evaluator.workers
        return find_pins(self._layers, probe, suspicion=suspicion, workers=workers).pinned

    def _verified(self, pinned: frozenset[str]) -> Bisection:
        """Every removal tried, until a whole round removes nothing."""
        found = one_minimal(
            [name for name in self._layers if name in pinned],
            lambda pins: self._by_both([pins])[0],
            lambda result: result.verdict.passed,
            ahead=self._by_first,
            workers=self._evaluator.workers,
        )
        complete = self._by_both([found.pinned])[0].verdict.passed
        return Bisection(found.pinned, found.proof, self._limit, complete, found.removed)

    def _by_first(self, sets: Sequence[frozenset[str]]) -> list[Evaluation]:
        plans = [self._base.with_pins(s) for s in sets]
        return [r.under(self._limit) for r in self._evaluator.evaluate_many(plans)]

    def _by_both(self, sets: Sequence[frozenset[str]]) -> list[Evaluation]:
        """The first runner's result where it fails, else the worse of the two."""
        results = self._by_first(sets)
        passing = [r.plan for r in results if r.verdict.passed]
        second = {r.plan: r.under(self._limit) for r in self._second.evaluate_many(passing)}
        return [max(r, second.get(r.plan, r), key=lambda x: x.score) for r in results]
