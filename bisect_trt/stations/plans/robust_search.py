"""A set of pins that holds on inputs nobody has shown, with a figure that says how sure we are.

Layers are ranked by the mean square, over several samples, of what each alone does to the most
disturbed outputs; the shortest prefix of that ranking which passes a panel (given inputs, copies
with redrawn roundings, variants) is a set that leaves little to luck, because the sets are nested.
It is made smaller where that can be proved: removals are judged on the panel with a margin. The
last word is said by fresh draws. A set that they refuse gives its failures to the panel, and the
search goes on; the confidence is split over the tests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from bisect_trt.core.machine.stop import BudgetSpentError
from bisect_trt.core.names import counted
from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.search.prefix import longer
from bisect_trt.search.tolerance_share import Room
from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.case.case import Case
from bisect_trt.stations.cause.unseen import Unseen
from bisect_trt.stations.draws.evidence import Refusal
from bisect_trt.stations.draws.panel import Panel
from bisect_trt.stations.plans.last_word import last_word
from bisect_trt.stations.plans.margins import SHRINK_MARGIN
from bisect_trt.stations.plans.panel_sets import MOST_SHRUNK, shortest_passing, shrunk
from bisect_trt.stations.plans.picked import smaller
from bisect_trt.stations.plans.rare_misses import after_refusal, as_searched, without_rare_misses
from bisect_trt.stations.plans.robust_set import RobustSet

MAX_ROUNDS = 6
"""Each ends with a test, or two; a round that was refused makes the next set larger (``longer``),
by at least 1, 2, 4 ... layers: by one layer a round a small set would not get anywhere."""


def search_robustly(
    case: Case,
    bench: Bench,
    base: PrecisionPlan,
    ranking: Sequence[str],
    strength: Mapping[str, float],
    unseen: Unseen,
    room: Room,
    fewest: int = 0,
) -> RobustSet | None:
    """The set, tested; None where even all pins miss the requirement within ``room``.

    Args:
        case: gives the inputs, and the share that is asked for.
        bench: what runs the plans; both emulators judge, also where an engine has the last word.
        base: the plan without pins.
        ranking: the layers, most harmful first.
        strength: the mean square of what each does to the outputs, where it was measured.
        unseen: what to search with, and what is known of everything lowered.
        room: the share of the tolerance that the emulators are held to, and what all pins use.
        fewest: a set of fewer pins is not given: an engine refused one.
    """
    panel = Panel(case, bench, base, unseen.samples)
    if unseen.refused is not None:
        panel.add(unseen.refused)
    try:
        return _in_rounds(case, bench, panel, ranking, strength, room, fewest)
    except BudgetSpentError:
        # The smallest prefix that passed is an answer at any time; its test comes at the end of the
        # run, as all pins' does where none has passed yet.
        bench.time.search_ended()
        found = panel.smallest
        if found is None or len(found) < fewest:
            found = frozenset(ranking)
        return RobustSet(found, {}, room.kept, None, len(found), True)


def _in_rounds(
    case: Case,
    bench: Bench,
    panel: Panel,
    ranking: Sequence[str],
    strength: Mapping[str, float],
    room: Room,
    fewest: int,
) -> RobustSet | None:
    """The set after rounds of search and test."""
    ranking = as_searched(case, ranking)
    looked = False
    # An older plan's pins are a guess, from which fewer are tried too.
    base, shortest, guess = panel.base, fewest, len(case.begin)
    left = [strength.get(name, 0.0) for name in ranking]
    best: RobustSet | None = None
    for tried in range(MAX_ROUNDS):
        length = shortest_passing(panel, ranking, room, shortest, left, guess)
        guess = 0
        if length is None:
            break
        if not looked:
            looked = True
            ranking, length = without_rare_misses(
                case, bench, panel, ranking, room, shortest, strength, length
            )
            left = [strength.get(name, 0.0) for name in ranking]
        refused: list[Refusal] = []
        ranked = ranking[:length]
        for candidate in _candidates(case, bench, panel, ranked, room):
            if len(candidate.pinned) < fewest:
                continue
            plan = base.with_pins(candidate.pinned)
            pins = counted(len(candidate.pinned), "pin")
            bench.tell(f"{pins}, fresh draws")
            against, holds = last_word(case, bench, plan, room.limit)
            if against is None and case.settings.pick is not None and best is not None:
                found, rounds = replace(candidate, holds=holds), MAX_ROUNDS - tried - 1
                return smaller(case, bench, panel, ranking, left, room, found, best.prefix, rounds)
            if against is None:
                return replace(candidate, holds=holds)
            bench.tell(f"{pins} refused by fresh draws ({against.kind}): the search goes on")
            refused.append(against)
        for refusal in refused:
            panel.add(refusal)
        best = RobustSet(frozenset(ranked), {}, room.kept, None, length, True)
        if length == len(ranking):
            break
        again = after_refusal(case, bench, base, refused, ranking)
        if not set(again[:length]) <= set(ranked):  # else what misses alone is pinned already
            ranking, left = again, [strength.get(name, 0.0) for name in again]
            panel.forget(below=length + 1)
            continue
        # A panel that has learnt may still know too little.
        shortest = longer(left, length, room.kept / refused[-1].score, 2**tried)
        panel.forget(below=shortest)
    return best


def _candidates(
    case: Case,
    bench: Bench,
    panel: Panel,
    ranked: Sequence[str],
    room: Room,
) -> Iterator[RobustSet]:
    """What is worth a test: a smaller set of which every pin is proved, then the prefix ``ranked``
    itself; the prefix alone where it is too long for that, or where a point of the frontier was
    asked for.
    """
    if case.settings.pick is None and len(ranked) <= MOST_SHRUNK:
        proof = shrunk(panel, ranked, room.within(SHRINK_MARGIN), bench.prober.workers)
        if proof is not None:
            pins = frozenset(proof)
            held_to = room.within(SHRINK_MARGIN)
            yield RobustSet(pins, proof, held_to, None, len(ranked), False)
            if len(pins) == len(ranked):
                return
    yield RobustSet(frozenset(ranked), {}, room.kept, None, len(ranked), True)
