"""A smaller set than one that passed, where a point of the frontier is picked."""

from __future__ import annotations

from collections.abc import Sequence

from bisect_trt.core.machine.stop import BudgetSpentError
from bisect_trt.search.tolerance_share import Room
from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.case.case import Case
from bisect_trt.stations.draws.panel import Panel
from bisect_trt.stations.plans.last_word import last_word
from bisect_trt.stations.plans.panel_sets import shortest_passing
from bisect_trt.stations.plans.robust_set import RobustSet

_NEAR = 0.1
"""A point that is picked is found to a tenth of its pins."""


def smaller(
    case: Case,
    bench: Bench,
    panel: Panel,
    ranking: Sequence[str],
    left: Sequence[float],
    room: Room,
    found: RobustSet,
    refused: int,
    rounds: int,
) -> RobustSet:
    """``found``, or a shorter prefix that passes a test too: a point of the frontier is picked for
    being small, and what follows a set that was refused is up to twice as large.

    Args:
        case: says what is picked.
        bench: what runs the plans.
        panel: asks about sets.
        ranking: the layers, most harmful first.
        left: the mean square of each one's effect, in that order.
        room: the share of the tolerance that a set is held to.
        found: the prefix that passed.
        refused: the length of the longest that did not.
        rounds: how many tests may be made.
    """
    try:
        while rounds and bench.engine is None and found.prefix - refused > found.prefix * _NEAR:
            rounds -= 1
            middle = (refused + found.prefix) // 2
            length = shortest_passing(panel, ranking, room, middle, left)
            if length is None or length >= found.prefix:
                break
            pins = frozenset(ranking[:length])
            against, holds = last_word(case, bench, panel.base.with_pins(pins), room.limit)
            if against is None:
                found = RobustSet(pins, {}, room.kept, holds, length, True)
            else:
                panel.add(against)
                refused = length
                panel.forget(below=length + 1)
    except BudgetSpentError:
        bench.time.search_ended()
    return found
