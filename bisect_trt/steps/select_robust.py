"""Finds the layers to keep in FP32 for inputs like the given ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from bisect_trt.base.display import counted
from bisect_trt.base.interrupt import BudgetSpentError
from bisect_trt.base.outcomes import Validation, at_least
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.base.sample import Sample, evenly
from bisect_trt.evaluate.result import Evaluation
from bisect_trt.metrics.statistics import lower_bound
from bisect_trt.search import find_pins
from bisect_trt.search.minimise import Headroom, one_minimal
from bisect_trt.search.prefix import longer, shortest_prefix
from bisect_trt.steps.context import Context
from bisect_trt.steps.problem import Problem
from bisect_trt.steps.search_set import Refusal, SearchSet
from bisect_trt.steps.sensitivity import TIME_BUDGET_S, sensitivity_rows
from bisect_trt.steps.validation import put_to_test, refused_by
from bisect_trt.steps.validation_inputs import next_test, set_size, wanted_of_unseen

MARGIN = 0.95
SHRINK_MARGIN = 0.8
"""The part of its headroom that a prefix, and a set that was chosen freely, may use on the search
set: the freer the choice, the more of it is luck."""

MAX_ROUNDS = 6
"""Rounds of search and validation; each that is refused makes the next set larger."""

SHRINK_EVALUATIONS = 32
"""Evaluations that shrinking takes, before one a pin proves it: a count, and not the clock, so that
the same command gives the same answer."""

MOST_SHRUNK = SHRINK_EVALUATIONS - 2
"""A longer prefix is not shrunk. Two of the evaluations are of all pins and of none."""

_GLANCE = 4
"""Samples of each kind by which a prefix is seen to be too short, or passed for now."""

_FAR_SCORE = 4.0
_FEW_SHARE = 0.25
_WORST = 2
"""Where a prefix misses few samples, and by far, what misses the worst of these alone is looked
for. Where it misses more of them, or by less, the error is spread."""


@dataclass(frozen=True)
class RobustSet:
    """``pinned`` with the ``validation`` that it passed, None where every set was refused.

    ``proof`` maps pins to an evaluation of the set without them that fails on some sample, within
    ``limit`` times the tolerance. ``prefix`` is the length of the ranking's prefix that it comes
    from; ``ranked`` is true where it is that prefix, and not every pin is proved.
    """

    pinned: frozenset[str]
    proof: Mapping[str, Evaluation]
    limit: float
    validation: Validation | None
    prefix: int
    ranked: bool


def margin(problem: Problem, context: Context) -> float:
    """The part of its headroom that a prefix may use on the search set.

    All of it where a point of the trade-off curve is picked, or where the given inputs bound the
    share by themselves: prefixes are nested, so that little is left to luck then. For an engine,
    which errs a little otherwise, a margin is kept: what it refuses costs a build.
    """
    if problem.settings.pick is not None:
        return 1.0
    sets = len(problem.samples) // set_size(problem)
    bound = lower_bound(at_least(problem.settings.asked_of_given, sets), sets)
    return 1.0 if bound >= wanted_of_unseen(problem) and context.engine is None else MARGIN


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
        self._strength, self._room = strength, room
        self._rank(as_searched(problem, ranking))

    def run(self, fewest: int = 0) -> RobustSet | None:
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
            return self._prefix(found, len(found))

    def _rank(self, ranking: Sequence[str]) -> None:
        self._ranking = list(ranking)
        self._left = [self._strength.get(name, 0.0) for name in ranking]

    def _prefix(
        self, pinned: frozenset[str], length: int, validation: Validation | None = None
    ) -> RobustSet:
        return RobustSet(pinned, {}, self._room.kept, validation, length, ranked=True)

    def _shortest(self, least: int, guess: int = 0) -> int | None:
        return shortest_passing(
            self._search_set, self._ranking, self._room, least, self._left, guess
        )

    def _in_rounds(self, fewest: int) -> RobustSet | None:
        problem, context, picks = self._problem, self._context, self._problem.settings.pick
        shortest, best = fewest, None
        for tried in range(MAX_ROUNDS):
            # An older plan's pins are a guess, from which fewer are tried too.
            length = self._shortest(shortest, 0 if tried else len(problem.begin))
            if length is None:
                return best
            if not tried:
                length = self._without_rare_misses(length, shortest)
            refused: list[Refusal] = []
            ranked = self._ranking[:length]
            for candidate in self._candidates(ranked):
                if len(candidate.pinned) < fewest:
                    continue
                pins = counted(len(candidate.pinned), "pin")
                context.tell(f"{pins}, new copies")
                plan = self._search_set.base.with_pins(candidate.pinned)
                against, validation = final_validation(problem, context, plan, self._room.limit)
                if against is None:
                    found = replace(candidate, validation=validation)
                    if picks is not None and best is not None:
                        return self._smaller(found, best.prefix, MAX_ROUNDS - tried - 1)
                    return found
                context.tell(f"{pins} refused by new copies ({against.kind}): the search goes on")
                refused.append(against)
            for refusal in refused:
                self._search_set.add(refusal)
            best = self._prefix(frozenset(ranked), length)
            if length == len(self._ranking):
                return best
            again = self._after_refusal(refused)
            if not set(again[:length]) <= set(ranked):  # else what misses alone is pinned already
                self._rank(again)
                self._search_set.forget(below=length + 1)
                continue
            # A search set that has grown may still know too little.
            share = self._room.kept / refused[-1].score
            shortest = longer(self._left, length, share, 2**tried)
            self._search_set.forget(below=shortest)
        return best

    def _candidates(self, ranked: Sequence[str]) -> Iterator[RobustSet]:
        """What is worth a validation: a smaller set whose pins are all proved, then the prefix."""
        if self._problem.settings.pick is None and len(ranked) <= MOST_SHRUNK:
            within = self._room.within(SHRINK_MARGIN)
            proof = shrunk(self._search_set, ranked, within, self._context.evaluator.workers)
            if proof is not None:
                pins = frozenset(proof)
                yield RobustSet(pins, proof, within, None, len(ranked), ranked=False)
                if len(pins) == len(ranked):
                    return
        yield self._prefix(frozenset(ranked), len(ranked))

    def _smaller(self, found: RobustSet, refused: int, rounds: int) -> RobustSet:
        """``found``, or a shorter prefix that is validated too, to a tenth of its pins.

        A point of the trade-off curve is picked for being small, and what follows a set that was
        refused is up to twice as large.
        """
        context = self._context
        try:
            while rounds and context.engine is None and found.prefix - refused > found.prefix / 10:
                rounds -= 1
                length = self._shortest((refused + found.prefix) // 2)
                if length is None or length >= found.prefix:
                    break
                pins = frozenset(self._ranking[:length])
                plan = self._search_set.base.with_pins(pins)
                against, validation = final_validation(
                    self._problem, context, plan, self._room.limit
                )
                if against is None:
                    found = self._prefix(pins, length, validation)
                else:
                    self._search_set.add(against)
                    refused = length
                    self._search_set.forget(below=length + 1)
        except BudgetSpentError:
            context.time.search_ended()
        return found

    def _without_rare_misses(self, length: int, shortest: int) -> int:
        """The shortest prefix that passes, ``length`` as it is ranked now.

        Where it has many layers for the sake of few inputs, those layers come first in the ranking
        that miss the requirement alone on these.
        """
        for _ in range(4 if self._each_tells else 0):
            half = frozenset(self._ranking[: length // 2])
            if length <= MOST_SHRUNK or not half:
                break
            # A long prefix is looked at for values that are not finite, however many have them.
            missed = self._missed(half, long=length >= len(self._ranking) / 2)
            before = self._ranking
            again = as_searched(self._problem, self._first_that_miss(missed))
            if again == before:
                break
            self._rank(again)
            shorter = self._shortest(shortest)
            if shorter is None or shorter >= length:
                self._rank(before)
                break
            length = shorter
        return length

    def _missed(self, pins: frozenset[str], *, long: bool) -> list[Sample]:
        """The worst samples that ``pins`` miss, where they are few and missed by far.

        Else, of a ``long`` prefix, some of those with values that are not finite.
        """
        scores = self._search_set.scores(pins)
        missed = sorted((found for found in scores if not found[1] <= 1.0), key=lambda f: -f[1])
        few = len(missed) <= max(1.0, _FEW_SHARE * len(scores))
        if missed and few and missed[0][1] >= _FAR_SCORE:
            return [sample for sample, _ in missed[:_WORST]]
        return evenly([s for s, score in missed if long and not math.isfinite(score)], 4)

    def _after_refusal(self, refused: Sequence[Refusal]) -> list[str]:
        """The ranking with those layers first that alone miss what few new copies miss by far."""
        if not self._each_tells:
            return self._ranking
        size = set_size(self._problem)
        far = [
            refusal
            for refusal in refused
            if refusal.score >= _FAR_SCORE
            and len(refusal.samples) <= _FEW_SHARE * size * refusal.tested
        ]
        samples = [sample for refusal in far for sample in refusal.samples[:_WORST]]
        # Where more layers miss such a sample alone it is a near tie, and no layer's fault.
        most = max(1.0, len(self._ranking) / 10)
        return as_searched(self._problem, self._first_that_miss(samples[:_WORST], most))

    @property
    def _each_tells(self) -> bool:
        """Whether none of the inputs may be missed, and each can be judged by itself."""
        settings, requirements = self._problem.settings, self._problem.requirements
        return settings.share_of_given >= 1.0 and not requirements.tells_of_all

    def _first_that_miss(self, samples: Sequence[Sample], most: float = math.inf) -> list[str]:
        """The ranking with the layers first that miss alone on some of ``samples``, worst first.

        As it is where more than ``most`` do by finite scores, or the layers are too many to ask.
        """
        ranking, context = self._ranking, self._context
        # By count and not by the clock, so that the same command gives the same answer.
        expected_s = len(samples) * len(ranking) * context.pace.usual_seconds
        if not samples or expected_s > TIME_BUDGET_S:
            return list(ranking)
        reduced = self._search_set.base.with_pins(ranking)
        rows, runs = sensitivity_rows(self._problem, context, samples, reduced, ranking)
        context.further_rows += runs
        worst = {name: max(score for score, _ in its) for name, its in rows.items()}
        guilty = {name for name, score in worst.items() if not score <= 1.0}
        if len(guilty) > most and all(math.isfinite(worst[name]) for name in guilty):
            return list(ranking)
        return sorted(ranking, key=lambda name: -worst[name] if name in guilty else 0.0)


def as_searched(problem: Problem, ranking: Sequence[str]) -> list[str]:
    """``ranking`` with the layers of an older plan first, in their order."""
    return sorted(ranking, key=lambda name: name not in problem.begin)


def shortest_passing(
    search_set: SearchSet,
    ranking: Sequence[str],
    room: Headroom,
    shortest: int,
    strength: Sequence[float],
    guess: int = 0,
) -> int | None:
    """How many of the ranking, ``shortest`` at least, pass the search set by both emulators.

    All of it may use all of the headroom: what it leaves is no rounding of a layer's. Most prefixes
    are told by the samples that did worst; what they pass all others must pass too. Copies that all
    pins miss are set aside where they stand in the way.
    """

    def within(count: int) -> float:
        return room.limit if count == len(ranking) else room.kept

    def whole(count: int) -> bool:
        pins = frozenset(ranking[:count])
        passed = search_set.ask(pins, within(count)).verdict.passed
        if passed:
            search_set.keep(pins)
        return passed

    answered, begun = False, shortest

    def passes(count: int) -> bool:
        nonlocal answered
        # The first that passes is an answer at any time; all pins are one without being asked.
        answered = answered or count == len(ranking)
        if not answered:
            answered = whole(count)
            return answered
        return search_set.ask(frozenset(ranking[:count]), within(count), _GLANCE).verdict.passed

    while True:
        length = shortest_prefix(len(ranking), passes, first=shortest, guess=guess)
        every = length == len(ranking)
        if length is None or (every and not whole(length)):
            if not search_set.set_aside():
                return None
            shortest, answered = begun, False
        elif not every and not whole(length):
            shortest = length + 1
        else:
            # The second emulator opens a session for each plan: it is asked about what is left.
            second = search_set.ask_second(frozenset(ranking[:length]), within(length))
            if second is None or second.verdict.passed or every:
                return length
            shortest = longer(strength, length, 1.0 / second.score)
            if shortest == len(ranking) and search_set.set_aside():
                shortest = length
            search_set.forget(below=shortest)
            answered = False


def shrunk(
    search_set: SearchSet, ranked: Sequence[str], within: float, workers: int
) -> Mapping[str, Evaluation] | None:
    """A part of ``ranked`` whose every pin is needed, each with the evaluation that shows it.

    None where ``ranked`` does not keep ``within`` that share of the tolerance itself, or nothing
    was proved in the evaluations that it may take.
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
    return minimal.proof if set(minimal.proof) == minimal.pinned else None


def final_validation(
    problem: Problem, context: Context, plan: PrecisionPlan, limit: float
) -> tuple[Refusal | None, Validation | None]:
    """What refuses ``plan``, or else what it holds on by both emulators.

    What an engine decides is validated there: of it the second emulator is asked about the given
    inputs.
    """
    if context.engine is None:
        judges, test = [context.evaluator, context.second], next_test(problem, context)
        against, validation = put_to_test(problem, context, judges, plan, test, limit)
        if against is not None:
            context.refused.add(plan)
        return against, validation
    return refused_by(problem, context, [context.second], plan, limit, problem.samples), None
