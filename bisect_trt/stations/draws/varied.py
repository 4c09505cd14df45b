"""Variants of the given inputs: what a robust search is made with where they are few."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import replace
from functools import partial

import numpy as np

from bisect_trt.core.errors import BadInputError
from bisect_trt.core.finding import Finding
from bisect_trt.core.lazy_arrays import LazyArrays
from bisect_trt.core.names import counted
from bisect_trt.core.sample import Sample
from bisect_trt.graph.model.inputs import input_specs
from bisect_trt.numerics.arrays import Arrays
from bisect_trt.numerics.draws.variants import (
    is_own_kind,
    kinds_for,
    named_kinds,
    own_variant,
    variant,
)
from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.case.case import Case
from bisect_trt.stations.case.given_inputs import FEW_INPUTS
from bisect_trt.stations.case.samples import checked
from bisect_trt.stations.draws.by_lot import (
    SEARCH_STREAM,
    in_turn,
    seed_of,
    some_of_given,
    unlike_given,
)
from bisect_trt.stations.draws.redrawn import movable

_ITSELF = "as given"

_REPEATS = 50
"""So many in a row that were made before: there are hardly others."""


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
    few = some_of_given(case, count, stream)
    kinds = {s.digest: _kinds(case, s) for s in few}
    sources = [s for s in few if kinds[s.digest]]
    if sources and case.requirements.of_sets:  # what has no variant is itself in a set of each
        sources, kinds = few, {digest: fitting or (_ITSELF,) for digest, fitting in kinds.items()}
    refused = stream == SEARCH_STREAM and case.settings.variants != "auto"
    if not sources:
        if case.settings.variants != "auto":
            message = f"--variants {case.settings.variants}: changes none of these inputs"
            if refused and len(few) == len(case.samples):
                raise BadInputError(f"{message}; name others, or none")
            bench.note(Finding("variants", "", f"{message}, so no variants were tested"))
        return iter(())
    made = _variants(case, bench, sources, kinds, stream)
    if stream != SEARCH_STREAM and not case.requirements.of_sets:
        made = _new(bench, made, bench.variants_before(stream))
    found = unlike_given(case, bench, made, count, "variants")
    return _kept(bench, stream, _some_at_least(case, found) if refused and count else found)


def _kept(bench: Bench, stream: int, found: Iterator[Sample]) -> Iterator[Sample]:
    """``found``, of which no later stream will have any."""
    known = bench.variants_of(stream)
    for sample in found:
        known.add(sample.digest)
        yield sample


def _new(bench: Bench, made: Iterator[Sample], before: Set[str]) -> Iterator[Sample]:
    """Those of ``made`` that are like none in front of them nor any of ``before``: of a few token
    ids, of shifts along one axis, or by a function without chance, there are not so many. One that
    chose the plan, or was tested, tells nothing the second time.
    """
    seen, repeats = set[str](), 0
    for sample in made:
        if sample.digest not in seen and sample.digest not in before:
            seen.add(sample.digest)
            repeats = 0
            yield sample
        elif (repeats := repeats + 1) > _REPEATS:
            message = (
                f"no more than {counted(len(seen), 'variant')} could be made that the search and "
                "other tests had not seen: of these inputs and kinds there are hardly more"
            )
            if not bench.noted("few-variants"):  # the first says of how many
                bench.note(Finding("few-variants", "", message))
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
    fitting = kinds_for(sample.arrays, case.graph.discrete, case.lengths)
    asked = case.settings.variants
    if asked == "auto":
        return fitting
    return tuple(k for k in named_kinds(asked) if k in fitting or is_own_kind(k))


def _variants(
    case: Case,
    bench: Bench,
    sources: list[Sample],
    kinds: dict[str, tuple[str, ...]],
    stream: int,
) -> Iterator[Sample]:
    shuffled, discrete = not case.requirements.of_sets, case.graph.discrete
    most = max(len(fitting) for fitting in kinds.values())
    # A set is one variant of each source, all of one kind where it fits: the kinds go by lot.
    order = np.random.default_rng(seed_of(case, stream, 5)).permutation(most).tolist()
    pairs = [
        (source, kinds[source.digest][number % len(kinds[source.digest])])
        for number in order
        for source in sources
        if not shuffled or number < len(kinds[source.digest])
    ]
    specs, seen, failed = input_specs(case.graph.proto), set[str](), 0
    for number, (source, kind) in in_turn(case, pairs, stream):
        name = f"{source.name}, {kind} {stream}.{number}"
        seed = seed_of(case, stream, number, 2)
        made = partial(_vary, source, kind, sources, seed, discrete, case.lengths)
        if not is_own_kind(kind):
            yield Sample(name, LazyArrays(made), True)
            continue
        # A function of the user's may give something else the second time.
        try:
            sample = Sample(name, made(), True)
        except BadInputError as error:
            if stream == SEARCH_STREAM or not shuffled:  # a set is one of each
                raise
            # Hours may have been searched: what a rare draw does not get costs that draw.
            bench.time.check()
            if not failed:
                bench.note(Finding("variants", "", f"{error}; such variants are left out"))
            if (failed := failed + 1) > _REPEATS:
                return
            continue
        failed = 0
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
    lengths: Mapping[str, int],
) -> Arrays:
    random = np.random.default_rng(seed)
    if is_own_kind(kind):
        return own_variant(kind, source.arrays, random)
    if kind == _ITSELF:
        return source.arrays
    # By what is known of them: of hundreds none is read but the one that is chosen.
    others = [s.arrays for s in sources if s is not source and s.shapes == source.shapes]
    return variant(kind, source.arrays, others, random, discrete, lengths)
