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
from bisect_trt.steps.failing_inputs import UnseenInputs
from bisect_trt.steps.problem import Problem
from bisect_trt.steps.search_set import Refusal, SearchSet, all_in_fp32
from bisect_trt.steps.sensitivity import TIME_BUDGET_S, SensitivityRows
from bisect_trt.steps.validation import put_to_test, refused_by
from bisect_trt.steps.validation_inputs import next_test, set_size, wanted_of_unseen


@dataclass(frozen=True)
class RobustSet:
    """``pinned`` with the tests that it passed. ``proof`` maps pins to an evaluation of the set
    without them that fails on some sample; ``limit`` is the share of the tolerance that it was held
    to.

    ``prefix`` is the length of the ranking's prefix that it comes from; ``ranked`` is true if not
    every pin is proved: the set was cut from the ranking.
    ``validation`` is None where new copies refused every set.
    """

    pinned: frozenset[str]
    proof: Mapping[str, Evaluation]
    limit: float
    validation: Validation | None
    prefix: int
    ranked: bool


MARGIN, SHRINK_MARGIN = 0.95, 0.8
"""Parts of their room that a prefix, and a set that was chosen freely, must keep to on the search
set, by trial on two text models: the freer the choice, the more of it is luck."""


def margin(problem: Problem, context: Context) -> float:
    """The part of its room that a prefix is held to: all of it, which is no margin, where a point
    of the trade-off curve is picked, or the given inputs are so many that they bound the share
    asked for by themselves. Prefixes are nested, so that little is left to luck then: a detector
    with 200 pages has 96 pins so and 133 with a margin, on 99 and 100 % of unseen pages. For an
    engine, which errs a little otherwise, a margin is kept: what it refuses costs a build.
    """
    if problem.settings.pick is not None:
        return 1.0
    sets = len(problem.samples) // set_size(problem)
    bound = lower_bound(at_least(problem.settings.asked_of_given, sets), sets)
    return 1.0 if bound >= wanted_of_unseen(problem) and context.engine is None else MARGIN


_GLANCE = 4
"""Samples of each kind by which a prefix is told to be too short, or passed for now."""

SHRINK_EVALUATIONS = 32
"""Shrinking takes so many evaluations, and then one a pin to prove it: a count, and not the clock,
so that the same command gives the same answer. What they cannot bring to an end is not given, and a
prefix of so many pins that they could not is not shrunk: of two such sets that new copies passed,
one of 295 pins shrunk to 248 and one of 50 to 32, neither held on 95 % of unseen inputs."""

MOST_SHRUNK = SHRINK_EVALUATIONS - 2
"""Two of the evaluations are of all pins and of none."""


def shortest_passing(
    search_set: SearchSet,
    ranking: Sequence[str],
    room: Headroom,
    shortest: int,
    strength: Sequence[float],
    guess: int = 0,
) -> int | None:
    """How many of the ranking, ``shortest`` at least, pass the search set with the room's margin by
    both emulators; all of it where only that passes, and without one, since what all pins leave is
    no rounding of a layer's.

    Most prefixes are told by the samples that did worst; what they pass all others must pass too.
    The second emulator, which opens a session for each plan, is asked about what is left. Copies
    that all pins miss are set aside where they stand in the way.
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
    """A part of ``ranked`` of which no single pin can be left out on the search set ``within`` that
    share of the tolerance, each with the evaluation that shows it; None where ``ranked`` does not
    keep to it itself, or nothing was proved in so many evaluations.
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
    """What refuses ``plan``, or else what it holds on by both emulators. What FP32 as a whole
    misses too refuses nothing.

    What an engine decides is tested there: of it the second emulator is asked about the given
    inputs.
    """
    if context.engine is not None:
        judges, given = [context.second], problem.samples
        return refused_by(problem, context, judges, plan, limit, given), None
    judges, test = [context.evaluator, context.second], next_test(problem, context)
    against, validation = put_to_test(
        problem, context, judges, plan, test, limit, all_in_fp32(problem, plan)
    )
    if against is not None:
        context.refused.add(plan)
    return against, validation


_NEAR = 0.1
"""A point that is picked is found to a tenth of its pins."""


def smaller(
    problem: Problem,
    context: Context,
    search_set: SearchSet,
    ranking: Sequence[str],
    left: Sequence[float],
    room: Headroom,
    found: RobustSet,
    refused: int,
    rounds: int,
) -> RobustSet:
    """``found``, or a shorter prefix that passes a test too: a point of the trade-off curve is
    picked for being small, and what follows a set that was refused is up to twice as large.
    """
    try:
        while rounds and context.engine is None and found.prefix - refused > found.prefix * _NEAR:
            rounds -= 1
            middle = (refused + found.prefix) // 2
            length = shortest_passing(search_set, ranking, room, middle, left)
            if length is None or length >= found.prefix:
                break
            pins = frozenset(ranking[:length])
            against, validation = final_validation(
                problem, context, search_set.base.with_pins(pins), room.limit
            )
            if against is None:
                found = RobustSet(pins, {}, room.kept, validation, length, True)
            else:
                search_set.add(against)
                refused = length
                search_set.forget(below=length + 1)
    except BudgetSpentError:
        context.time.search_ended()
    return found


_LOOKS, _LOOKED_AT = 4, 4
"""Each at some of the inputs that half of the prefix misses."""

_RARE, _FAR, _WORST = 0.25, 4.0, 2
"""Where half of a prefix misses more of a search set's samples, or by fewer tolerances, it is long
because the error is spread; where it does not, what misses the worst of them alone is looked for.
"""

_GUILTY = 0.1
"""Of the layers: where more miss such a sample alone it is a near tie, and no layer's fault."""

_LONG = 0.5
"""A prefix of so many of the layers is looked at for values that are not finite, however many
samples have them."""


def without_rare_misses(
    problem: Problem,
    context: Context,
    search_set: SearchSet,
    ranking: Sequence[str],
    room: Headroom,
    shortest: int,
    strength: Mapping[str, float],
    length: int,
) -> tuple[list[str], int]:
    """A ranking, and its shortest prefix that passes: with those layers further in front that miss
    the requirement alone on a few inputs, where the prefix has many layers for their sake.
    """
    for _ in range(_LOOKS if _each_tells(problem) else 0):
        half = frozenset(ranking[: length // 2])
        if length <= MOST_SHRUNK or not half:
            break
        missed = _missed(search_set, half, length >= _LONG * len(ranking))
        again = as_searched(
            problem, _first_that_miss(problem, context, search_set.base, missed, ranking)
        )
        if again == list(ranking):
            break
        left = [strength.get(name, 0.0) for name in again]
        shorter = shortest_passing(search_set, again, room, shortest, left)
        if shorter is None or shorter >= length:
            break
        ranking, length = again, shorter
    return list(ranking), length


def after_refusal(
    problem: Problem,
    context: Context,
    base: PrecisionPlan,
    refused: Sequence[Refusal],
    ranking: Sequence[str],
) -> list[str]:
    """``ranking`` with those layers first that miss the requirement alone on what new copies
    refused, where that is few copies by far; else as it is.
    """
    if not _each_tells(problem):
        return list(ranking)
    size = set_size(problem)
    far = [r for r in refused if r.score >= _FAR and len(r.samples) <= _RARE * size * r.tested]
    samples = [sample for refusal in far for sample in refusal.samples[:_WORST]]
    most = max(1.0, _GUILTY * len(ranking))
    return as_searched(
        problem, _first_that_miss(problem, context, base, samples[:_WORST], ranking, most)
    )


def as_searched(problem: Problem, ranking: Sequence[str]) -> list[str]:
    """``ranking`` with the layers of an older plan first, in their order."""
    return sorted(ranking, key=lambda name: name not in problem.begin)


def _each_tells(problem: Problem) -> bool:
    """Whether none of the inputs may be missed, and each can be judged by itself."""
    return problem.settings.share_of_given >= 1.0 and not problem.requirements.tells_of_all


def _missed(search_set: SearchSet, pins: frozenset[str], long: bool) -> list[Sample]:
    """The worst of the samples that ``pins`` miss, where they are few and far off; else, of a
    ``long`` prefix, some of those with values that are not finite.
    """
    scores = search_set.scores(pins)
    missed = sorted((found for found in scores if not found[1] <= 1.0), key=lambda f: -f[1])
    if missed and len(missed) <= max(1.0, _RARE * len(scores)) and missed[0][1] >= _FAR:
        return [sample for sample, _ in missed[:_WORST]]
    broken = [sample for sample, score in missed if long and not math.isfinite(score)]
    return evenly(broken, _LOOKED_AT)


def _first_that_miss(
    problem: Problem,
    context: Context,
    base: PrecisionPlan,
    samples: Sequence[Sample],
    ranking: Sequence[str],
    most: float = math.inf,
) -> list[str]:
    """``ranking`` with the layers first that miss the requirement alone on some of ``samples``,
    the worst first; as it is where none does, more than ``most`` do by finite scores, or the layers
    are too many to be asked.
    """
    # By count and not by the clock, so that the same command gives the same answer.
    expected_s = len(samples) * len(ranking) * context.pace.usual_seconds
    if not samples or expected_s > TIME_BUDGET_S:
        return list(ranking)
    rows = SensitivityRows(problem, context, samples, base.with_pins(ranking))
    rows.take(list(ranking), math.inf)
    context.further_rows += rows.runs
    worst = {name: max(score for score, _ in its) for name, its in rows.rows.items()}
    guilty = {name for name, score in worst.items() if not score <= 1.0}
    finite = all(math.isfinite(worst[name]) for name in guilty)
    if finite and len(guilty) > most:
        return list(ranking)
    return sorted(ranking, key=lambda name: -worst[name] if name in guilty else 0.0)


MAX_ROUNDS = 6
"""Each ends with a test, or two; a round that was refused makes the next set larger (``longer``),
by at least 1, 2, 4 ... layers: by one layer a round a small set would not get anywhere."""


def search_robustly(
    problem: Problem,
    context: Context,
    base: PrecisionPlan,
    ranking: Sequence[str],
    strength: Mapping[str, float],
    unseen: UnseenInputs,
    room: Headroom,
    fewest: int = 0,
) -> RobustSet | None:
    """The set, tested; None where even all pins miss the requirement within ``room``."""
    search_set = SearchSet(problem, context, base, unseen.samples)
    if unseen.refused is not None:
        search_set.add(unseen.refused)
    try:
        return _in_rounds(problem, context, search_set, ranking, strength, room, fewest)
    except BudgetSpentError:
        # The smallest prefix that passed is an answer at any time; its test comes at the end of the
        # run, as all pins' does where none has passed yet.
        context.time.search_ended()
        found = search_set.smallest
        if found is None or len(found) < fewest:
            found = frozenset(ranking)
        return RobustSet(found, {}, room.kept, None, len(found), True)


def _in_rounds(
    problem: Problem,
    context: Context,
    search_set: SearchSet,
    ranking: Sequence[str],
    strength: Mapping[str, float],
    room: Headroom,
    fewest: int,
) -> RobustSet | None:
    """The set after rounds of search and test."""
    ranking = as_searched(problem, ranking)
    looked = False
    # An older plan's pins are a guess, from which fewer are tried too.
    base, shortest, guess = search_set.base, fewest, len(problem.begin)
    left = [strength.get(name, 0.0) for name in ranking]
    best: RobustSet | None = None
    for tried in range(MAX_ROUNDS):
        length = shortest_passing(search_set, ranking, room, shortest, left, guess)
        guess = 0
        if length is None:
            break
        if not looked:
            looked = True
            ranking, length = without_rare_misses(
                problem, context, search_set, ranking, room, shortest, strength, length
            )
            left = [strength.get(name, 0.0) for name in ranking]
        refused: list[Refusal] = []
        ranked = ranking[:length]
        for candidate in _candidates(problem, context, search_set, ranked, room):
            if len(candidate.pinned) < fewest:
                continue
            plan = base.with_pins(candidate.pinned)
            pins = counted(len(candidate.pinned), "pin")
            context.tell(f"{pins}, new copies")
            against, validation = final_validation(problem, context, plan, room.limit)
            if against is None and problem.settings.pick is not None and best is not None:
                found, rounds = replace(candidate, validation=validation), MAX_ROUNDS - tried - 1
                return smaller(
                    problem, context, search_set, ranking, left, room, found, best.prefix, rounds
                )
            if against is None:
                return replace(candidate, validation=validation)
            context.tell(f"{pins} refused by new copies ({against.kind}): the search goes on")
            refused.append(against)
        for refusal in refused:
            search_set.add(refusal)
        best = RobustSet(frozenset(ranked), {}, room.kept, None, length, True)
        if length == len(ranking):
            break
        again = after_refusal(problem, context, base, refused, ranking)
        if not set(again[:length]) <= set(ranked):  # else what misses alone is pinned already
            ranking, left = again, [strength.get(name, 0.0) for name in again]
            search_set.forget(below=length + 1)
            continue
        # A search set that has learnt may still know too little.
        shortest = longer(left, length, room.kept / refused[-1].score, 2**tried)
        search_set.forget(below=shortest)
    return best


def _candidates(
    problem: Problem,
    context: Context,
    search_set: SearchSet,
    ranked: Sequence[str],
    room: Headroom,
) -> Iterator[RobustSet]:
    """What is worth a test: a smaller set of which every pin is proved, then the prefix ``ranked``
    itself; the prefix alone where it is too long for that, or where a point of the trade-off curve
    was asked for.
    """
    if problem.settings.pick is None and len(ranked) <= MOST_SHRUNK:
        proof = shrunk(search_set, ranked, room.within(SHRINK_MARGIN), context.evaluator.workers)
        if proof is not None:
            pins = frozenset(proof)
            held_to = room.within(SHRINK_MARGIN)
            yield RobustSet(pins, proof, held_to, None, len(ranked), False)
            if len(pins) == len(ranked):
                return
    yield RobustSet(frozenset(ranked), {}, room.kept, None, len(ranked), True)
