"""The perturbed and augmented inputs of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from itertools import islice, takewhile
from typing import TypeVar

import numpy as np

from bisect_trt.base.display import counted
from bisect_trt.base.errors import BadInputError, RunnerFailedError
from bisect_trt.base.outcomes import Finding
from bisect_trt.base.sample import LazyArrays, Sample
from bisect_trt.evaluate.cache import Row
from bisect_trt.inputs.augmentations import (
    is_own_kind,
    kinds_for,
    named_kinds,
    own_variant,
    variant,
)
from bisect_trt.inputs.perturbations import (
    can_be_redrawn,
    can_redraw_lookups,
    redrawn,
    redrawn_lookups,
)
from bisect_trt.inputs.samples import FEW_INPUTS, checked
from bisect_trt.metrics.arrays import Arrays
from bisect_trt.metrics.rounding import STEPS
from bisect_trt.model.inputs import input_specs
from bisect_trt.runners.concurrency import side_by_side
from bisect_trt.runners.reference import Lookups
from bisect_trt.steps.context import Bench
from bisect_trt.steps.problem import Case

_IN_A_ROW, _OF_BUDGET = 20, 0.1


def usable(
    bench: Bench,
    samples: Iterator[Sample],
    count: int,
    but: frozenset[str] = frozenset(),
    what: str = "",
) -> Iterator[Sample]:
    """The first ``count`` whose reference can be computed and is finite where it should be;
    remembered, so that a repeated command need not ask the model. Gives up after many in a row that
    are not.

    Args:
        bench: where references come from.
        samples: read no further than ``count`` needs, whatever the number of cores: a function of
            the user's may make them.
        count: how many.
        but: digests of samples that are not usable.
        what: they are, for the note that there are no more of them; blank for none.
    """
    refused = 0
    while count:
        looked_at = 0
        for sample, key, known, fit in _looked_at(bench, islice(samples, count), but):
            looked_at += 1
            if not known:
                bench.journal.record_later(Row(key, "usable", fit))
            if fit:
                refused, count = 0, count - 1
                yield sample
            elif (refused := refused + 1) > _IN_A_ROW:
                if what:
                    message = (
                        f"{what}: no more were made, for of {refused} in a row each was a copy of "
                        "a given input, or the model cannot be run on it or gives nothing finite"
                    )
                    bench.note(Finding("draws", "", message))
                return
        if not looked_at:
            return


def check_runs(bench: Bench, samples: Sequence[Sample]) -> None:
    """Refuse samples that the model cannot be run on, before a search that they are no part of: a
    plan would be blamed for what the reference cannot do. Remembered, as by :func:`usable`. Takes
    no more than a tenth of a run's budget.

    Raises:
        RunnerFailedError: with ONNX Runtime's words; names the first such sample.
    """
    until = time.monotonic() + _OF_BUDGET * bench.time.left_s
    keys = {s.digest: bench.prober.key("runs", s.digest) for s in samples}
    new = [s for s in samples if bench.journal.recall(keys[s.digest]) is None]

    def look(sample: Sample) -> Sample:
        bench.references.of(sample)
        return sample

    in_time = takewhile(lambda _: time.monotonic() < until, new)
    for done, sample in enumerate(side_by_side(look, in_time, bench.references.at_once), 1):
        bench.journal.record_later(Row(keys[sample.digest], "runs", True))
        bench.observer.progress(done, len(new), f"{sample.name}, kept apart, can be run")


def _looked_at(
    bench: Bench, samples: Iterator[Sample], but: frozenset[str]
) -> Iterator[tuple[Sample, str, bool, bool]]:
    """Each with its key in the journal, whether that need not be told, and whether it is fit."""

    def told(sample: Sample) -> tuple[Sample, str, bool | None]:
        key = bench.prober.key("usable", sample.digest, *bench.undefined)
        if sample.digest in but:
            return sample, key, False
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
    bench.time.check()
    try:
        outputs = bench.references.of(sample)
    except RunnerFailedError:
        return False
    floats = {n: a for n, a in outputs.items() if a.dtype.kind == "f"}
    if not all(bool(np.isfinite(a).any()) or a.size == 0 for a in floats.values()):
        return False
    # A copy that has left what the model is made for says nothing of one that has not.
    new = [a for n, a in floats.items() if sample.drawn and n not in bench.undefined]
    return not any(bool(np.isnan(a).any()) for a in new)


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
