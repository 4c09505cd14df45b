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

FEW_INPUTS = 20
"""From so many given inputs on a fifth is kept apart; where fewer are searched with, variants of
them stand in for those that nobody has shown."""


def load_inputs(
    settings: Settings, specs: Sequence[InputSpec], observer: Observer
) -> tuple[list[Sample], list[Sample], list[Finding]]:
    """The given samples, those kept apart (named, or a fifth of many), and what is to be said of
    both. A copy of an input that is there tells nothing, and would be counted.

    Args:
        settings: where the inputs are, and what is kept apart.
        specs: what the model takes.
        observer: hears how many were read, and may end it.

    Raises:
        BadInputError: names the file or tensor that cannot be used, or says that the time that the
            run may take does not even do for reading.
    """
    try:
        return _loaded(settings, specs, observer)
    except BudgetSpentError as error:
        raise BadInputError(
            f"--budget {settings.budget}: what the search has of it was over before all inputs "
            "were read; give fewer of them, or a larger budget"
        ) from error


def _loaded(
    settings: Settings, specs: Sequence[InputSpec], observer: Observer
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
        apart = _unlike(samples, named)
        left_out = "left out, and would test nothing"
        return (
            samples,
            apart,
            said + _copies("inputs kept apart", len(named) - len(apart), left_out),
        )
    if settings.holdout or settings.fitted or len(samples) < FEW_INPUTS:
        return samples, [], said
    # Every fifth, so that inputs which lie in some order are kept apart evenly.
    given, apart = [s for i, s in enumerate(samples) if i % 5 != 4], samples[4::5]
    message = (
        f"{len(apart)} of {len(samples)} inputs, a fifth, are kept apart to test on (--holdout "
        "FILES names others, --holdout none searches with all)"
    )
    return given, apart, [*said, Finding("holdout", "", message)]


def _unlike(given: Sequence[Sample], others: Sequence[Sample]) -> list[Sample]:
    """Those of ``others`` that are not among ``given``, each once."""
    known = {sample.digest for sample in given}
    by_content: dict[str, Sample] = {}
    for sample in others:
        by_content.setdefault(sample.digest, sample)
    return [sample for digest, sample in by_content.items() if digest not in known]


def _copies(what: str, count: int, so: str) -> list[Finding]:
    if not count:
        return []
    are = "are copies of others: they were" if count > 1 else "is a copy of another: it was"
    return [Finding("copies", "", f"{count} of the {what} {are} {so}")]
