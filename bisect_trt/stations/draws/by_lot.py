"""What all draws share: which inputs they are of, in which order, and by which chance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TypeVar

import numpy as np

from bisect_trt.core.finding import Finding
from bisect_trt.core.sample import Sample
from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.case.case import Case
from bisect_trt.stations.draws.usable import usable

Item = TypeVar("Item")

_SETS_IN_A_ROW = 20

SEARCH_STREAM = 0
"""The draws that are searched with; tests use the streams from 1 on, which no search has seen."""


def seed_of(case: Case, *numbers: int) -> list[int]:
    """Of a run's chance for one purpose. A search that begins at an older plan draws other copies
    than that plan's: those chose its pins, and would test nothing.
    """
    return [*case.chance, *numbers]


def some_of_given(case: Case, most: int, stream: int) -> list[Sample]:
    """Some of the given inputs, in their order, chosen by lot.

    Args:
        case: the given inputs.
        most: how many at most.
        stream: which draws they are for.
    """
    samples = case.samples
    if len(samples) <= most:
        return list(samples)
    lot = np.random.default_rng(seed_of(case, stream, 3))
    return [samples[i] for i in sorted(lot.choice(len(samples), most, replace=False))]


def in_turn(case: Case, items: Sequence[Item], stream: int) -> Iterator[tuple[int, Item]]:
    """Numbers from 0 on with one of ``items`` each, of which all have their turn before one has
    its next. A test may end after any number of draws, and bounds the share of all of them: what
    comes first has to be drawn by lot, for inputs that are sorted would be judged by the first.

    Args:
        case: whose chance it is; of sets the order stays.
        items: what to draw from.
        stream: which draws they are for.
    """
    for turn in range(2**31 if items else 0):
        order = np.arange(len(items))
        if not case.requirements.of_sets:
            order = np.random.default_rng(seed_of(case, stream, turn, 4)).permutation(order)
        for place, item in enumerate(order.tolist()):
            yield turn * len(items) + place, items[item]


def unlike_given(
    case: Case, bench: Bench, made: Iterator[Sample], count: int, what: str
) -> Iterator[Sample]:
    """The first ``count`` usable ones that are none of the given inputs: those are known.

    Args:
        case: the given inputs; a set is one of each, and none is left out of it.
        bench: where references come from.
        made: the draws.
        count: how many.
        what: they are, for the note that there are no more of them.
    """
    if not case.requirements.of_sets:
        given = frozenset(sample.digest for sample in case.samples)
        return usable(bench, made, count, given, what)
    return islice(_whole_sets(bench, made, len(case.samples), what), count)


def _whole_sets(bench: Bench, made: Iterator[Sample], size: int, what: str) -> Iterator[Sample]:
    """Those sets of ``size`` of which every one is usable, until several in a row are not."""
    refused = 0
    while len(one_set := list(islice(made, size))) == size:
        fit = list(usable(bench, iter(one_set), size))
        refused = 0 if len(fit) == size else refused + 1
        yield from fit if not refused else ()
        if refused > _SETS_IN_A_ROW:
            message = f"{what}: no more sets were made, for {refused} in a row could not be run"
            bench.note(Finding("draws", "", message))
            return
