"""How much of its room a set is held to on the panel, so that it holds on other inputs too."""

from __future__ import annotations

from bisect_trt.core.holds import at_least
from bisect_trt.numerics.confidence import lower_bound
from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.case.case import Case
from bisect_trt.stations.draws.fresh_test import set_size, wanted_of_unseen

MARGIN, SHRINK_MARGIN = 0.95, 0.8
"""Parts of their room that a prefix, and a set that was chosen freely, must keep to on the panel,
by trial on two text models: the freer the choice, the more of it is luck."""


def margin(case: Case, bench: Bench) -> float:
    """The part of its room that a prefix is held to: all of it, which is no margin, where a point
    of the frontier is picked, or the given inputs are so many that they bound the share asked for
    by themselves. Prefixes are nested, so that little is left to luck then: a detector with 200
    pages has 96 pins so and 133 with a margin, on 99 and 100 % of unseen pages. For an engine,
    which errs a little otherwise, a margin is kept: what it refuses costs a build.

    Args:
        case: gives the inputs, and says how many must hold.
        bench: knows whether an engine decides.
    """
    if case.settings.pick is not None:
        return 1.0
    sets = len(case.samples) // set_size(case)
    bound = lower_bound(at_least(case.settings.asked_of_given, sets), sets)
    return 1.0 if bound >= wanted_of_unseen(case) and bench.engine is None else MARGIN
