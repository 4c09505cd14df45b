"""Confirms a plan on the engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bisect_trt.base.outcomes import Validation
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.evaluate.evaluator import Evaluator
from bisect_trt.evaluate.result import Evaluation
from bisect_trt.runners.base import Anticipating
from bisect_trt.search.minimise import (
    SCALED_MARGIN,
    Headroom,
    matching_limit,
    one_minimal,
    tightened,
)
from bisect_trt.search.prefix import longer
from bisect_trt.steps.baselines import Baselines
from bisect_trt.steps.context import Context
from bisect_trt.steps.diagnosis import Triage
from bisect_trt.steps.engine_baselines import EngineBaselines
from bisect_trt.steps.engine_diagnosis import begin_further
from bisect_trt.steps.open_runners import begin, give_up
from bisect_trt.steps.problem import Problem
from bisect_trt.steps.search_set import Refusal
from bisect_trt.steps.select_fitted import Bisection, bisect, known_strength
from bisect_trt.steps.select_robust import MARGIN, as_searched
from bisect_trt.steps.sensitivity import suspicion_of
from bisect_trt.steps.tradeoff import measure_tradeoff
from bisect_trt.steps.validation import put_to_test
from bisect_trt.steps.validation_inputs import (
    MAX_TESTS,
    TestCopies,
    next_test,
    planned_test,
    set_size,
)


def use_build_wait(problem: Problem, context: Context, triage: Triage, plan: PrecisionPlan) -> None:
    """Compute the references of the copies that the engine of ``plan`` will be tested on, and its
    tradeoff: RT-DETR's engine is built in 20 s, and these take 15.

    Nothing where no engine is built beside this process, or the run's time is limited: the search
    comes first then.
    """
    engine, opened = context.engine, context.opened
    if engine is None or not isinstance(opened, Anticipating) or not opened.builds_ahead:
        return
    known = engine.knows(context.plan_for(engine, plan))
    if known or not engine.new_evaluations or math.isfinite(context.time.left_s):
        return
    if context.tests < MAX_TESTS:
        test = planned_test(problem, context.tests, context.pace.usual_seconds, last=False)
        copies = TestCopies(problem, context, [engine], test)
        for kind in copies.kinds:
            for _ in copies.of(kind):
                pass
    measure_tradeoff(problem, context, triage.base, triage.ranking, plan)


DEFAULT_MAX_BUILDS = 8
MAX_SEARCHES = 4
WORTHWHILE = 1.2
"""How much wider a limit must be to be worth another search and build."""


@dataclass(frozen=True)
class Judgement:
    """The engine's word on a plan. ``bisection`` is the search the plan came from, ``repaired`` the
    pins the engine added.

    ``builds`` counts those beyond the baselines. ``proof`` maps a pin to the engine's evaluation
    that failed without it, where ``--certify engine`` asked for that. ``validation`` is the test on
    fresh copies that the plan passed on the engine, if there was one, and ``refused`` says that it
    did not pass it.
    """

    plan: PrecisionPlan
    result: Evaluation
    bisection: Bisection | None
    builds: int
    repaired: frozenset[str]
    proof: dict[str, Evaluation]
    out_of_budget: bool
    validation: Validation | None = None
    refused: bool = False

    @property
    def passed(self) -> bool:
        """True if the engine built from the plan meets the requirements."""
        return self.result.verdict.passed

    @property
    def limit(self) -> float:
        """The share of the tolerance that the emulator had to keep to."""
        return self.bisection.limit if self.bisection is not None else 1.0


class OutOfBuildsError(Exception):
    """The budget of builds is spent."""


@dataclass(frozen=True)
class Emulated:
    """What the emulators do for a judge.

    ``search`` gives their answer within a share of the tolerance, None where even all pins miss it
    there; ``score`` scores a set of pins on the given inputs, ``score_on_perturbed`` is its largest
    score over the copies that the search was made with, None without any. ``meanwhile`` is called
    with a set that was searched for and will be built next.
    """

    search: Callable[[float], Bisection | None]
    score: Callable[[frozenset[str]], float]
    score_on_perturbed: Callable[[frozenset[str]], float] | None = None
    meanwhile: Callable[[frozenset[str]], None] = lambda _: None


class EngineJudge:
    """Decides with ``engine``."""

    def __init__(
        self,
        engine: Evaluator,
        base: PrecisionPlan,
        ranked: Sequence[str],
        emulated: Emulated,
        floors: tuple[float, float],
        max_builds: int | None = None,
        certify: bool = False,
        tested: Callable[[frozenset[str]], Validation | None] | None = None,
    ) -> None:
        self._emulated = emulated
        self._floors = floors
        self._tested = tested
        self._validation: dict[frozenset[str], Validation | None] = {}
        self._engine = engine
        self._base = base.with_pins_in(Precision.FP32)
        self._ranked = list(ranked)
        self._certify = certify
        unbounded = math.inf if certify else DEFAULT_MAX_BUILDS
        self._max_builds = max_builds if max_builds is not None else unbounded
        self._tried: dict[frozenset[str], Evaluation] = {}
        self._bisection: Bisection | None = None

    def decide(self, limit: float) -> Judgement:
        """Search within ``limit`` of the tolerance, build, and go on until the engine passes or the
        budget is spent.
        """
        pins: frozenset[str] = frozenset()
        proof: dict[str, Evaluation] = {}
        spent = False
        try:
            for _ in range(MAX_SEARCHES):
                found = self._emulated.search(limit)
                if found is None or found.pinned in self._tried:
                    break
                self._bisection, pins = found, found.pinned
                result = self._build(pins, self._emulated.meanwhile)
                if result.verdict.passed and self._is_no_luck(pins):
                    pins = self._shrunk(pins, limit)
                    break
                limit = self._next_limit(limit, pins, result)
            if pins not in self._tried or not self._tried[pins].verdict.passed:
                pins = self._repaired(pins)
                if self._tried[pins].verdict.passed:
                    self._is_no_luck(pins)
            if self._certify and self._tried[pins].verdict.passed:
                pins, proof = self._certified(pins)
        except OutOfBuildsError:
            spent = True
        answer = self._so_far(out_of_budget=spent)
        return answer if answer.plan.chosen != pins else replace(answer, proof=proof)

    def _so_far(self, out_of_budget: bool) -> Judgement:
        """The best plan tried until now, proofs apart: the smallest that passed, else the one that
        missed least (none tried: all pins' baseline).
        """
        if not self._tried:
            everything = frozenset(self._ranked)
            self._tried[everything] = self._engine.evaluate(self._base.with_pins(everything))
        passed = [(pins, r) for pins, r in self._tried.items() if r.verdict.passed]
        sure = [(pins, r) for pins, r in passed if self._validation.get(pins) is not None]
        if sure:
            answer, result = min(sure, key=lambda x: len(x[0]))
        elif any(pins not in self._validation for pins, _ in passed):
            untested = [(pins, r) for pins, r in passed if pins not in self._validation]
            answer, result = min(untested, key=lambda x: len(x[0]))
        elif passed:  # all by luck: the most pins have the least of it
            answer, result = max(passed, key=lambda x: len(x[0]))
        else:
            answer, result = min(self._tried.items(), key=lambda x: x[1].score)
        found = self._bisection
        added = answer - found.pinned if found is not None else answer
        plan, builds = self._base.with_pins(answer), len(self._tried)
        validation = self._validation.get(answer)
        refused = answer in self._validation and validation is None
        return Judgement(plan, result, found, builds, added, {}, out_of_budget, validation, refused)

    def _is_no_luck(self, pins: frozenset[str]) -> bool:
        """Whether new copies on the engine do not refuse ``pins``, which pass the given inputs."""
        if self._tested is None:
            return True
        if pins not in self._validation:
            self._validation[pins] = self._tested(pins)
        return self._validation[pins] is not None

    def _next_limit(self, limit: float, pins: frozenset[str], result: Evaluation) -> float:
        """The share of the tolerance to search within after ``pins`` missed.

        Where the engine's score has a place among the emulated copies', it is one more draw, and
        the next set only has to be a little larger; beyond all of them the two differ.
        """
        on_perturbed = self._emulated.score_on_perturbed
        one_of_them = on_perturbed is not None and result.score <= on_perturbed(pins)
        if result.verdict.passed or one_of_them:
            return Headroom(limit, self._floors[0], SCALED_MARGIN).kept
        return tightened(limit, result.score, self._emulated.score(pins), self._floors)

    def _build(
        self, pins: frozenset[str], meanwhile: Callable[[frozenset[str]], None] = lambda _: None
    ) -> Evaluation:
        if pins not in self._tried:
            if len(self._tried) >= self._max_builds:
                raise OutOfBuildsError
            meanwhile(pins)
            self._tried[pins] = self._engine.evaluate(self._base.with_pins(pins))
        return self._tried[pins]

    def _repaired(self, pins: frozenset[str]) -> frozenset[str]:
        """``pins`` and the fewest further layers, in order of suspicion, with which the engine
        passes: galloping, then bisecting.
        """
        rest = [name for name in self._ranked if name not in pins]
        low, high = 0, max(2, len(pins) // 4)
        while high < len(rest) and not self._build(pins | frozenset(rest[:high])).verdict.passed:
            low, high = high, 4 * high
        high = min(high, len(rest))
        if not self._build(pins | frozenset(rest[:high])).verdict.passed:
            return pins | frozenset(rest)  # not even with all of them
        while high - low > max(1, high // 8):
            middle = (low + high) // 2
            if self._build(pins | frozenset(rest[:middle])).verdict.passed:
                high = middle
            else:
                low = middle
        return pins | frozenset(rest[:high])

    def _shrunk(self, pins: frozenset[str], limit: float) -> frozenset[str]:
        """A smaller set that passes too: searched for within more of the tolerance, where the
        engine left much of it unused.
        """
        for _ in range(MAX_SEARCHES):
            emulated = self._emulated.score(pins)
            wider = matching_limit(self._tried[pins].score, emulated, self._floors)
            if wider > WORTHWHILE * limit:  # what is built is known to fail from somewhere on
                failing = min(self._emulated.score(p) for p in self._refused())
                wider = min(wider, Headroom(failing, self._floors[0], SCALED_MARGIN).kept)
            worthwhile = wider > WORTHWHILE * limit and len(self._tried) < self._max_builds
            found = self._emulated.search(wider) if worthwhile else None
            if found is None or len(found.pinned) >= len(pins):
                break
            if not self._build(found.pinned, self._emulated.meanwhile).verdict.passed:
                break
            if not self._is_no_luck(found.pinned):
                break
            self._bisection, pins, limit = found, found.pinned, wider
        return pins

    def _refused(self) -> list[frozenset[str]]:
        """The sets that the engine, or its new copies, refused; no pins among them: these fail
        wherever there is something to search.
        """
        tried = self._tried.items()
        failed = [pins for pins, result in tried if not result.verdict.passed]
        by_luck = [pins for pins, validation in self._validation.items() if validation is None]
        return [frozenset(), *failed, *by_luck]

    def _certified(self, pins: frozenset[str]) -> tuple[frozenset[str], dict[str, Evaluation]]:
        """Each removal built: superfluous pins go, until a whole round finds none."""

        def ahead(sets: list[frozenset[str]]) -> None:
            self._engine.evaluate_many([self._base.with_pins(s) for s in sets])

        found = one_minimal(
            [name for name in reversed(self._ranked) if name in pins],
            self._build,
            lambda result: (
                result.verdict.passed and self._is_no_luck(result.plan.pinned - self._base.held)
            ),
            ahead=ahead if math.isinf(self._max_builds) else None,  # idle GPUs build the next ones
            workers=self._engine.workers,
        )
        # A set that only new copies refuse is no proof on the given inputs.
        proof = {name: r for name, r in found.proof.items() if not r.verdict.passed}
        return found.pinned, proof


def decide_on_engine(
    problem: Problem,
    context: Context,
    engine: Evaluator,
    emulated: Baselines,
    baselines: EngineBaselines,
    triage: Triage,
    first: Bisection | None,
) -> Judgement:
    """The engine's word, searching again and repairing until it passes or the budget is spent.

    The emulators' word on the answer is in the log too when this returns.
    """
    suspicion = suspicion_of(emulated.layers, triage.sensitivity.scores)
    robust = triage.unseen is not None and problem.settings.pick is None
    emulators = _Emulators(problem, context, engine, emulated, triage, first)

    def meanwhile(pins: frozenset[str]) -> None:
        use_build_wait(problem, context, triage, triage.base.with_pins(pins))

    def tested(pins: frozenset[str]) -> Validation | None:
        if context.tests >= MAX_TESTS:  # no confidence is left to spend
            return None
        test = next_test(problem, context)
        plan = triage.base.with_pins(pins)
        refused, validation = put_to_test(problem, context, [engine], plan, test, 1.0)
        if refused is not None:
            emulators.hear_refused(pins, refused)
        return validation

    asked = Emulated(emulators.search, emulators.score)
    if robust:
        asked = replace(asked, score_on_perturbed=emulators.score_on_perturbed, meanwhile=meanwhile)
    judge = EngineJudge(
        engine,
        triage.base,
        sorted(problem.names, key=lambda n: -suspicion.get(n, -math.inf)),
        asked,
        (triage.pinned.score, baselines.pinned.score),
        problem.settings.max_builds,
        problem.settings.certify == "engine",
        tested if robust else None,
    )
    judgement = judge.decide(triage.limit)
    emulators.score(judgement.plan.pinned)
    return judgement


_NEXT_TO_NOTHING = 0.01
"""Of the tolerance."""


class _Emulators:
    """What the emulators say of sets, and their answers within shares of the tolerance: each is
    built next, and has as many pins as what new copies on the engine refused asks for.
    """

    def __init__(
        self,
        problem: Problem,
        context: Context,
        engine: Evaluator,
        emulated: Baselines,
        triage: Triage,
        first: Bisection | None,
    ) -> None:
        self._problem, self._context, self._engine = problem, context, engine
        self._emulated, self._triage = emulated, triage
        self._fewest = self._refusals = 0
        self._in_vain = False
        self._known = {(triage.limit, 0): first}

    def score(self, pins: frozenset[str]) -> float:
        """The worse score on the given inputs."""
        plan = self._triage.base.with_pins(pins)
        return max(p.evaluate(plan).score for p in (self._context.evaluator, self._context.second))

    def score_on_perturbed(self, pins: frozenset[str]) -> float:
        """The largest score over the given inputs and the copies that were searched with."""
        assert self._triage.unseen is not None
        known = self._triage.unseen.samples
        plan, size = self._triage.base.with_pins(pins), set_size(self._problem)
        found = self._context.evaluator.judge(plan, (*known.given, *known.perturbed), size=size)
        return found.worst[1]

    def search(self, limit: float) -> Bisection | None:
        """The answer within ``limit``; None where even all pins miss it, or would do no better on
        what refused the last one.
        """
        if self._in_vain:
            return None
        context, triage, asked = self._context, self._triage, (limit, self._fewest)
        if asked not in self._known:
            self._known[asked] = bisect(self._problem, context, self._emulated, triage, *asked)
        found = self._known[asked]
        if found is not None:  # if it is the answer, it is run in more processes
            answer = context.plan_for(self._engine, triage.base.with_pins(found.pinned))
            give_up(context.opened, answer)
            begin_further(context, answer)
            if found.ranked:
                self._begin_next(found.pinned)
        return found

    def _begin_next(self, pins: frozenset[str]) -> None:
        """Begin the engine of the set that follows if new copies refuse ``pins``, as it mostly is:
        ViT-L's are refused twice, and waiting for each of its engines takes ten seconds.
        """
        plan = self._first(self._longer(pins, 1.0))
        if self._engine.new_evaluations and not self._engine.knows(plan):
            begin(self._context.opened, plan, spare=True)

    def _longer(self, pins: frozenset[str], share: float) -> int:
        """How many of the ranking to go on with if ``pins`` are refused and may leave ``share``."""
        known = known_strength(self._problem, self._triage)
        ranking = as_searched(self._problem, self._triage.ranking)
        strength = [known.get(name, 0.0) for name in ranking]
        return longer(strength, len(pins), share, 2**self._refusals)

    def _first(self, count: int) -> PrecisionPlan:
        """The first so many of the ranking pinned, as the engine takes it."""
        pins = frozenset(as_searched(self._problem, self._triage.ranking)[:count])
        return self._context.plan_for(self._engine, self._triage.base.with_pins(pins))

    def hear_refused(self, pins: frozenset[str], refused: Refusal) -> None:
        """Hear what spoke against the engine of ``pins``: a set of no more pins would cost another
        build and be refused as well.
        """
        self._in_vain = self._in_vain or self._do_as_all_pins(pins, refused.samples)
        self._fewest = max(self._fewest, self._longer(pins, MARGIN / refused.score))
        self._refusals += 1
        give_up(self._context.opened, self._first(self._fewest))

    def _do_as_all_pins(self, pins: frozenset[str], samples: Sequence[Sample]) -> bool:
        """Whether all pins leave as much of the error of ``samples`` as ``pins`` do, by the
        emulator: then no further pins can save them. RT-DETR's engine was built with 1,339 and
        1,349 pins after it was refused with 1,217, by copies on which those make no difference.
        """
        if not self._problem.requirements.proportional:  # nobody knows how far its jumps are
            return False
        base, size = self._triage.base, set_size(self._problem)
        plans = (base.with_pins(pins), base.with_pins(self._problem.names))
        some, every = (self._context.evaluator.judge(p, samples, size=size).results for p in plans)
        return all(s.score <= e.score + _NEXT_TO_NOTHING for s, e in zip(some, every, strict=True))
