"""Builds the plans that a clock may prefer, times them beside each other, takes the fastest.

Neither the fewest layers nor the cheapest kinds of layers are always the fastest: measured on an
H200, 274 layers of a detector in FP32 take less time than 150, and of ConvNeXt 5 less than 165.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from bisect_trt.base.errors import RunnerFailedError, RunnerUnavailableError, one_line
from bisect_trt.base.interrupt import BudgetSpentError
from bisect_trt.base.outcomes import (
    AS_IS,
    BF16,
    FITTED,
    FP32,
    PLAN,
    REPAIRED,
    Candidate,
    Cause,
    Finding,
)
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.evaluate.cache import Row
from bisect_trt.evaluate.result import Evaluation
from bisect_trt.model.cost import SAME_TIME
from bisect_trt.model.load import proto_digest
from bisect_trt.search.minimise import tightened
from bisect_trt.search.prefix import by_worth
from bisect_trt.steps.answer import RunState
from bisect_trt.steps.baselines import Baselines
from bisect_trt.steps.confirm import Judgement
from bisect_trt.steps.context import Context
from bisect_trt.steps.diagnosis import Triage
from bisect_trt.steps.engine_baselines import EngineBaselines
from bisect_trt.steps.problem import Problem
from bisect_trt.steps.select_robust import as_searched, bisect, ranked_by_worth
from bisect_trt.steps.timing import Build, Timing
from bisect_trt.steps.validation import validate_next
from bisect_trt.steps.validation_inputs import MAX_TESTS

MAX_CANDIDATES = 6
"""Engines that are built to be timed, where ``--max-builds`` says nothing."""

HARMFUL_FIRST = "most harmful first"
CHEAP_FIRST = "cheap layers first"
ALL_BUT_MATRIX = "all but matrix layers"
BLOCKS = "whole blocks"
SEARCHED = "as searched"
"""How candidates were found."""

TIMES = "times"
"""The kind of the cache's entries that hold the times of engines."""

TIMED_KINDS = ("timing", "not-timed", "cuda-graph")
"""Kinds of findings on the times of a run's choices."""


@dataclass(frozen=True)
class Ranking:
    """An order in which layers are kept in FP32, the first ``least`` of them always."""

    name: str
    layers: tuple[str, ...]
    least: int = 0


def rankings(problem: Problem, context: Context, triage: Triage) -> Iterator[Ranking]:
    """The orders in which a clock may prefer to keep layers in FP32."""
    strength, matrices = triage.sensitivity.strength, problem.matrix_layers
    broken = [name for name in triage.ranking if name in triage.broken]
    others = [name for name in triage.ranking if name not in matrices]
    products = [name for name in triage.ranking if name in matrices]
    if products and others:
        # First, since a budget may end the others: on an H200 it keeps 96 % of BERT's saving.
        yield Ranking(ALL_BUT_MATRIX, (*others, *products), len(others))
    yield Ranking(HARMFUL_FIRST, triage.ranking)
    yield Ranking(CHEAP_FIRST, tuple(ranked_by_worth(context.costs, triage)))
    blocks = {str(number): block for number, block in enumerate(context.costs.blocks)}
    harm = {n: sum(strength.get(w.name, 0.0) for w in block) for n, block in blocks.items()}
    cost = {n: one.whole for n, one in zip(blocks, context.costs.costs, strict=True)}
    in_blocks = [work.name for n in by_worth(list(blocks), harm, cost) for work in blocks[n]]
    ranked = set(triage.ranking)
    layers = (*broken, *(name for name in in_blocks if name in ranked), *triage.ranking)
    yield Ranking(BLOCKS, tuple(dict.fromkeys(layers)), len(broken))


class _Race:
    """Builds candidates for the answer, and judges them on the given inputs.

    ``pins`` are the layers by candidate, ``results`` what the engine made of them; ``builds``
    counts its engines.
    """

    def __init__(
        self,
        problem: Problem,
        context: Context,
        emulated: Baselines,
        triage: Triage,
        judgement: Judgement,
        floor: float,
    ) -> None:
        self._problem, self._context = problem, context
        self._emulated, self._triage = emulated, triage
        self._floors, self._limit = (triage.pinned.score, floor), judgement.limit
        most = problem.settings.max_builds
        self._most = MAX_CANDIDATES if most is None else max(0, most - judgement.builds)
        self.builds = 0
        self.pins = {SEARCHED: judgement.plan.chosen}
        self.results: dict[str, Evaluation] = {SEARCHED: judgement.result}

    def plan(self, name: str) -> PrecisionPlan:
        """The candidate ``name``, as an engine takes it."""
        return self._triage.base.with_pins_in(Precision.FP32).with_pins(self.pins[name])

    def enter(self, ranking: Ranking) -> None:
        """Build the shortest prefix of ``ranking`` that passes, a longer one where that fails."""
        limit = self._limit
        for _ in range(2):
            found = bisect(
                self._problem,
                self._context,
                self._emulated,
                self._triage,
                limit,
                ranking.least,
                ranking=ranking.layers,
            )
            if found is None or found.pinned in self.pins.values() or self.builds >= self._most:
                return
            self.builds += 1
            engine = self._context.engine
            assert engine is not None
            self.pins[ranking.name] = found.pinned
            result = engine.evaluate(self.plan(ranking.name))
            self.results[ranking.name] = result
            if result.verdict.passed:
                return
            emulated = self._context.evaluator.evaluate(self._triage.base.with_pins(found.pinned))
            limit = tightened(limit, result.score, emulated.score, self._floors)


def fastest_plan(
    problem: Problem,
    context: Context,
    emulated: Baselines,
    engine: EngineBaselines,
    triage: Triage,
    judgement: Judgement,
) -> Judgement:
    """``judgement``, or that of the fastest candidate which is right on the engine and validated.

    Where the answer costs next to nothing by the estimate, all but matrix layers is the only other
    candidate. Nothing is built where nothing here can time engines.
    """
    if context.timer is None or triage.unseen is None or not judgement.passed:
        return judgement
    settings = problem.settings
    if settings.max_cost is not None or settings.certify == "engine":
        return judgement
    few = _keeps_it_all(context, triage, judgement.plan.chosen)
    context.observer.step("fastest")
    race = _Race(problem, context, emulated, triage, judgement, engine.pinned.score)
    with suppress(BudgetSpentError), context.time.part(0.5):
        for ranking in rankings(problem, context, triage):
            # On an H200 these alone took less time than everything in FP16.
            if few and ranking.name != ALL_BUT_MATRIX:
                continue
            # The search has been along it, and new inputs may have refused shorter sets of it.
            if judgement.bisection is not None and judgement.bisection.ranking == tuple(
                as_searched(problem, ranking.layers)
            ):
                continue
            context.tell(f"{ranking.name}: a plan to be timed")
            race.enter(ranking)
    judgement = replace(judgement, builds=judgement.builds + race.builds)
    right = [name for name, result in race.results.items() if result.verdict.passed]
    if len(right) == 1:  # the search's own
        return judgement
    try:
        timing = time_beside(context, {n: Build(problem.graph, race.plan(n)) for n in right})
    except BudgetSpentError:
        return judgement
    if timing is None:
        return judgement
    found = _validated(problem, context, race, right, timing, judgement)
    return replace(found, candidates=_candidates(problem, race, timing, found))


def time_beside(context: Context, builds: Mapping[str, Build]) -> Timing | None:
    """The times of ``builds``, now or by an earlier run; None, with a note, where none can be had.

    A clock that differs a little must not change the answer of a command that is repeated.
    """
    assert context.timer is not None and context.engine is not None
    sample = context.problem.timed_sample
    parts = [f"{n}:{proto_digest(b.graph.proto)}:{b.plan.digest}" for n, b in builds.items()]
    key = context.engine.key(TIMES, *parts, sample.digest)
    cached = context.cache.recall(key)
    if cached is not None:
        timing = Timing.from_data(cached[0])
    else:
        context.tell(f"{len(builds)} engines, timed in rounds")
        try:
            timing = context.timer(builds, sample)
        except (RunnerFailedError, RunnerUnavailableError) as error:
            message = f"engines were not timed beside each other: {one_line(error)}"
            context.note(Finding("not-timed", "", message))
            return None
        # Times that something disturbed are measured again by the next run.
        if not timing.notes() and not any(plan.failure for plan in timing.plans.values()):
            context.cache.record_later(Row(key, TIMES, timing.as_data()))
    context.note(*(Finding("timing", "", note) for note in timing.notes()))
    return timing


def _keeps_it_all(context: Context, triage: Triage, pins: frozenset[str]) -> bool:
    """Whether ``pins`` cost so little by the estimate that no other plan can be much faster."""
    costs = context.costs
    cost = costs.predicted(triage.base.with_pins(pins)) - costs.predicted(triage.base)
    return cost <= SAME_TIME * costs.extra


def _validated(
    problem: Problem,
    context: Context,
    race: _Race,
    right: Sequence[str],
    timing: Timing,
    judgement: Judgement,
) -> Judgement:
    """The judgement of the fastest candidate that new inputs do not refuse."""
    timed = sorted((n for n in right if not math.isnan(timing.ms(n))), key=timing.ms)
    for name in timed:
        ahead = judgement.validation is not None and (
            name == SEARCHED or (SEARCHED in timed and timing.equal(name, SEARCHED))
        )
        if ahead or context.tests >= MAX_TESTS:
            return judgement
        if name == SEARCHED:  # validation has rejected it
            continue
        plan = race.plan(name)
        with suppress(BudgetSpentError):
            refusal, validation = validate_next(problem, context, plan)
            if refusal is None:
                return replace(
                    judgement,
                    plan=plan,
                    result=race.results[name],
                    repaired=frozenset(),
                    proof={},
                    validation=validation,
                    refused=False,
                )
    return judgement


def _candidates(
    problem: Problem, race: _Race, timing: Timing, answer: Judgement
) -> tuple[Candidate, ...]:
    """A row for each plan that was built, with its time where it is right."""
    found = []
    for name, result in race.results.items():
        pins, ms = race.pins[name], timing.ms(name) if name in timing.plans else math.nan
        found.append(
            Candidate(
                name,
                tuple(layer for layer in problem.names if layer in pins),
                result.score,
                result.verdict.passed,
                None if math.isnan(ms) else ms,
                chosen=pins == answer.plan.chosen,
            )
        )
    return tuple(found)


def time_choices(state: RunState, context: Context) -> Timing | None:
    """The times of the engines of the answers, by choice; None where nothing can time them."""
    if context.timer is None or state.engine is None or not state.engine.fp32.worst:
        return None
    builds = _builds(state)
    if builds.keys() <= {AS_IS, FP32} and not _as_it_is(state):  # FP32 is the only answer
        return None
    context.observer.step("timing")
    timing = time_beside(context, builds)
    best = fastest_right(state, timing) if timing is not None else None
    if timing is not None and best is not None and (advice := timing.advice(best)):
        context.note(Finding("cuda-graph", "", advice))
    return timing


def _as_it_is(state: RunState) -> bool:
    """Whether everything reduced is the answer."""
    return state.settled is not None and state.settled.cause is Cause.NONE


def _builds(state: RunState) -> dict[str, Build]:
    """The plans to be timed, by choice."""
    assert state.engine is not None
    graph, found = state.problem.graph, dict[str, Build]()
    if state.engine.base.worst:
        found[AS_IS] = Build(graph, state.engine.base.plan)
    for name, answered in ((REPAIRED, state.repaired), (FITTED, state.fitted)):
        result = _judged(answered.state) if answered is not None else None
        if answered is not None and result is not None:
            found[name] = Build(answered.state.problem.graph, result.plan)
    if state.judgement is not None and state.judgement.passed:
        found[PLAN] = Build(graph, state.judgement.plan)
    if state.bf16 is not None and state.bf16.evaluation.verdict.passed:
        found[BF16] = Build(graph, state.bf16.evaluation.plan)
    found[FP32] = Build(graph, state.engine.fp32.plan)
    return found


def _judged(state: RunState) -> Evaluation | None:
    """The engine's evaluation of an answer on another graph; None where there is none."""
    if state.judgement is not None:
        return state.judgement.result
    return state.engine.base if state.engine is not None and state.engine.base.worst else None


def fastest_right(state: RunState, timing: Timing) -> str | None:
    """The fastest of the choices that are right, FP32 left out."""
    right = _right(state)
    timed = [name for name in timing.plans if name in right and not math.isnan(timing.ms(name))]
    return min(timed, key=timing.ms, default=None)


def reduces_nothing(state: RunState, timing: Timing) -> bool:
    """Whether FP32 takes as long as the fastest engine that is right: within 3 %, or the spread."""
    best = fastest_right(state, timing)
    if best is None or math.isnan(timing.ms(FP32)) or state.problem.kept_reduced:
        return False
    within = (1.0 + SAME_TIME) * timing.ms(best)
    return timing.ms(FP32) <= within or timing.equal(FP32, best)


def _right(state: RunState) -> frozenset[str]:
    """The choices that meet the requirement and that no new input has refused, FP32 left out."""
    answers = {REPAIRED: state.repaired, FITTED: state.fitted}
    found = {name for name, a in answers.items() if a is not None and _meets(a.state)}
    if _meets(state):
        found.add(AS_IS if _as_it_is(state) else PLAN)
    if state.bf16 is not None and state.bf16.answered is not None:
        found.add(BF16)
    return frozenset(found)


def _meets(state: RunState) -> bool:
    """Whether the answer on a graph is right on the engine, and not refused by new inputs."""
    if state.judgement is not None:
        return state.judgement.passed and not state.judgement.refused
    return _as_it_is(state)
