"""Copies of the given inputs in which only roundings change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from bisect_trt.core.lazy_arrays import LazyArrays
from bisect_trt.core.sample import Sample
from bisect_trt.numerics.arrays import Arrays
from bisect_trt.numerics.draws.draws import (
    can_be_redrawn,
    can_redraw_lookups,
    redrawn,
    redrawn_lookups,
)
from bisect_trt.numerics.rounding import STEPS
from bisect_trt.runners.ort.lookups import Lookups
from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.case.case import Case
from bisect_trt.stations.draws.by_lot import (
    in_turn,
    seed_of,
    some_of_given,
    unlike_given,
)


def redraws(
    case: Case, bench: Bench, stream: int, count: int, *, emulated: bool
) -> Iterator[Sample]:
    """``count`` copies of the given samples, moved so little that only roundings change; none where
    nothing can be moved. However few of them are looked at, they are copies of any of the samples.

    Args:
        case: the given samples.
        bench: where references come from.
        stream: which draws; no two streams share one.
        count: how many.
        emulated: whether only emulators will run them: an engine holds its tables as constants, and
            takes no copy of which what it looks up was moved.
    """
    # Of many inputs no more are looked at than there will be copies: each may have to be read.
    few = some_of_given(case, count, stream)
    if case.moves_inputs:
        sources = _sources(
            case, few, [s for s in few if can_be_redrawn(s.arrays, case.graph.discrete)]
        )
        made = _redrawn(case, sources, stream, partial(_redraw, case))
    elif emulated and case.moves_lookups:
        sources = _sources(case, few, [s for s in few if can_redraw_lookups(case.lookups.of(s))])
        made = _redrawn(case, sources, stream, partial(_redraw_lookups, case.lookups))
    else:
        return iter(())
    return unlike_given(case, bench, made, count if sources else 0, "redrawn copies")


def _sources(case: Case, given: list[Sample], movable: list[Sample]) -> list[Sample]:
    """The samples that copies are made of: a set that is judged together is one of each, and what
    cannot be moved is itself in it.
    """
    return given if case.requirements.of_sets and movable else movable


def movable(case: Case, *, emulated: bool) -> bool:
    """Whether :func:`redraws` makes copies of some given input.

    Args:
        case: the given samples.
        emulated: as there.
    """
    return case.moves_inputs or (emulated and case.moves_lookups)


def _redrawn(
    case: Case,
    sources: list[Sample],
    stream: int,
    redraw: Callable[[Sample, list[int]], Arrays],
) -> Iterator[Sample]:
    for number, source in in_turn(case, sources, stream):
        name = f"{source.name}, redrawn {stream}.{number}"
        made = partial(redraw, source, seed_of(case, stream, number, 1))
        yield Sample(name, LazyArrays(made), True)


def _redraw(case: Case, source: Sample, seed: list[int]) -> Arrays:
    return redrawn(
        source.arrays,
        np.random.default_rng(seed),
        step=STEPS[case.settings.precision],
        discrete=case.graph.discrete,
    )


def _redraw_lookups(lookups: Lookups, source: Sample, seed: list[int]) -> Arrays:
    moved = redrawn_lookups(lookups.of(source), np.random.default_rng(seed))
    return {**source.arrays, **moved}
