"""Confirms a plan on the engine: searches, builds, and adds pins until the engine passes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from bisect_trt.base.outcomes import Candidate, InputKind, Validation
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.evaluate.evaluator import Evaluator
from bisect_trt.evaluate.result import Evaluation
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
from bisect_trt.steps.problem import Problem
from bisect_trt.steps.search_set import Refusal
from bisect_trt.steps.select_fitted import Bisection
from bisect_trt.steps.select_robust import MARGIN, as_searched, bisect, known_strength
from bisect_trt.steps.sensitivity import suspicion_of
from bisect_trt.steps.validation import validate_next
from bisect_trt.steps.validation_inputs import MAX_TESTS, set_size

MAX_SEARCHES = 4
"""The most searches by emulation, and the most further ones for fewer pins."""

WORTHWHILE = 1.2
"""The ratio of a wider limit to the present one that is worth another search and build."""


@dataclass(frozen=True)
class Judgement:
    """The engine's evaluation of a plan, after ``builds`` engines beyond the baselines.

    ``bisection`` is the search that gave the plan, and the engine needed the pins ``repaired``
    besides. With ``--certify engine``, ``proof`` maps each pin to the evaluation that failed
    without it. ``validation`` is the plan's on the engine; new inputs ``refused`` it otherwise.
    ``candidates`` are the plans that were timed beside each other, itself among them.
    """

    plan: PrecisionPlan
    result: Evaluation
    bisection: Bisection | None
    builds: int
    repaired: frozenset[str]
    out_of_budget: bool
    proof: Mapping[str, Evaluation] = field(default_factory=dict)
    validation: Validation | None = None
    refused: bool = False
    candidates: tuple[Candidate, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the engine built from the plan meets the requirements."""
        return self.result.verdict.passed

    @property
    def limit(self) -> float:
        """The share of the tolerance within which the emulators passed the plan."""
        return self.bisection.limit if self.bisection is not None else 1.0


class OutOfBuildsError(Exception):
    """No more engines may be built."""


@dataclass(kw_only=True)
class EngineJudge:
    """Finds a set of pins that ``engine`` passes.

    ``base`` is the plan without pins, ``ranked`` its layers, the most suspicious first.
    ``search`` finds pins by emulation within a share of the tolerance, None where even all pins
    fail. ``score`` is a set's emulated score, and ``score_on_perturbed`` the largest over the
    search's copies. ``floors`` are the scores of all pins, emulated and on the engine. ``tested``
    validates a set on the engine, and returns None where new inputs refuse it. ``cost`` is what a
    set costs in time: the cheaper of two is the answer, of equal ones that of fewer layers. Where
    ``grows`` is False, what the search finds is the answer, though the engine fails it.
    """

    engine: Evaluator
    base: PrecisionPlan
    ranked: Sequence[str]
    search: Callable[[float], Bisection | None]
    score: Callable[[frozenset[str]], float]
    score_on_perturbed: Callable[[frozenset[str]], float] | None = None
    floors: tuple[float, float]
    max_builds: int | None = None
    certify: bool = False
    tested: Callable[[frozenset[str]], Validation | None] | None = None
    cost: Callable[[frozenset[str]], float] = len
    grows: bool = True
    _tried: dict[frozenset[str], Evaluation] = field(default_factory=dict, init=False)
    _validation: dict[frozenset[str], Validation | None] = field(default_factory=dict, init=False)
    _bisection: Bisection | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.base = self.base.with_pins_in(Precision.FP32)

    @property
    def _builds_left(self) -> float:
        default = math.inf if self.certify else 8
        return (default if self.max_builds is None else self.max_builds) - len(self._tried)

    def decide(self, limit: float) -> Judgement:
        """Search within ``limit`` and build, until the engine passes or no more may be built."""
        pins: frozenset[str] = frozenset()
        proof: dict[str, Evaluation] = {}
        spent = False
        try:
            for _ in range(MAX_SEARCHES):
                found = self.search(limit)
                if found is None or found.pinned in self._tried:
                    break
                self._bisection, pins = found, found.pinned
                result = self._build(pins)
                if result.verdict.passed and self._passes_new_inputs(pins):
                    pins = self._shrunk(pins, limit)
                    break
                limit = self._next_limit(limit, pins, result)
            missed = pins not in self._tried or not self._tried[pins].verdict.passed
            if missed and self.grows:
                pins = self._repaired(pins)
                if self._tried[pins].verdict.passed:
                    self._passes_new_inputs(pins)
            if self.certify and self._tried[pins].verdict.passed:
                pins, proof = self._certified(pins)
        except OutOfBuildsError:
            spent = True
        answer = self._so_far(out_of_budget=spent)
        return answer if answer.plan.chosen != pins else replace(answer, proof=proof)

    def _so_far(self, out_of_budget: bool) -> Judgement:
        """The best plan so far: validated, else passed and untested, else with the least score."""
        found = self._bisection
        if not self._tried:
            only = frozenset(self.ranked) if self.grows or found is None else found.pinned
            self._tried[only] = self.engine.evaluate(self.base.with_pins(only))
        passed = [pins for pins, result in self._tried.items() if result.verdict.passed]
        validated = [pins for pins in passed if self._validation.get(pins) is not None]
        untested = [pins for pins in passed if pins not in self._validation]
        if validated or untested:
            answer = min(validated or untested, key=self._price)
        elif passed:  # all overfitted, and the fewer pins the more
            answer = max(passed, key=len)
        else:
            answer = min(self._tried, key=lambda pins: self._tried[pins].score)
        return Judgement(
            plan=self.base.with_pins(answer),
            result=self._tried[answer],
            bisection=found,
            builds=len(self._tried),
            repaired=answer - found.pinned if found is not None else answer,
            out_of_budget=out_of_budget,
            validation=self._validation.get(answer),
            refused=answer in self._validation and self._validation[answer] is None,
        )

    def _passes_new_inputs(self, pins: frozenset[str]) -> bool:
        """Whether new inputs pass on the engine too, as the given ones do."""
        if self.tested is None:
            return True
        if pins not in self._validation:
            self._validation[pins] = self.tested(pins)
        return self._validation[pins] is not None

    def _next_limit(self, limit: float, pins: frozenset[str], result: Evaluation) -> float:
        """The share of the tolerance to search within after ``pins`` failed."""
        # A score on the engine within those of the emulated copies is explained by chance, and the
        # next set only has to be a little larger. Beyond them engine and emulator differ.
        on_perturbed = self.score_on_perturbed
        by_chance = on_perturbed is not None and result.score <= on_perturbed(pins)
        if result.verdict.passed or by_chance:
            return Headroom(limit, self.floors[0], SCALED_MARGIN).kept
        return tightened(limit, result.score, self.score(pins), self.floors)

    def _build(self, pins: frozenset[str]) -> Evaluation:
        if pins not in self._tried:
            if self._builds_left <= 0:
                raise OutOfBuildsError
            self._tried[pins] = self.engine.evaluate(self.base.with_pins(pins))
        return self._tried[pins]

    def _repaired(self, pins: frozenset[str]) -> frozenset[str]:
        """``pins`` and about the fewest further layers with which the engine passes."""
        rest = [name for name in self.ranked if name not in pins]
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
        """A smaller set that passes too, if the engine leaves much of the tolerance unused."""
        for _ in range(MAX_SEARCHES):
            emulated = self.score(pins)
            wider = matching_limit(self._tried[pins].score, emulated, self.floors)
            if wider > WORTHWHILE * limit:  # but no wider than where built engines fail
                failing = min(self.score(p) for p in self._refused())
                wider = min(wider, Headroom(failing, self.floors[0], SCALED_MARGIN).kept)
            worthwhile = wider > WORTHWHILE * limit and self._builds_left > 0
            found = self.search(wider) if worthwhile else None
            if found is None or self._price(found.pinned) >= self._price(pins):
                break
            passed = self._build(found.pinned).verdict.passed
            if not passed or not self._passes_new_inputs(found.pinned):
                break
            self._bisection, pins, limit = found, found.pinned, wider
        return pins

    def _price(self, pins: frozenset[str]) -> tuple[float, int]:
        return self.cost(pins), len(pins)

    def _refused(self) -> list[frozenset[str]]:
        """The sets that failed on the engine or on new inputs, and the empty set."""
        tried = self._tried.items()
        failed = [pins for pins, result in tried if not result.verdict.passed]
        overfitted = [pins for pins, validation in self._validation.items() if validation is None]
        return [frozenset(), *failed, *overfitted]

    def _certified(self, pins: frozenset[str]) -> tuple[frozenset[str], dict[str, Evaluation]]:
        """``pins`` without superfluous ones, and the evaluation that failed without each."""

        def ahead(sets: list[frozenset[str]]) -> None:
            self.engine.evaluate_many([self.base.with_pins(s) for s in sets])

        found = one_minimal(
            [name for name in reversed(self.ranked) if name in pins],
            self._build,
            lambda result: (
                result.verdict.passed
                and self._passes_new_inputs(result.plan.pinned - self.base.held)
            ),
            ahead=ahead if math.isinf(self._builds_left) else None,  # idle GPUs build the next ones
            workers=self.engine.workers,
        )
        # Where only new inputs refuse a set, nothing is proved on the given inputs.
        proof = {name: r for name, r in found.proof.items() if not r.verdict.passed}
        return found.pinned, proof


def decide_on_engine(
    problem: Problem,
    context: Context,
    emulated: Baselines,
    baselines: EngineBaselines,
    triage: Triage,
    first: Bisection | None,
) -> Judgement:
    """Find the pins that the engine passes, within the builds allowed.

    The emulators' evaluations of the answer are in the log too when this returns.
    """
    engine = context.engine
    assert engine is not None
    suspicion = suspicion_of(emulated.layers, triage.sensitivity.scores)
    robust = triage.unseen is not None
    emulators = _Emulators(problem, context, emulated, triage, first)
    grows = problem.settings.max_cost is None

    def search(limit: float) -> Bisection | None:
        return emulators.search(limit) if grows else first  # one set costs that much at any limit

    def tested(pins: frozenset[str]) -> Validation | None:
        if context.tests >= MAX_TESTS:  # the risk of 5 % is spent
            return None
        refused, validation = validate_next(problem, context, triage.base.with_pins(pins))
        if refused is not None:
            emulators.hear_refused(pins, refused)
        return validation

    judge = EngineJudge(
        engine=engine,
        base=triage.base,
        ranked=sorted(problem.names, key=lambda n: -suspicion.get(n, -math.inf)),
        search=search,
        score=emulators.score,
        score_on_perturbed=emulators.score_on_perturbed if robust else None,
        floors=(triage.pinned.score, baselines.pinned.score),
        max_builds=problem.settings.max_builds,
        certify=problem.settings.certify == "engine",
        tested=tested if robust else None,
        cost=lambda pins: context.costs.predicted(triage.base.with_pins(pins)),
        grows=grows,
    )
    judgement = judge.decide(triage.limit)
    emulators.score(judgement.plan.pinned)
    return judgement


class _Emulators:
    """Scores sets and searches by emulation, with more pins after new inputs refused a set."""

    def __init__(
        self,
        problem: Problem,
        context: Context,
        emulated: Baselines,
        triage: Triage,
        first: Bisection | None,
    ) -> None:
        self._problem, self._context = problem, context
        self._emulated, self._triage = emulated, triage
        self._fewest = self._refusals = 0
        self._ranking = first.ranking if first is not None else ()
        self._in_vain = False
        self._found = {(triage.limit, 0): first}

    def score(self, pins: frozenset[str]) -> float:
        """The larger score of the two emulators on the given inputs."""
        plan = self._triage.base.with_pins(pins)
        return max(p.evaluate(plan).score for p in (self._context.evaluator, self._context.second))

    def score_on_perturbed(self, pins: frozenset[str]) -> float:
        """The largest score over the given inputs and the search's perturbed ones."""
        assert self._triage.unseen is not None
        samples = self._triage.unseen.samples
        plan, size = self._triage.base.with_pins(pins), set_size(self._problem)
        judged = (*samples[InputKind.GIVEN], *samples[InputKind.PERTURBED])
        return self._context.evaluator.judge(plan, judged, size=size).worst[1]

    def search(self, limit: float) -> Bisection | None:
        """The search's answer within ``limit``; None where not even all pins would help."""
        if self._in_vain:
            return None
        bounds = (limit, self._fewest)
        if bounds not in self._found:
            self._found[bounds] = bisect(
                self._problem,
                self._context,
                self._emulated,
                self._triage,
                *bounds,
                ranking=self._ranking,
            )
        return self._found[bounds]

    def hear_refused(self, pins: frozenset[str], refused: Refusal) -> None:
        """Make the next search find more pins than ``pins``, which new inputs refused."""
        self._in_vain = self._in_vain or self._no_pins_help(pins, refused.samples)
        strengths = known_strength(self._problem, self._triage)
        # Of another ranking's sets the number of layers would say nothing.
        ranking = self._ranking or as_searched(self._problem, self._triage.ranking)
        strength = [strengths.get(name, 0.0) for name in ranking]
        share = MARGIN / refused.score
        fewest = longer(strength, len(pins), share, 2**self._refusals)
        self._fewest = max(self._fewest, fewest)
        self._refusals += 1

    def _no_pins_help(self, pins: frozenset[str], samples: Sequence[Sample]) -> bool:
        """Whether all pins score no better than ``pins`` on ``samples``, by emulation."""
        if not self._problem.requirements.proportional:  # a decision's score jumps by any amount
            return False
        base, size = self._triage.base, set_size(self._problem)
        plans = (base.with_pins(pins), base.with_pins(self._problem.names))
        some, every = (self._context.evaluator.judge(p, samples, size=size).results for p in plans)
        return all(s.score <= e.score + 0.01 for s, e in zip(some, every, strict=True))
