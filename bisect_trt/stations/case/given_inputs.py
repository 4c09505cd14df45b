"""The given inputs and those kept apart, each once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from bisect_trt.core.errors import BadInputError
from bisect_trt.core.finding import Finding
from bisect_trt.core.machine.stop import BudgetSpentError
from bisect_trt.core.observer import Observer
from bisect_trt.core.sample import Sample
from bisect_trt.graph.model.inputs import InputSpec
from bisect_trt.stations.asked.settings import Settings
from bisect_trt.stations.case.samples import load_samples

_APART = 5
"""One of so many inputs is kept apart."""

FEW_INPUTS = 20
"""From so many given inputs on a fifth is kept apart; where fewer are searched with, variants of
them stand in for those that nobody has shown."""


def short_digest(sample: Sample) -> str:
    """What a plan knows an input by that it was searched with."""
    return sample.digest[:12]


def load_inputs(
    settings: Settings,
    specs: Sequence[InputSpec],
    observer: Observer,
    seen: frozenset[str] = frozenset(),
    *,
    searches: bool = True,
) -> tuple[list[Sample], list[Sample], list[Finding]]:
    """The given samples, those kept apart (named, or a fifth of many), and what is to be said of
    both. A copy of an input that is there tells nothing, and would be counted.

    Args:
        settings: where the inputs are, and what is kept apart.
        specs: what the model takes.
        observer: hears how many were read, and may end it.
        seen: the digests of inputs that an older plan was searched with, at which this search
            begins: they chose its pins, and test nothing.
        searches: whether a plan will be searched on those given.

    Raises:
        BadInputError: names the file or tensor that cannot be used, or says that the time that the
            run may take does not even do for reading.
    """
    try:
        return _loaded(settings, specs, observer, seen, searches)
    except BudgetSpentError as error:
        raise BadInputError(
            f"--budget {settings.budget}: what the search has of it was over before all inputs "
            "were read; give fewer of them, or a larger budget"
        ) from error


def _loaded(
    settings: Settings,
    specs: Sequence[InputSpec],
    observer: Observer,
    seen: frozenset[str],
    searches: bool,
) -> tuple[list[Sample], list[Sample], list[Finding]]:
    unknown = sorted(set(settings.infinite).difference(spec.name for spec in specs))
    if unknown:
        raise BadInputError(
            f"--infinite {unknown[0]}: the model has no such input; it takes "
            f"{', '.join(spec.name for spec in specs)}"
        )
    load = partial(
        load_samples,
        specs=specs,
        stacked=settings.stacked,
        infinite=settings.infinite,
        observer=observer,
    )
    every = load(settings.inputs)
    samples = _unlike((), every)
    said = _copies("inputs", len(every) - len(samples), "counted once")
    asked = [source for source in settings.holdout if source != "none"]
    if asked:
        named = load(asked, option="--holdout")
        apart = _unlike((), named) if searches else _unlike(samples, named)
        so = "counted once" if searches else "left out, and would test nothing"
        said += _copies("inputs kept apart", len(named) - len(apart), so)
        new = [sample for sample in apart if short_digest(sample) not in seen]
        left = _unlike(new, samples)
        if not left:
            raise BadInputError("--holdout names every given input: leave some to search with")
        said += _named_twice(len(samples) - len(left), len(samples))
        return left, new, said + _searched_before(len(apart) - len(new), len(named))
    if settings.holdout or settings.fitted or len(samples) < FEW_INPUTS:
        return samples, [], said
    apart = _kept_apart(samples, seen)
    if not apart:
        known = sum(short_digest(sample) in seen for sample in samples)
        return samples, [], said + _searched_before(known, len(samples))
    kept = {sample.digest for sample in apart}
    part = "a fifth" if len(apart) == len(samples) // _APART else "of those not searched with yet"
    message = (
        f"{len(apart)} of {len(samples)} inputs, {part}, are kept apart to test on (--holdout "
        "FILES names others, --holdout none searches with all)"
    )
    given = [sample for sample in samples if sample.digest not in kept]
    return given, apart, [*said, Finding("holdout", "", message)]


def _kept_apart(samples: Sequence[Sample], seen: frozenset[str]) -> list[Sample]:
    """A fifth of ``samples``, or half of those that were not ``seen`` where these are fewer. Evenly
    spread: inputs may lie in some order.
    """
    new = [sample for sample in samples if short_digest(sample) not in seen]
    most = len(samples) // _APART
    step = min(_APART, max(2, len(new) // most))
    return new[step - 1 :: step][:most]


def _unlike(given: Sequence[Sample], others: Sequence[Sample]) -> list[Sample]:
    """Those of ``others`` that are not among ``given``, each once."""
    known = {sample.digest for sample in given}
    by_content: dict[str, Sample] = {}
    for sample in others:
        by_content.setdefault(sample.digest, sample)
    return [sample for digest, sample in by_content.items() if digest not in known]


def _named_twice(count: int, given: int) -> list[Finding]:
    """What is said of given inputs that are to be kept apart."""
    if not count:
        return []
    message = f"{count} of {given} given inputs are those of --holdout: no search sees them"
    return [Finding("holdout", "", message)]


def _searched_before(count: int, named: int) -> list[Finding]:
    """What is said of inputs that nothing can be tested on, ``count`` of ``named``."""
    if not count:
        return []
    message = (
        f"{count} of {named} inputs are not kept apart to test on: the plan of --start-from was "
        "searched with them"
    )
    return [Finding("holdout", "", message)]


def _copies(what: str, count: int, so: str) -> list[Finding]:
    if not count:
        return []
    are = "are copies of others: they were" if count > 1 else "is a copy of another: it was"
    return [Finding("copies", "", f"{count} of the {what} {are} {so}")]
