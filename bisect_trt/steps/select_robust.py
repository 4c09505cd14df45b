"""Finds the layers to keep in FP32 for inputs like the given ones."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from bisect_trt.base.display import counted
from bisect_trt.base.interrupt import BudgetSpentError
from bisect_trt.base.outcomes import Validation
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.evaluate.result import Evaluation
from bisect_trt.model.cost import SAME_TIME, CostTable
from bisect_trt.search import find_pins
from bisect_trt.search.minimise import Headroom, one_minimal
from bisect_trt.search.prefix import (
    affordable,
    by_worth,
    longer,
    longest,
    shortest_prefix,
)
from bisect_trt.steps.baselines import Baselines
from bisect_trt.steps.context import Context
from bisect_trt.steps.diagnosis import Triage
from bisect_trt.steps.failing_inputs import UnseenInputs
from bisect_trt.steps.problem import Problem
from bisect_trt.steps.search_set import Refusal, SearchSet
from bisect_trt.steps.select_fitted import Bisection, FittedSearch
from bisect_trt.steps.sensitivity import suspicion_of
from bisect_trt.steps.validation import refused_by, validate_next
from bisect_trt.steps.validation_inputs import MAX_TESTS

MARGIN = 0.95
"""The share of its headroom that a prefix may use on the search set: the rest is for luck."""

MAX_ROUNDS = 6
"""Rounds of search and validation; each that is refused makes the next set larger."""

OVERSHOT = 0.6
"""A score on the search set, in tolerances, that asks for a smaller set."""

SHRINK_EVALUATIONS = 32
"""Evaluations that shrinking takes: a count, so that the same command gives the same answer."""


def bisect(
    problem: Problem,
    context: Context,
    emulated: Baselines,
    triage: Triage,
    limit: float,
    fewest: int = 0,
    ranking: Sequence[str] = (),
) -> Bisection | None:
    """A set that both emulators pass; None where even all pins miss ``limit``.

    With ``--max-cost`` it is the set that costs as much, whether it passes or not. Where
    ``ranking`` is given, the set is a prefix of it with ``fewest`` layers at least.
    """
    if triage.unseen is not None and problem.settings.max_cost is not None:
        return _within_cost(problem, context, triage, problem.settings.max_cost)
    if not triage.pinned.under(limit).verdict.passed:
        return None
    if triage.unseen is not None:
        return _robust_set(problem, context, triage, triage.unseen, limit, fewest, ranking)
    sensitivity = triage.sensitivity.under(limit)
    suspicion = suspicion_of(emulated.layers, sensitivity.scores)
    return FittedSearch(problem, context, triage.base, limit, suspicion, sensitivity).run()


def _within_cost(problem: Problem, context: Context, triage: Triage, percent: float) -> Bisection:
    """The layers whose errors weigh most among those that take ``percent`` longer than FP16."""
    limit = percent / 100.0 * context.costs.reduced
    kept = affordable(
        ranked_by_worth(context.costs, triage),
        lambda pins: context.costs.predicted(triage.base.with_pins(pins)) <= limit,
    )
    plan = triage.base.with_pins(kept)
    validation = None
    if all(judge.evaluate(plan).verdict.passed for judge in (context.evaluator, context.second)):
        _, validation = final_validation(problem, context, plan, triage.limit)
    return Bisection(
        plan.chosen, {}, triage.limit, complete=not kept, validation=validation, ranked=True
    )


def ranked_by_worth(costs: CostTable, triage: Triage) -> list[str]:
    """The layers of ``triage``'s ranking by what their cost buys, those that break first.

    Layers that multiply no matrices count as free: builders put them into their neighbours'
    kernels, and what the estimate says of single ones is small and unsure.
    """
    matrices = {work.name for block in costs.blocks for work in block if work.is_matrix}
    # Every set has the held layers: what they cost tells no layers apart.
    held = costs.predicted(triage.base)
    alone = {
        name: costs.predicted(triage.base.with_pins([name])) - held if name in matrices else 0.0
        for name in triage.ranking
    }
    return by_worth(triage.ranking, triage.sensitivity.strength, alone, triage.broken)


def _robust_set(
    problem: Problem,
    context: Context,
    triage: Triage,
    unseen: UnseenInputs,
    limit: float,
    fewest: int,
    ranking: Sequence[str],
) -> Bisection | None:
    room = Headroom(limit, triage.pinned.score, MARGIN)
    search_set = SearchSet(problem, context, triage.base, unseen.samples)
    if unseen.refused is not None:
        search_set.add(unseen.refused)
    strength = known_strength(problem, triage)
    order = ranking or triage.ranking
    search = RobustSearch(problem, context, search_set, order, strength, room)
    if not ranking:
        with suppress(BudgetSpentError):  # the rounds below end with the best set so far
            search = cheaper_search(search, context.costs, triage)
    found = search.run(fewest)
    if found is not None:
        found = replace(found, ranking=search.ranking)
        for judge in (context.evaluator, context.second):  # the tables show the given inputs
            judge.evaluate(triage.base.with_pins(found.pinned))
    return found


def known_strength(problem: Problem, triage: Triage) -> Mapping[str, float]:
    """The strength of each layer; empty where a metric does not grow with the errors."""
    return triage.sensitivity.strength if problem.requirements.proportional else {}


def cheaper_search(search: RobustSearch, costs: CostTable, triage: Triage) -> RobustSearch:
    """``search``, or one that ranks layers by what they cost too, where its prefix costs less.

    Args:
        search: ranks layers by their harm.
        costs: what plans cost in time.
        triage: the layers' sensitivities.
    """
    worthwhile = SAME_TIME * costs.extra
    few = search.shortest()
    if few is None or search.cost(few) <= worthwhile:
        return search
    other = search.on(ranked_by_worth(costs, triage))
    if other.ranking == search.ranking:
        return search
    try:
        many = other.shortest()
    finally:
        search.keep(few)  # refusals along the other ranking drop all smaller sets
    dearer = many is None or search.cost(many) > search.cost(few) - worthwhile
    return search if dearer else other


class RobustSearch:
    """Searches prefixes of a ranking on a search set, and validates what passes, in rounds."""

    def __init__(
        self,
        problem: Problem,
        context: Context,
        search_set: SearchSet,
        ranking: Sequence[str],
        strength: Mapping[str, float],
        room: Headroom,
    ) -> None:
        self._problem, self._context, self._search_set = problem, context, search_set
        self._room, self._by_layer = room, strength
        self._ranking = as_searched(problem, ranking)
        self._strength = [strength.get(name, 0.0) for name in self._ranking]

    @property
    def ranking(self) -> tuple[str, ...]:
        """The layers in the order in which they are taken."""
        return tuple(self._ranking)

    def on(self, ranking: Sequence[str]) -> RobustSearch:
        """The same search along another ranking."""
        return RobustSearch(
            self._problem, self._context, self._search_set, ranking, self._by_layer, self._room
        )

    def cost(self, pins: Collection[str]) -> float:
        """The predicted time of ``pins`` beyond everything reduced."""
        return self._context.costs.predicted(self._search_set.base.with_pins(pins))

    def shortest(self) -> frozenset[str] | None:
        """The shortest prefix that passes the search set; None where even all pins miss."""
        length = self._passing(0, len(self._problem.begin))
        return None if length is None else frozenset(self._ranking[:length])

    def keep(self, pins: frozenset[str]) -> None:
        """Let ``pins``, which both emulators passed, be the answer if the time ends."""
        self._search_set.keep(pins)

    def _passing(self, shortest: int, guess: int) -> int | None:
        ranking, strength = self._ranking, self._strength
        return shortest_passing(self._search_set, ranking, self._room, shortest, strength, guess)

    def run(self, fewest: int = 0) -> Bisection | None:
        """The set of ``fewest`` pins at least; None where even all pins miss the requirement."""
        try:
            return self._in_rounds(fewest)
        except BudgetSpentError:
            # The smallest prefix that passed is an answer at any time, or else all pins; it is
            # validated at the end of the run.
            self._context.time.search_ended()
            found = self._search_set.smallest
            if found is None or len(found) < fewest:
                found = frozenset(self._ranking)
            return self._prefix(found)

    def _prefix(self, pinned: frozenset[str]) -> Bisection:
        return Bisection(pinned, {}, self._room.kept, complete=not pinned, ranked=True)

    def _in_rounds(self, fewest: int) -> Bisection | None:
        shortest, refused_prefix, refused = fewest, None, 0
        for number in range(MAX_ROUNDS):
            # An older plan's pins are a guess, from which fewer are tried too.
            guess = 0 if number else len(self._problem.begin)
            length = self._passing(shortest, guess)
            if length is None:
                return refused_prefix
            refusals: list[Refusal] = []
            for candidate in self._candidates(length):
                if len(candidate.pinned) < fewest:
                    continue
                refusal, validation = self._validated(candidate.pinned)
                if refusal is None:
                    found = replace(candidate, validation=validation)
                    return self._less(found, refused) if number and found.ranked else found
                refusals.append(refusal)
            for refusal in refusals:
                self._search_set.add(refusal)
            refused_prefix, refused = self._prefix(frozenset(self._ranking[:length])), length
            if length == len(self._ranking):
                break
            # A search set that has grown may still know too little.
            share = self._room.kept / refusals[-1].score
            shortest = longer(self._strength, length, share, 2**number)
            self._search_set.forget(below=shortest)
        return refused_prefix

    def _less(self, found: Bisection, refused: int) -> Bisection:
        """``found``, or a shorter prefix, longer than ``refused``, that is validated too."""
        # A set that was refused grows by an estimate, which may be far too much.
        with suppress(BudgetSpentError):
            while self._context.tests < MAX_TESTS:
                score = self._search_set.ask(found.pinned, self._room.limit).score
                length = self._tenth_less(len(found.pinned))
                if score > OVERSHOT or length <= refused or not self._passes(length):
                    break
                shorter = self._prefix(frozenset(self._ranking[:length]))
                refusal, validation = self._validated(shorter.pinned)
                if refusal is not None:
                    break
                found = replace(shorter, validation=validation)
        return found

    def _tenth_less(self, length: int) -> int:
        """The longest prefix that has a tenth less layers, and costs a tenth less than ``length``.

        Where these cost nothing that a clock would show, layers alone count.
        """
        cost = self.cost(self._ranking[:length])
        within = 0.9 * cost if cost > SAME_TIME * self._context.costs.extra else math.inf
        return longest(int(0.9 * length), lambda n: self.cost(self._ranking[:n]) <= within)

    def _passes(self, length: int) -> bool:
        """Whether both emulators pass a prefix on the search set."""
        prefixes = _Prefixes(self._search_set, self._ranking, self._room)
        if not prefixes.passes_all(length):
            return False
        second = prefixes.by_second(length)
        return second is None or second.verdict.passed

    def _candidates(self, length: int) -> Iterator[Bisection]:
        """The sets worth a validation: a smaller one whose pins are all proved, then the prefix."""
        ranked = self._ranking[:length]
        # Of the evaluations of a shrinking two are of all pins and of none.
        if length <= SHRINK_EVALUATIONS - 2:
            # The freer the choice of a set, the more of it is luck.
            within = self._room.within(0.8)
            proof = shrunk(self._search_set, ranked, within, self._context.evaluator.workers)
            if proof is not None:
                yield Bisection(frozenset(proof), proof, within, complete=True)
                if len(proof) == length:
                    return
        yield self._prefix(frozenset(ranked))

    def _validated(self, pinned: frozenset[str]) -> tuple[Refusal | None, Validation | None]:
        pins = counted(len(pinned), "pin")
        self._context.tell(f"{pins}, new copies")
        plan = self._search_set.base.with_pins(pinned)
        refusal, validation = final_validation(self._problem, self._context, plan, self._room.limit)
        if refusal is not None:
            said = f"{pins} refused by new copies ({refusal.kind}): the search goes on"
            self._context.tell(said)
        return refusal, validation


def as_searched(problem: Problem, ranking: Sequence[str]) -> list[str]:
    """``ranking`` with the layers of an older plan first, in their order."""
    return sorted(ranking, key=lambda name: name not in problem.begin)


class _Prefixes:
    """Judges prefixes of a ranking on a search set."""

    def __init__(self, search_set: SearchSet, ranking: Sequence[str], room: Headroom) -> None:
        self._search_set, self._ranking, self._room = search_set, ranking, room
        self.answered = False

    def passes_few(self, count: int) -> bool:
        """Whether the samples that did worst pass, of the first passing prefix all samples."""
        # That one is an answer at any time; all pins are one without being evaluated.
        self.answered = self.answered or count == len(self._ranking)
        if not self.answered:
            self.answered = self.passes_all(count)
            return self.answered
        # Four samples of each kind refuse most prefixes.
        return self._search_set.ask(self._pins(count), self._within(count), 4).verdict.passed

    def passes_all(self, count: int) -> bool:
        """Whether all samples pass by the first emulator."""
        pins = self._pins(count)
        passed = self._search_set.ask(pins, self._within(count)).verdict.passed
        if passed:
            self._search_set.keep(pins)
        return passed

    def by_second(self, count: int) -> Evaluation | None:
        """The second emulator's evaluation on all samples; None where it does not decide."""
        return self._search_set.ask_second(self._pins(count), self._within(count))

    def _pins(self, count: int) -> frozenset[str]:
        return frozenset(self._ranking[:count])

    def _within(self, count: int) -> float:
        # All pins may use all of the headroom: what they leave is no rounding of a layer's.
        return self._room.limit if count == len(self._ranking) else self._room.kept


def shortest_passing(
    search_set: SearchSet,
    ranking: Sequence[str],
    room: Headroom,
    shortest: int,
    strength: Sequence[float],
    guess: int = 0,
) -> int | None:
    """The length of the shortest prefix that passes the search set by both emulators.

    It is ``shortest`` at least; None where even the whole ranking misses.
    """
    prefixes, begun = _Prefixes(search_set, ranking, room), shortest
    while True:
        length = shortest_prefix(len(ranking), prefixes.passes_few, first=shortest, guess=guess)
        every = length == len(ranking)
        if length is None or (every and not prefixes.passes_all(length)):
            # Copies that even all pins miss may stand in the way.
            if not search_set.set_aside():
                return None
            shortest, prefixes.answered = begun, False
        elif not every and not prefixes.passes_all(length):
            shortest = length + 1
        else:
            # The second emulator opens a session for each plan, so it judges what is left.
            second = prefixes.by_second(length)
            if second is None or second.verdict.passed or every:
                return length
            shortest = longer(strength, length, 1.0 / second.score)
            if shortest == len(ranking) and search_set.set_aside():
                shortest = length
            search_set.forget(below=shortest)
            prefixes.answered = False


def shrunk(
    search_set: SearchSet, ranked: Sequence[str], within: float, workers: int
) -> Mapping[str, Evaluation] | None:
    """A part of ``ranked`` whose every pin is needed, each with the evaluation that shows it.

    None where ``ranked`` itself misses ``within``, or not every pin could be proved.
    """
    if not ranked:
        return {}
    if not search_set.ask(frozenset(ranked), within).verdict.passed:
        return None
    suspicion = {name: float(len(ranked) - place) for place, name in enumerate(ranked)}
    found = find_pins(
        list(reversed(ranked)),
        lambda pins: search_set.ask(pins, within).verdict,
        suspicion=suspicion,
        workers=workers,
        max_probes=SHRINK_EVALUATIONS,
    )
    if not found.complete:
        return None
    left = [name for name in reversed(ranked) if name in found.pinned]
    minimal = one_minimal(left, lambda p: search_set.ask(p, within), lambda r: r.verdict.passed)
    second = search_set.ask_second(minimal.pinned, within)
    if second is not None and not second.verdict.passed:
        return None
    return minimal.proof


def final_validation(
    problem: Problem, context: Context, plan: PrecisionPlan, limit: float
) -> tuple[Refusal | None, Validation | None]:
    """The refusal of ``plan``, or else its validation by both emulators."""
    if context.engine is None:
        return validate_next(problem, context, plan, limit)
    # An engine's answer is validated on the engine: here the second emulator judges the given
    # inputs only.
    return refused_by(problem, context, [context.second], plan, limit), None
