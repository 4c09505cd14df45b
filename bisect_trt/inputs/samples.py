"""Reads and checks the given inputs, holds some out, and finds what they do not cover."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.base.display import some_of
from bisect_trt.base.errors import BadInputError
from bisect_trt.base.interrupt import BudgetSpentError, Observer
from bisect_trt.base.outcomes import Finding
from bisect_trt.base.sample import RecentArrays, Sample, evenly
from bisect_trt.inputs.files import read_sources, shown
from bisect_trt.inputs.images import USUAL, ImageOptions, image_findings, image_options
from bisect_trt.metrics.arrays import flat, slices
from bisect_trt.model.graph import Graph
from bisect_trt.model.inputs import InputSpec, check_array, check_names, dynamic_axes
from bisect_trt.settings import Settings, Source

_NOISE_ELEMENTS = 1 << 22
"""Elements of an array that are checked for noise, to bound memory."""


def load_samples(
    sources: Sequence[Source],
    specs: Sequence[InputSpec],
    *,
    stacked: bool = False,
    infinite: Collection[str] = (),
    images: ImageOptions = USUAL,
    option: str = "--input",
    observer: Observer | None = None,
) -> list[Sample]:
    """The samples of ``sources``, checked against ``specs``.

    Raises:
        BadInputError: a wrong name, dtype or shape, NaN or infinities.
        BudgetSpentError: the observer ended it.
    """
    samples: list[Sample] = []
    recent = RecentArrays()
    shown_at = time.monotonic()
    for number, source in enumerate(sources):
        if isinstance(source, Mapping):
            arrays = {str(k): np.asarray(v) for k, v in source.items()}
            samples.append(checked(Sample(f"sample {number}", arrays), specs, infinite))
            continue
        before = len(samples)
        read = read_sources(
            source, specs, stacked=stacked, recent=recent, images=images, option=option
        )
        for name, found in read:
            samples.append(checked(Sample(name, found), specs, infinite))
            if observer is not None and time.monotonic() - shown_at > 1.0:
                observer.progress(len(samples), 0, name)
                shown_at = time.monotonic()
        if len(samples) == before:
            raise BadInputError(f"{option} {shown(source)}: gives no sample")
    if not samples:
        raise BadInputError("no input given; the model's real inputs are needed (--input real.npz)")
    return samples


def checked(sample: Sample, specs: Sequence[InputSpec], infinite: Collection[str]) -> Sample:
    """``sample`` itself, if the model takes it.

    Raises:
        BadInputError: a wrong name, dtype or shape, NaN or infinities.
    """
    where = sample.name
    check_names(where, list(sample.arrays), specs)
    symbols: dict[str, int] = {}
    for spec in specs:
        _check_array(where, spec, sample.arrays[spec.name], symbols, spec.name in infinite)
    _ = sample.digest  # computed now, while the arrays are in memory
    return sample


def _check_array(
    where: str,
    spec: InputSpec,
    array: NDArray[Any],
    symbols: dict[str, int],
    may_be_infinite: bool,
) -> None:
    check_array(where, spec, array.dtype, array.shape, symbols)
    if array.dtype.kind == "f":
        values, count, first, masked = flat(array), 0, 0, not may_be_infinite
        for part in slices(values.size):
            block = values[part]
            bad = ~np.isfinite(block)
            if may_be_infinite:
                bad &= ~np.isneginf(block)
            bad_in_block = int(np.count_nonzero(bad))
            if bad_in_block and not count:
                first = part.start + int(np.argmax(bad))
            count += bad_in_block
            masked = masked and not bool((bad & ~np.isneginf(block)).any())
        if count:
            hint = f"; if it is a mask, pass --infinite {spec.name}" if masked else ""
            place = tuple(int(i) for i in np.unravel_index(first, array.shape))
            raise BadInputError(
                f"{where}: input {spec.name!r} holds {count} NaN or infinite values, the "
                f"first at {place}{hint}"
            )


def suspicious_inputs(samples: Sequence[Sample]) -> list[str]:
    """A sentence for each input that is constant or looks like noise."""
    names_by_message: dict[str, list[str]] = {}
    for sample in evenly(samples, 32):  # enough to recognise noise
        for name, whole in sample.arrays.items():
            array = _some_rows(whole)
            if array.dtype.kind != "f" or array.size < 64 or not np.isfinite(array).all():
                continue
            if np.ptp(array) == 0.0:
                message = f"input {name!r} is constant ({array.flat[0]:g}); use a real input"
            elif _looks_like_noise(array):
                message = (
                    f"input {name!r} looks like random noise; the errors of real inputs are "
                    "usually different, use a real one"
                )
            else:
                continue
            names_by_message.setdefault(message, []).append(sample.name)
    return [f"{some_of(names, 1)}: {message}" for message, names in names_by_message.items()]


def _some_rows(array: NDArray[Any]) -> NDArray[Any]:
    """``array``, or neighbouring elements from all over a large one."""
    rows = array.reshape(-1, array.shape[-1]) if array.ndim else array
    if array.size <= _NOISE_ELEMENTS or len(rows) < 2:
        return array if array.size <= _NOISE_ELEMENTS else flat(array)[:_NOISE_ELEMENTS]
    return rows[:: -(-array.size // _NOISE_ELEMENTS)][:, :_NOISE_ELEMENTS]


def _looks_like_noise(array: NDArray[Any]) -> bool:
    """Whether ``randn`` or ``rand`` may have made ``array``."""
    # Neighbours in real signals correlate. Those in token embeddings may not, but some of their
    # rows are larger than others.
    values = array.astype(np.float64)
    # Axes of less than four entries (colours, a batch) have too few neighbours to correlate.
    if array.shape[-1] < 4:
        values = values.reshape(1, -1)
    flat = values.ravel()
    if (flat == np.rint(flat)).all():  # grey values, counts
        return False
    centred = values - flat.mean()
    deviation = float(flat.std())
    for axis in range(values.ndim):
        along = np.moveaxis(centred, axis, -1)
        pairs = along[..., 1:] * along[..., :-1]
        if along.shape[-1] < 4:
            continue
        # The neighbours correlate if their mean product is four standard errors from 0.
        if abs(float(pairs.mean())) > 4.0 / np.sqrt(pairs.size) * deviation**2:
            return False
    if not _rows_are_alike(flat, array.shape[-1]):  # token embeddings, spectra
        return False
    kurtosis = float(np.mean(((flat - flat.mean()) / deviation) ** 4))
    # The kurtosis of the normal distribution is 3, of the uniform one 1.8.
    slack = 10.0 / np.sqrt(flat.size)
    normal, uniform = abs(kurtosis - 3.0) < 5 * slack, abs(kurtosis - 1.8) < 2 * slack
    return bool(normal or uniform)


def _rows_are_alike(values: NDArray[np.float64], length: int) -> bool:
    """Whether the norms of the rows vary as those of independent values do."""
    if length < 16 or values.size < 8 * length:
        return True  # too short, or too few rows, to tell
    rows = values.reshape(-1, length)
    # A sum of independent squares has a relative spread that falls with the root of their number,
    # and a norm, its root, half of that.
    squares = rows * rows
    expected = float(squares.std()) / (2.0 * float(squares.mean()) * np.sqrt(length))
    norms = np.sqrt(squares.sum(axis=1))
    if len(np.unique(norms)) < len(norms):  # a repeated token
        return False
    spread = float(norms.std() / norms.mean())
    return bool(0.5 * expected < spread < 1.5 * expected)


_HOLDOUT_EVERY = 5
"""One of this many inputs is held out."""

FEW_INPUTS = 20
"""Below this many inputs none are held out."""


def short_digest(sample: Sample) -> str:
    """The digest by which a plan lists the inputs of its search."""
    return sample.digest[:12]


def load_inputs(
    settings: Settings,
    specs: Sequence[InputSpec],
    observer: Observer,
    seen: frozenset[str] = frozenset(),
    *,
    searches: bool = True,
) -> tuple[list[Sample], list[Sample], list[Finding]]:
    """The given samples without duplicates, the held out ones, and findings on both.

    ``seen`` are the short digests of inputs that an older plan was searched with.

    Raises:
        BadInputError: a file or tensor cannot be used, or the time was spent.
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
    images = image_options(settings)
    load = partial(
        load_samples,
        specs=specs,
        stacked=settings.stacked,
        infinite=settings.infinite,
        images=images,
        observer=observer,
    )
    loaded = load(settings.inputs)
    samples = _without((), loaded)
    findings = _copies("inputs", len(loaded) - len(samples), "counted once")
    sources = [source for source in settings.holdout if source != "none"]
    if sources:
        named = load(sources, option="--holdout")
        given, holdout, more = _named_holdout(samples, named, seen, searches)
    elif settings.holdout or settings.fitted or len(samples) < FEW_INPUTS:
        given, holdout, more = samples, [], []
    else:
        given, holdout, more = _chosen_holdout(samples, seen)
    names = [sample.name for sample in (*given, *holdout)]
    return given, holdout, [*image_findings(names, specs, images), *findings, *more]


def _named_holdout(
    samples: list[Sample], named: list[Sample], seen: frozenset[str], searches: bool
) -> tuple[list[Sample], list[Sample], list[Finding]]:
    """The given inputs, those of --holdout, and findings on them."""
    holdout = _without((), named) if searches else _without(samples, named)
    so = "counted once" if searches else "left out, and would test nothing"
    findings = _copies("inputs kept apart", len(named) - len(holdout), so)
    new = [sample for sample in holdout if short_digest(sample) not in seen]
    given = _without(new, samples)
    if not given:
        raise BadInputError("--holdout names every given input: leave some to search with")
    twice = len(samples) - len(given)
    if twice:
        message = (
            f"{twice} of {len(samples)} given inputs are those of --holdout: no search sees them"
        )
        findings.append(Finding("holdout", "", message))
    return given, new, findings + _searched_before(len(holdout) - len(new), len(named))


def _chosen_holdout(
    samples: list[Sample], seen: frozenset[str]
) -> tuple[list[Sample], list[Sample], list[Finding]]:
    """The inputs to search with, those kept apart, and a finding on them."""
    holdout = _choose_holdout(samples, seen)
    if not holdout:
        searched = sum(short_digest(sample) in seen for sample in samples)
        return samples, [], _searched_before(searched, len(samples))
    is_fifth = len(holdout) == len(samples) // _HOLDOUT_EVERY
    part = "a fifth" if is_fifth else "of those not searched with yet"
    message = (
        f"{len(holdout)} of {len(samples)} inputs, {part}, are kept apart to test on (--holdout "
        "FILES names others, --holdout none searches with all)"
    )
    return _without(holdout, samples), holdout, [Finding("holdout", "", message)]


def _choose_holdout(samples: Sequence[Sample], seen: frozenset[str]) -> list[Sample]:
    """A fifth of ``samples``, or half of the unseen ones if these are few, evenly spread."""
    new = [sample for sample in samples if short_digest(sample) not in seen]
    most = len(samples) // _HOLDOUT_EVERY
    step = min(_HOLDOUT_EVERY, max(2, len(new) // most))
    return new[step - 1 :: step][:most]


def _without(left_out: Sequence[Sample], samples: Sequence[Sample]) -> list[Sample]:
    """``samples`` without duplicates and without those in ``left_out``."""
    digests = {sample.digest for sample in left_out}
    by_digest: dict[str, Sample] = {}
    for sample in samples:
        by_digest.setdefault(sample.digest, sample)
    return [sample for digest, sample in by_digest.items() if digest not in digests]


def _searched_before(count: int, named: int) -> list[Finding]:
    """The finding on inputs that the older plan was searched with."""
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


NOT_COVERED = "not-covered"
"""Kind of finding: few sizes of dynamic axes were tested."""

ALIKE = "alike"
"""Kind of finding: all inputs are of one kind, which makes validation inconclusive."""


def untested_sizes(specs: Sequence[InputSpec], samples: Sequence[Sample]) -> list[Finding]:
    """A finding with the tested sizes for each input with dynamic axes."""
    by_input, named = dict[str, list[str]](), set[str]()
    for spec, axis, name in dynamic_axes(specs):
        sizes = [s.shapes[spec.name][axis] for s in samples]
        if not sizes or name in named:
            continue
        if not name.isdigit():  # an axis without a name is called by its number
            named.add(name)
        low, high = min(sizes), max(sizes)
        span = f"at {low} only" if low == high else f"from {low} to {high} only"
        spans = by_input.setdefault(spec.name, [])
        spans.append(f"axis {name} {span}" if spans else f"axis {name} was tested {span}")
    return [
        Finding(
            NOT_COVERED,
            name,
            f"{', '.join(spans)} (input {name!r}): give other sizes it will meet",
        )
        for name, spans in by_input.items()
    ]


def few_ids(graph: Graph, samples: Sequence[Sample]) -> list[Finding]:
    """A finding for each input of ids that spans a small part of its lookup table."""
    findings = []
    for lookup in graph.lookups:
        node = graph.proto.graph.node[lookup.index]
        if not lookup.table or node.input[1] not in samples[0].arrays:
            continue
        name, rows = node.input[1], graph.float_constants[lookup.table].shape[0]
        ids = [np.asarray(s.arrays[name]) for s in samples]
        used = np.unique(np.concatenate([a.ravel() for a in ids]))
        low, high = int(used.min()), int(used.max())
        # Within a tenth of a large table there may be one language of several.
        if rows >= 1000 and high - low < 0.1 * rows:
            message = (
                f"all {len(samples)} inputs have ids from {low} to {high} of {rows:,} in {name!r}: "
                "inputs of other languages or kinds are not covered"
            )
            findings.append(Finding(ALIKE, name, message))
    return findings
