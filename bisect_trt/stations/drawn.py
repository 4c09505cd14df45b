"""Samples made from the given ones: what a robust search is made with, and fresh draws to test
on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice

import numpy as np

from bisect_trt.core.errors import RunnerFailedError
from bisect_trt.core.lazy_arrays import LazyArrays
from bisect_trt.core.sample import Sample, evenly
from bisect_trt.numerics.draws import (
    Arrays,
    can_be_redrawn,
    can_redraw_lookups,
    is_own_kind,
    kinds_for,
    own_variant,
    redrawn,
    redrawn_lookups,
    variant,
)
from bisect_trt.probe.journal import Row
from bisect_trt.runners.ort_lookups import Lookups
from bisect_trt.runners.side_by_side import side_by_side
from bisect_trt.stations.bench import Bench
from bisect_trt.stations.case import FEW_INPUTS, Case

REDRAWN, VARIANTS, HOLDOUT = "redrawn", "variants", "holdout"

SEARCH_STREAM = 0
"""The draws that are searched with; tests use the streams from 1 on, which no search has seen."""


def redraws(
    case: Case, bench: Bench, stream: int, count: int, *, emulated: bool
) -> Iterator[Sample]:
    """``count`` copies of the given samples in turn, moved so little that only roundings change;
    none where nothing can be moved.

    Args:
        case: the given samples.
        bench: where references come from.
        stream: which draws; no two streams share one.
        count: how many.
        emulated: whether only emulators will run them: an engine holds its tables as constants, and
            takes no copy of which what it looks up was moved.
    """
    # Of many inputs no more are looked at than there will be copies: each may have to be read.
    few = evenly(case.samples, count)
    if case.moves_inputs:
        sources = [s for s in few if can_be_redrawn(s.arrays)]
        made = _redrawn(sources, stream, _redraw)
    elif emulated and case.moves_lookups:
        sources = [s for s in few if can_redraw_lookups(case.lookups.of(s))]
        made = _redrawn(sources, stream, partial(_redraw_lookups, case.lookups))
    else:
        return iter(())
    return usable(bench, made, count if sources else 0)


def movable(case: Case, *, emulated: bool) -> bool:
    """Whether :func:`redraws` makes copies of some given input.

    Args:
        case: the given samples.
        emulated: as there.
    """
    return case.moves_inputs or (emulated and case.moves_lookups)


def variants(case: Case, bench: Bench, stream: int, count: int) -> Iterator[Sample]:
    """``count`` variants of the given samples in turn, each kind in turn; none where there are
    inputs enough, or no kind fits.

    Args:
        case: the given samples.
        bench: where references come from.
        stream: which draws; no two streams share one.
        count: how many.
    """
    if not wants_variants(case):
        return iter(())
    kinds = {s.digest: _kinds(case, s) for s in evenly(case.samples, count)}
    sources = [s for s in evenly(case.samples, count) if kinds[s.digest]]
    if not sources:
        return iter(())
    return usable(bench, _variants(sources, kinds, stream), count)


def wants_variants(case: Case) -> bool:
    """Whether variants are tested: asked for by name, or left to the number of inputs."""
    asked = case.settings.variants
    if asked == "auto":
        return len(case.samples) < FEW_INPUTS
    return asked != "none"


def _kinds(case: Case, sample: Sample) -> tuple[str, ...]:
    fitting = kinds_for(sample.arrays)
    asked = case.settings.variants
    if asked == "auto":
        return fitting
    return tuple(k for k in asked.split(",") if k in fitting or is_own_kind(k))


def _redrawn(
    sources: list[Sample], stream: int, redraw: Callable[[Sample, list[int]], Arrays]
) -> Iterator[Sample]:
    for number in range(2**31):
        source = sources[number % len(sources)]
        name = f"{source.name}, redrawn {stream}.{number}"
        yield Sample(name, LazyArrays(partial(redraw, source, [stream, number, 1])), True)


def _redraw(source: Sample, seed: list[int]) -> Arrays:
    return redrawn(source.arrays, np.random.default_rng(seed))


def _redraw_lookups(lookups: Lookups, source: Sample, seed: list[int]) -> Arrays:
    moved = redrawn_lookups(lookups.of(source), np.random.default_rng(seed))
    return {**source.arrays, **moved}


def _variants(
    sources: list[Sample], kinds: dict[str, tuple[str, ...]], stream: int
) -> Iterator[Sample]:
    for number in range(2**31):
        source = sources[number % len(sources)]
        fitting = kinds[source.digest]
        # Each source goes through its kinds; sources and kinds may be as many, so not by one count.
        kind = fitting[(number // len(sources)) % len(fitting)]
        name = f"{source.name}, {kind} {stream}.{number}"
        made = partial(_vary, source, kind, sources, [stream, number, 2])
        # A function of the user's may give something else the second time.
        yield Sample(name, made() if is_own_kind(kind) else LazyArrays(made), True)


def _vary(source: Sample, kind: str, sources: list[Sample], seed: list[int]) -> Arrays:
    others = [s.arrays for s in sources if s is not source]
    make = own_variant if is_own_kind(kind) else variant
    return make(kind, source.arrays, others, np.random.default_rng(seed))


def usable(bench: Bench, samples: Iterator[Sample], count: int) -> Iterator[Sample]:
    """The first ``count`` whose reference can be computed and is finite where it should be;
    remembered, so that a repeated command need not ask the model. Gives up after many in a row that
    are not.

    Args:
        bench: where references come from.
        samples: read no further than ``count`` needs, whatever the number of cores: a function of
            the user's may make them.
        count: how many.
    """
    refused = 0
    while count:
        looked_at = 0
        for sample, key, known, fit in _looked_at(bench, islice(samples, count)):
            looked_at += 1
            if not known:
                bench.journal.record_later(Row(key, "usable", fit))
            if fit:
                refused, count = 0, count - 1
                yield sample
            elif (refused := refused + 1) > 20:
                return
        if not looked_at:
            return


def _looked_at(bench: Bench, samples: Iterator[Sample]) -> Iterator[tuple[Sample, str, bool, bool]]:
    """Each with its key in the journal, whether that knew it, and whether it is fit."""

    def told(sample: Sample) -> tuple[Sample, str, bool | None]:
        key = bench.prober.key("usable", sample.digest)
        found = bench.journal.recall(key)
        return sample, key, None if found is None else bool(found[0])

    def look(asked: tuple[Sample, str, bool | None]) -> tuple[Sample, str, bool, bool]:
        sample, key, fit = asked
        return sample, key, fit is not None, _has_reference(bench, sample) if fit is None else fit

    def room(asked: tuple[Sample, str, bool | None]) -> int:
        return bench.references.at_once(asked[0])

    for first in samples:
        yield look(told(first))
        at_once = bench.references.at_once(first)
        while bench.in_turn and (few := [told(s) for s in islice(samples, at_once)]):
            # All are done before another session takes its turn.
            yield from list(side_by_side(look, few, room))
        yield from side_by_side(look, map(told, samples), room)


def _has_reference(bench: Bench, sample: Sample) -> bool:
    try:
        outputs = bench.references.of(sample)
    except RunnerFailedError:
        return False
    floats = [a for a in outputs.values() if a.dtype.kind == "f"]
    return all(bool(np.isfinite(a).any()) or a.size == 0 for a in floats)
