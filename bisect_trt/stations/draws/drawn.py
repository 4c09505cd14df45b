"""Samples made from the given ones: what a robust search is made with, and fresh draws to test
on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np

from bisect_trt.core.errors import BadInputError
from bisect_trt.core.finding import Finding
from bisect_trt.core.lazy_arrays import LazyArrays
from bisect_trt.core.names import counted
from bisect_trt.core.sample import Sample
from bisect_trt.graph.model.inputs import input_specs
from bisect_trt.numerics.arrays import Arrays
from bisect_trt.numerics.draws.draws import (
    can_be_redrawn,
    can_redraw_lookups,
    redrawn,
    redrawn_lookups,
)
from bisect_trt.numerics.draws.variants import (
    is_own_kind,
    kinds_for,
    named_kinds,
    own_variant,
    variant,
)
from bisect_trt.numerics.rounding import STEPS
from bisect_trt.runners.ort.lookups import Lookups
from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.case.case import Case
from bisect_trt.stations.case.given_inputs import FEW_INPUTS
from bisect_trt.stations.case.samples import checked
from bisect_trt.stations.draws.usable import usable

Item = TypeVar("Item")

_REPEATS = 50
"""So many in a row that were made before: there are hardly others."""

SEARCH_STREAM = 0
"""The draws that are searched with; tests use the streams from 1 on, which no search has seen."""


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
    few = _some(case, count, stream)
    if case.moves_inputs:
        sources = [s for s in few if can_be_redrawn(s.arrays, case.graph.discrete)]
        made = _redrawn(case, sources, stream, partial(_redraw, case))
    elif emulated and case.moves_lookups:
        sources = [s for s in few if can_redraw_lookups(case.lookups.of(s))]
        made = _redrawn(case, sources, stream, partial(_redraw_lookups, case.lookups))
    else:
        return iter(())
    return _unlike_given(case, bench, made, count if sources else 0, "redrawn copies")


def movable(case: Case, *, emulated: bool) -> bool:
    """Whether :func:`redraws` makes copies of some given input.

    Args:
        case: the given samples.
        emulated: as there.
    """
    return case.moves_inputs or (emulated and case.moves_lookups)


def variants(case: Case, bench: Bench, stream: int, count: int) -> Iterator[Sample]:
    """``count`` variants of the given samples; none where there are inputs enough, or no kind fits.
    However few of them are looked at, they are of any sample and any kind.

    Args:
        case: the given samples.
        bench: where references come from.
        stream: which draws; no two streams share one.
        count: how many.

    Raises:
        BadInputError: of the search's stream: kinds were asked for by name and make none, or the
            user's function makes what the model does not take. Later it would cost the answer.
    """
    if not wants_variants(case) or not count:
        return iter(())
    few = _some(case, count, stream)
    kinds = {s.digest: _kinds(case, s) for s in few}
    sources = [s for s in few if kinds[s.digest]]
    refused = stream == SEARCH_STREAM and case.settings.variants != "auto"
    if not sources:
        if case.settings.variants != "auto":
            message = f"--variants {case.settings.variants}: changes none of these inputs"
            if refused and len(few) == len(case.samples):
                raise BadInputError(f"{message}; name others, or none")
            bench.note(Finding("variants", "", f"{message}, so no variants were tested"))
        return iter(())
    made = _variants(case, sources, kinds, stream)
    if stream != SEARCH_STREAM and not case.requirements.of_sets:
        made = _different(bench, made)
    found = _unlike_given(case, bench, made, count, "variants")
    return _some_at_least(case, found) if refused and count else found


def _different(bench: Bench, made: Iterator[Sample]) -> Iterator[Sample]:
    """Those of ``made`` that are like none before them: of a few token ids, or by a function
    without chance, there are not so many, and one that was tested tells nothing the second time.
    """
    seen, repeats = set[str](), 0
    for sample in made:
        if sample.digest not in seen:
            seen.add(sample.digest)
            repeats = 0
            yield sample
        elif (repeats := repeats + 1) > _REPEATS:
            message = (
                f"no more than {counted(len(seen), 'variant')} could be told apart: there are "
                "hardly more of these inputs and kinds, and the search may have seen some of them"
            )
            bench.note(Finding("variants", "", message))
            return


def _some_at_least(case: Case, found: Iterator[Sample]) -> Iterator[Sample]:
    """``found``, of which there must be some: what was asked for by name is not left out."""
    for first in found:
        yield first
        yield from found
        return
    raise BadInputError(
        f"--variants {case.settings.variants}: the first that were made were copies of a given "
        "input, or such that the model cannot be run on them or gives nothing finite; name others, "
        "or none"
    )


def _unlike_given(
    case: Case, bench: Bench, made: Iterator[Sample], count: int, what: str
) -> Iterator[Sample]:
    """The first ``count`` usable ones that are none of the given inputs: those are known."""
    # A set is one of each source, and none is left out of it.
    alone = not case.requirements.of_sets
    given = frozenset(sample.digest for sample in case.samples if alone)
    yield from usable(bench, made, count, given, what)


def wants_variants(case: Case) -> bool:
    """Whether variants are tested: asked for by name, or left to the number of inputs. Where no
    copy can be redrawn nothing else would be tested.
    """
    asked = case.settings.variants
    if asked == "auto":
        few = len(case.samples) < FEW_INPUTS
        return few or not movable(case, emulated=not case.on_engine)
    return asked != "none"


def _kinds(case: Case, sample: Sample) -> tuple[str, ...]:
    fitting = kinds_for(sample.arrays, case.graph.discrete)
    asked = case.settings.variants
    if asked == "auto":
        return fitting
    return tuple(k for k in named_kinds(asked) if k in fitting or is_own_kind(k))


def _seed(case: Case, *numbers: int) -> list[int]:
    """Of a run's chance for one purpose. A search that begins at an older plan draws other copies
    than that plan's: those chose its pins, and would test nothing.
    """
    return [*case.chance, *numbers]


def _some(case: Case, most: int, stream: int) -> list[Sample]:
    """At most ``most`` of the given inputs, in their order, chosen by lot."""
    samples = case.samples
    if len(samples) <= most:
        return list(samples)
    lot = np.random.default_rng(_seed(case, stream, 3))
    return [samples[i] for i in sorted(lot.choice(len(samples), most, replace=False))]


def _in_turn(case: Case, items: Sequence[Item], stream: int) -> Iterator[tuple[int, Item]]:
    """Numbers from 0 on with one of ``items`` each, of which all have their turn before one has
    its next. A test may end after any number of draws, and bounds the share of all of them: what
    comes first has to be drawn by lot, for inputs that are sorted would be judged by the first.
    """
    for turn in range(2**31 if items else 0):
        order = np.arange(len(items))
        if not case.requirements.of_sets:
            order = np.random.default_rng(_seed(case, stream, turn, 4)).permutation(order)
        for place, item in enumerate(order.tolist()):
            yield turn * len(items) + place, items[item]


def _redrawn(
    case: Case,
    sources: list[Sample],
    stream: int,
    redraw: Callable[[Sample, list[int]], Arrays],
) -> Iterator[Sample]:
    for number, source in _in_turn(case, sources, stream):
        name = f"{source.name}, redrawn {stream}.{number}"
        made = partial(redraw, source, _seed(case, stream, number, 1))
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


def _variants(
    case: Case, sources: list[Sample], kinds: dict[str, tuple[str, ...]], stream: int
) -> Iterator[Sample]:
    shuffled, discrete = not case.requirements.of_sets, case.graph.discrete
    most = max(len(fitting) for fitting in kinds.values())
    # A set is one variant of each source, all of one kind where it fits: the kinds go by lot.
    order = np.random.default_rng(_seed(case, stream, 5)).permutation(most).tolist()
    pairs = [
        (source, kinds[source.digest][number % len(kinds[source.digest])])
        for number in order
        for source in sources
        if not shuffled or number < len(kinds[source.digest])
    ]
    specs, seen = input_specs(case.graph.proto), set[str]()
    for number, (source, kind) in _in_turn(case, pairs, stream):
        name = f"{source.name}, {kind} {stream}.{number}"
        made = partial(_vary, source, kind, sources, _seed(case, stream, number, 2), discrete)
        if not is_own_kind(kind):
            yield Sample(name, LazyArrays(made), True)
            continue
        # A function of the user's may give something else the second time.
        sample = Sample(name, made(), True)
        told = replace(sample, name=f"--variants {kind}: {source.name}")
        if stream == SEARCH_STREAM:
            checked(told, specs, case.settings.infinite)
        if stream == SEARCH_STREAM and kind not in seen:
            seen.add(kind)
            _refuse_unseeded(kind, sample, made)
        yield sample


def _refuse_unseeded(kind: str, sample: Sample, made: Callable[[], Arrays]) -> None:
    """A repeated command would test other variants, and an interrupted one begin again.

    Raises:
        BadInputError: the user's function gave something else for the same generator.
    """
    if Sample(sample.name, made(), True).digest != sample.digest:
        raise BadInputError(
            f"--variants {kind}: not deterministic: from the same inputs and generator it gave two "
            "variants; let it take all its chance from the generator that it is given"
        )


def _vary(
    source: Sample,
    kind: str,
    sources: list[Sample],
    seed: list[int],
    discrete: frozenset[str],
) -> Arrays:
    random = np.random.default_rng(seed)
    if is_own_kind(kind):
        return own_variant(kind, source.arrays, random)
    others = [s.arrays for s in sources if s is not source]
    return variant(kind, source.arrays, others, random, discrete)
