"""Makes the perturbed and augmented inputs of a run, and leaves out what cannot be used."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from itertools import islice, takewhile
from typing import TypeVar

import numpy as np

from bisect_trt.base.display import counted
from bisect_trt.base.errors import BadInputError, RunnerFailedError
from bisect_trt.base.outcomes import Finding
from bisect_trt.base.sample import LazyArrays, RecentArrays, Sample
from bisect_trt.inputs.augmentations import (
    augmented_input,
    is_own_kind,
    kinds_for,
    named_kinds,
    own_augmentation,
)
from bisect_trt.inputs.perturbations import (
    can_be_perturbed,
    can_perturb_lookups,
    perturbed,
    perturbed_lookups,
)
from bisect_trt.inputs.samples import FEW_INPUTS, checked
from bisect_trt.metrics.arrays import Arrays
from bisect_trt.metrics.rounding import STEPS
from bisect_trt.model.inputs import input_specs
from bisect_trt.runners.concurrency import side_by_side
from bisect_trt.steps.context import Context
from bisect_trt.steps.problem import Problem

Item = TypeVar("Item")

SEARCH_STREAM = 0
"""The stream of the search's copies; validations use the streams from 1 on."""

_REFUSED_IN_A_ROW = 20
"""How many copies in a row may be unusable before no more are made."""

_REPEATED_IN_A_ROW = 50
"""How many copies in a row may be repeats, or fail, before no more are made."""

_AS_GIVEN = "as given"


def perturbs(
    problem: Problem, context: Context, stream: int, count: int, *, emulated: bool
) -> Iterator[Sample]:
    """``count`` copies of the given samples, moved so little that only roundings change.

    There are none where nothing can be moved. The first few are copies of random samples.
    """
    # Each of many inputs may have to be read: no more are looked at than there will be copies.
    few, discrete = _some_of_given(problem, count, stream), problem.graph.discrete
    lookups = problem.lookups

    def moved(source: Sample, seed: list[int]) -> Arrays:
        random = np.random.default_rng(seed)
        if not problem.moves_inputs:
            return {**source.arrays, **perturbed_lookups(lookups.of(source), random)}
        step = STEPS[problem.settings.precision]
        return perturbed(source.arrays, random, step=step, discrete=discrete)

    if problem.moves_inputs:
        sources = [s for s in few if can_be_perturbed(s.arrays, discrete)]
    elif emulated and problem.moves_lookups:
        sources = [s for s in few if can_perturb_lookups(lookups.of(s))]
    else:
        return iter(())
    if not sources:
        return iter(())
    if problem.requirements.of_sets:  # a set has each input, also those that cannot be moved
        sources = few

    def made() -> Iterator[Sample]:
        recent = RecentArrays()
        for number, source in _in_turn(problem, sources, stream):
            name = f"{source.name}, perturbed {stream}.{number}"
            arrays = partial(moved, source, _seed_of(problem, stream, number, 1))
            yield Sample(name, LazyArrays(arrays, recent), True)

    return _unlike_given(problem, context, made(), count, "perturbed copies")


def movable(problem: Problem, *, emulated: bool) -> bool:
    """Whether :func:`perturbs` makes copies of some given input."""
    return problem.moves_inputs or (emulated and problem.moves_lookups)


def augmented(problem: Problem, context: Context, stream: int, count: int) -> Iterator[Sample]:
    """``count`` augmented inputs of the given samples; none where no kind fits, or none are wanted.

    The first few are of random samples and kinds.

    Raises:
        BadInputError: in the search's stream, kinds given by name make none, or the user's
            function makes what the model does not take. Later it would cost the answer.
    """
    if not wants_augmented(problem) or not count:
        return iter(())
    few = _some_of_given(problem, count, stream)
    kinds = {s.digest: _kinds(problem, s) for s in few}
    sources = [s for s in few if kinds[s.digest]]
    choice, of_sets = problem.settings.augmented, problem.requirements.of_sets
    required = stream == SEARCH_STREAM and choice != "auto"
    if not sources:
        if choice != "auto":
            message = f"--augmented {choice}: changes none of these inputs"
            if required and len(few) == len(problem.samples):
                raise BadInputError(f"{message}; name others, or none")
            context.note(Finding("augmented", "", f"{message}, so no augmented inputs were tested"))
        return iter(())
    if of_sets:  # a set has each input: one that no kind fits is in it as given
        sources, kinds = few, {digest: fit or (_AS_GIVEN,) for digest, fit in kinds.items()}
    made = _augmented(problem, context, sources, kinds, stream)
    if stream != SEARCH_STREAM and not of_sets:
        made = _unused(context, made, context.augmented_before(stream))
    found = _unlike_given(problem, context, made, count, "augmented")
    return _noted(context, stream, _some_at_least(choice, found) if required else found)


def wants_augmented(problem: Problem) -> bool:
    """Whether augmented inputs are tested: by ``--augmented``, or where inputs are few."""
    choice = problem.settings.augmented
    if choice == "auto":
        few = len(problem.samples) < FEW_INPUTS
        # Where no input can be perturbed, nothing else would be tested.
        return few or not movable(problem, emulated=not problem.on_engine)
    return choice != "none"


def _kinds(problem: Problem, sample: Sample) -> tuple[str, ...]:
    fitting = kinds_for(sample.arrays, problem.graph.discrete, problem.lengths)
    choice = problem.settings.augmented
    if choice == "auto":
        return fitting
    return tuple(k for k in named_kinds(choice) if k in fitting or is_own_kind(k))


def _augmented(
    problem: Problem,
    context: Context,
    sources: list[Sample],
    kinds: Mapping[str, tuple[str, ...]],
    stream: int,
) -> Iterator[Sample]:
    of_sets = problem.requirements.of_sets
    most = max(len(fitting) for fitting in kinds.values())
    # A set is one augmented input of each source, all of one kind where it fits.
    order = np.random.default_rng(_seed_of(problem, stream, 5)).permutation(most).tolist()
    pairs = [
        (source, kinds[source.digest][number % len(kinds[source.digest])])
        for number in order
        for source in sources
        if of_sets or number < len(kinds[source.digest])
    ]
    by_user = _ByUser(problem, context, stream)
    recent = RecentArrays()
    for number, (source, kind) in _in_turn(problem, pairs, stream):
        name = f"{source.name}, {kind} {stream}.{number}"
        seed = _seed_of(problem, stream, number, 2)
        if not is_own_kind(kind):
            made = partial(_augment, problem, source, kind, sources, seed)
            yield Sample(name, LazyArrays(made, recent), True)
        elif (sample := by_user.made(name, source, kind, seed)) is not None:
            yield sample
        elif by_user.gave_up:
            return


def _augment(
    problem: Problem, source: Sample, kind: str, sources: list[Sample], seed: list[int]
) -> Arrays:
    if kind == _AS_GIVEN:
        return source.arrays
    # Shapes are known without reading: of hundreds of files only the chosen one is read.
    others = [s.arrays for s in sources if s is not source and s.shapes == source.shapes]
    random, discrete = np.random.default_rng(seed), problem.graph.discrete
    return augmented_input(kind, source.arrays, others, random, discrete, problem.lengths)


class _ByUser:
    """Makes augmented inputs by the user's functions, which the search's stream checks."""

    def __init__(self, problem: Problem, context: Context, stream: int) -> None:
        self._problem, self._context = problem, context
        self._searching = stream == SEARCH_STREAM
        self._specs = input_specs(problem.graph.proto)
        self._seen = set[str]()
        self._failed = 0

    @property
    def gave_up(self) -> bool:
        """Whether the functions failed many times in a row."""
        return self._failed > _REPEATED_IN_A_ROW

    def made(self, name: str, source: Sample, kind: str, seed: list[int]) -> Sample | None:
        """The input; None where the function failed in a validation, which costs one copy.

        The arrays are made at once: the function may give others the second time.
        """

        def arrays() -> Arrays:
            return own_augmentation(kind, source.arrays, np.random.default_rng(seed))

        try:
            sample = Sample(name, arrays(), True)
        except BadInputError as error:
            if self._searching or self._problem.requirements.of_sets:  # a set is one of each
                raise
            self._context.time.check()
            if not self._failed:
                message = f"{error}; such augmented inputs are left out"
                self._context.note(Finding("augmented", "", message))
            self._failed += 1
            return None
        self._failed = 0
        if self._searching:
            named = replace(sample, name=f"--augmented {kind}: {source.name}")
            checked(named, self._specs, self._problem.settings.infinite)
        if self._searching and kind not in self._seen:
            self._seen.add(kind)
            # Otherwise a repeated command would test other inputs and find nothing in the cache.
            if Sample(name, arrays(), True).digest != sample.digest:
                raise BadInputError(
                    f"--augmented {kind}: not deterministic: from the same inputs and generator it "
                    "gave two augmented inputs; let it take all its chance from the generator that "
                    "it is given"
                )
        return sample


def _noted(context: Context, stream: int, found: Iterator[Sample]) -> Iterator[Sample]:
    """``found``, whose digests are noted so that no later stream has them."""
    digests = context.augmented_of(stream)
    for sample in found:
        digests.add(sample.digest)
        yield sample


def _unused(context: Context, made: Iterator[Sample], before: Set[str]) -> Iterator[Sample]:
    """The samples of ``made`` that neither repeat an earlier one nor any of ``before``.

    A few token ids, or shifts along one axis, give few different inputs. One that the search or a
    test has used proves nothing the second time.
    """
    seen, repeats = set[str](), 0
    for sample in made:
        if sample.digest not in seen and sample.digest not in before:
            seen.add(sample.digest)
            repeats = 0
            yield sample
        elif (repeats := repeats + 1) > _REPEATED_IN_A_ROW:
            message = (
                f"no more than {counted(len(seen), 'augmented input')} could be made that the "
                "search and other tests had not seen: there are hardly more"
            )
            if not context.noted("few-augmented"):  # the first has the largest number
                context.note(Finding("few-augmented", "", message))
            return


def _some_at_least(choice: str, found: Iterator[Sample]) -> Iterator[Sample]:
    """``found``, which is refused if it is empty: kinds given by name must make something."""
    for first in found:
        yield first
        yield from found
        return
    raise BadInputError(
        f"--augmented {choice}: the first that were made were copies of a given input, or such "
        "that the model cannot be run on them or gives nothing finite; name others, or none"
    )


def _seed_of(problem: Problem, *numbers: int) -> list[int]:
    """The seed for one purpose, which differs from that of an older plan's search."""
    return [*problem.chance, *numbers]


def _some_of_given(problem: Problem, most: int, stream: int) -> list[Sample]:
    """At most ``most`` of the given inputs, chosen at random, in their order."""
    samples = problem.samples
    if len(samples) <= most:
        return list(samples)
    lot = np.random.default_rng(_seed_of(problem, stream, 3))
    return [samples[i] for i in sorted(lot.choice(len(samples), most, replace=False))]


def _in_turn(problem: Problem, items: Sequence[Item], stream: int) -> Iterator[tuple[int, Item]]:
    """``items`` in random order, then all again in another, each with a number from 0 on."""
    # A validation may end after any number of copies, and inputs may be sorted.
    for turn in range(2**31 if items else 0):
        order = np.arange(len(items))
        if not problem.requirements.of_sets:
            order = np.random.default_rng(_seed_of(problem, stream, turn, 4)).permutation(order)
        for place, item in enumerate(order.tolist()):
            yield turn * len(items) + place, items[item]


def _unlike_given(
    problem: Problem, context: Context, made: Iterator[Sample], count: int, what: str
) -> Iterator[Sample]:
    """The first ``count`` usable samples of ``made`` that are no copies of given inputs."""
    if not problem.requirements.of_sets:
        given = frozenset(sample.digest for sample in problem.samples)
        return usable(context, made, count, given, what)
    return islice(_whole_sets(context, made, len(problem.samples), what), count)


def _whole_sets(context: Context, made: Iterator[Sample], size: int, what: str) -> Iterator[Sample]:
    """The sets of ``size`` samples that are all usable, until many in a row are not."""
    refused = 0
    while len(one_set := list(islice(made, size))) == size:
        fit = list(usable(context, iter(one_set), size))
        refused = 0 if len(fit) == size else refused + 1
        yield from fit if not refused else ()
        if refused > _REFUSED_IN_A_ROW:
            message = f"{what}: no more sets were made, for {refused} in a row could not be run"
            context.note(Finding("copies", "", message))
            return


def usable(
    context: Context,
    samples: Iterator[Sample],
    count: int,
    but: frozenset[str] = frozenset(),
    what: str = "",
) -> Iterator[Sample]:
    """The first ``count`` samples whose reference is finite where it should be, until many fail.

    Samples whose digests are in ``but`` are left out.
    """
    refused = 0
    while count:
        looked_at = 0
        # No more samples are made than may be needed: each costs a reference.
        for sample, fit in _looked_at(context, islice(samples, count), but):
            looked_at += 1
            if fit:
                refused, count = 0, count - 1
                yield sample
            elif (refused := refused + 1) > _REFUSED_IN_A_ROW:
                if what:
                    message = (
                        f"{what}: no more were made, for of {refused} in a row each was a copy of "
                        "a given input, or the model cannot be run on it or gives nothing finite"
                    )
                    context.note(Finding("copies", "", message))
                return
        if not looked_at:
            return


def _looked_at(
    context: Context, samples: Iterator[Sample], but: frozenset[str]
) -> Iterator[tuple[Sample, bool]]:
    """Each sample, and whether it is usable."""
    undefined = context.undefined

    def look(sample: Sample) -> tuple[Sample, bool]:
        # An engine refuses other sizes than those that it was built for.
        if sample.digest in but or not context.engine_takes(sample):
            return sample, False
        has_reference = partial(_has_reference, context, sample)
        return sample, context.recalled("usable", [sample.digest, *undefined], has_reference)

    at_once = context.references.at_once
    for first in samples:
        yield look(first)
        yield from side_by_side(look, samples, at_once)


def _has_reference(context: Context, sample: Sample) -> bool:
    context.time.check()
    try:
        outputs = context.references.of(sample)
    except RunnerFailedError:
        return False
    floats = {n: a for n, a in outputs.items() if a.dtype.kind == "f"}
    if not all(bool(np.isfinite(a).any()) or a.size == 0 for a in floats.values()):
        return False
    # A copy with NaN that no given input has lies outside of what the model is made for.
    defined = [a for n, a in floats.items() if sample.copied and n not in context.undefined]
    return not any(bool(np.isnan(a).any()) for a in defined)


def check_runs(context: Context, samples: Sequence[Sample]) -> None:
    """Refuse held-out samples that the model cannot be run on, before the search.

    Otherwise a plan would be blamed for what the reference cannot do.

    Raises:
        RunnerFailedError: with ONNX Runtime's words; names the first such sample.
    """
    until = time.monotonic() + 0.1 * context.time.left_s  # most of the budget is the search's

    def runs(sample: Sample) -> bool:
        context.references.of(sample)
        return True

    def look(sample: Sample) -> Sample:
        context.recalled("runs", [sample.digest], partial(runs, sample))
        return sample

    in_time = takewhile(lambda _: time.monotonic() < until, samples)
    for done, sample in enumerate(side_by_side(look, in_time, context.references.at_once), 1):
        context.observer.progress(done, len(samples), f"{sample.name}, kept apart, can be run")
