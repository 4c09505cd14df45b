"""What the reference gives before its session makes room for the second emulator's."""

from __future__ import annotations

import math
from collections import deque
from itertools import islice

from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.case.case import Case
from bisect_trt.stations.draws.fresh_draws import Draws
from bisect_trt.stations.draws.fresh_test import (
    FRONTIER,
    FRONTIER_DRAWS,
    asked,
    planned_test,
    set_size,
)
from bisect_trt.stations.draws.redrawn import redraws
from bisect_trt.stations.draws.varied import variants


def draw_ahead(case: Case, bench: Bench) -> None:
    """Make the draws of the next test, and of the frontier of few inputs, with their references,
    where the model has so many nodes that the reference's session and the second emulator's are
    open in turn: of 60,000 nodes each takes 5 to 10 s to open. What the second emulator passes is
    tested next. Once for each test; not where there is a budget, which the search has first.

    Args:
        case: the given samples.
        bench: where references come from.
    """
    spared = case.settings.fitted or math.isfinite(bench.time.left_s)
    if not case.reference.turns.many_nodes or spared or bench.drawn_ahead > bench.tests:
        return
    bench.drawn_ahead = bench.tests + 1
    test = asked(case, planned_test(case, bench.tests, bench.pace.usual_seconds, last=False))
    draws = Draws(case, bench, [bench.prober, bench.second], test)
    for kind in draws.kinds:
        deque(islice(draws.of(kind), test.enough * set_size(case)), maxlen=0)
    # Of more inputs others are drawn, by how many draws the frontier turns out to have.
    if len(case.samples) <= FRONTIER_DRAWS and set_size(case) == 1:
        deque(variants(case, bench, FRONTIER, FRONTIER_DRAWS), maxlen=0)
        deque(redraws(case, bench, FRONTIER, FRONTIER_DRAWS, emulated=True), maxlen=0)
