"""What the reference gives before its session makes room for the second emulator's."""

from __future__ import annotations

from collections import deque

from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.case.case import Case
from bisect_trt.stations.draws.drawn import redraws, variants
from bisect_trt.stations.draws.fresh_test import FRONTIER, FRONTIER_DRAWS, planned_test, set_size


def draw_ahead(case: Case, bench: Bench) -> None:
    """Make the draws of the next test, and of the frontier, with their references, where the model
    has so many nodes that the reference's session and the second emulator's are open in turn: of
    60,000 nodes each takes 20 s to open. What the second emulator passes is tested next. Nothing is
    made twice.

    Args:
        case: the given samples.
        bench: where references come from.
    """
    if not case.reference.turns.many_nodes or case.settings.fitted:
        return
    test = planned_test(case, bench.tests, bench.pace.usual_seconds, last=False)
    # When the last one that is wanted is there, so many more are in work.
    more = bench.references.at_once(case.samples[0])
    tested = min(test.draws, test.enough + more)
    for stream, sets in ((test.stream, tested), (FRONTIER, FRONTIER_DRAWS + more)):
        count = sets * set_size(case)
        deque(variants(case, bench, stream, count), maxlen=0)
        deque(redraws(case, bench, stream, count, emulated=True), maxlen=0)
