"""Real inputs, checked against the model before anything runs."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.core.errors import BadInputError
from bisect_trt.core.names import some_of
from bisect_trt.core.observer import Observer
from bisect_trt.core.sample import Sample, evenly
from bisect_trt.graph.model.inputs import InputSpec, check_array, check_names
from bisect_trt.numerics.blocks import flat, slices
from bisect_trt.stations.asked.source import Source
from bisect_trt.stations.case.input_files import read_sources, shown

_EVERY_S = 1.0

MOST_LOOKED_AT = 32
"""So many inputs at most are looked at for being noise."""

_TELLS_NEIGHBOURS = 4
"""Along a shorter axis (colours, a batch) few are neighbours."""

MOST_ELEMENTS = 1 << 22
"""So many elements of one at most: they tell, and the sums of all would take several copies."""


def load_samples(
    sources: Sequence[Source],
    specs: Sequence[InputSpec],
    *,
    stacked: bool = False,
    infinite: Collection[str] = (),
    option: str = "--input",
    observer: Observer | None = None,
) -> list[Sample]:
    """One sample for each mapping, and all that each path or loader names, checked against
    ``specs``.

    Args:
        sources: mappings of input name to array, or what
            :func:`~bisect_trt.stations.case.input_files.read_sources` takes; each gives at least
            one.
        specs: what the model takes.
        stacked: whether each array of a file holds many samples.
        infinite: the inputs that may hold -inf, as an additive attention mask does.
        option: which names the sources, for messages.
        observer: hears every second how many were read, and may end it.

    Raises:
        BadInputError: names the file and the tensor: wrong names, dtypes, shapes, NaN, infinities.
        BudgetSpentError: the observer ended it.
    """
    samples: list[Sample] = []
    told = time.monotonic()
    for number, source in enumerate(sources):
        if isinstance(source, Mapping):
            arrays = {str(k): np.asarray(v) for k, v in source.items()}
            samples.append(checked(Sample(f"sample {number}", arrays), specs, infinite))
            continue
        before = len(samples)
        for name, found in read_sources(source, specs, stacked=stacked, option=option):
            samples.append(checked(Sample(name, found), specs, infinite))
            if observer is not None and time.monotonic() - told > _EVERY_S:
                observer.progress(len(samples), 0, name)
                told = time.monotonic()
        if len(samples) == before:
            raise BadInputError(f"{option} {shown(source)}: gives no sample")
    if not samples:
        raise BadInputError("no input given; the model's real inputs are needed (--input real.npz)")
    return samples


def checked(sample: Sample, specs: Sequence[InputSpec], infinite: Collection[str]) -> Sample:
    """``sample``, which the model takes.

    Args:
        sample: named as messages shall name it.
        specs: what the model takes.
        infinite: the inputs that may hold -inf.

    Raises:
        BadInputError: names the tensor: a wrong name, dtype or shape, NaN, infinities.
    """
    where = sample.name
    check_names(where, list(sample.arrays), specs)
    symbols: dict[str, int] = {}
    for spec in specs:
        _check_array(where, spec, sample.arrays[spec.name], symbols, spec.name in infinite)
    _ = sample.digest  # kept: told now, while the arrays are in memory
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
            found = int(np.count_nonzero(bad))
            if found and not count:
                first = part.start + int(np.argmax(bad))
            count += found
            masked = masked and not bool((bad & ~np.isneginf(block)).any())
        if count:
            hint = f"; if it is a mask, pass --infinite {spec.name}" if masked else ""
            place = tuple(int(i) for i in np.unravel_index(first, array.shape))
            raise BadInputError(
                f"{where}: input {spec.name!r} holds {count} NaN or infinite values, the "
                f"first at {place}{hint}"
            )


def suspicious_inputs(samples: Sequence[Sample]) -> list[str]:
    """A sentence for each of the model's inputs that looks like noise or is constant, in how many
    of the samples that are looked at: errors on such inputs say little.
    """
    found: dict[str, list[str]] = {}
    for sample in evenly(samples, MOST_LOOKED_AT):
        for name, whole in sample.arrays.items():
            array = _some_rows(whole)
            if array.dtype.kind != "f" or array.size < 64 or not np.isfinite(array).all():
                continue
            if np.ptp(array) == 0.0:
                said = f"input {name!r} is constant ({array.flat[0]:g}); use a real input"
            elif looks_like_noise(array):
                said = (
                    f"input {name!r} looks like random noise; the errors of real inputs are "
                    "usually different, use a real one"
                )
            else:
                continue
            found.setdefault(said, []).append(sample.name)
    return [f"{some_of(names, 1)}: {said}" for said, names in found.items()]


def _some_rows(array: NDArray[Any]) -> NDArray[Any]:
    """``array``, or of a large one neighbouring elements from all over it."""
    rows = array.reshape(-1, array.shape[-1]) if array.ndim else array
    if array.size <= MOST_ELEMENTS or len(rows) < 2:
        return array if array.size <= MOST_ELEMENTS else flat(array)[:MOST_ELEMENTS]
    return rows[:: -(-array.size // MOST_ELEMENTS)][:, :MOST_ELEMENTS]


def looks_like_noise(array: NDArray[Any]) -> bool:
    """True for what ``randn`` or ``rand`` make: no correlation between neighbours along any axis,
    and that distribution's moments.

    Real signals correlate with their neighbours, features of speech with those a step of time
    away. Embeddings of tokens may not, but some rows are larger than others.
    """
    values = array.astype(np.float64)
    if array.shape[-1] < _TELLS_NEIGHBOURS:
        values = values.reshape(1, -1)
    flat = values.ravel()
    if (flat == np.rint(flat)).all():  # grey values, counts
        return False
    centred = values - flat.mean()
    deviation = float(flat.std())
    for axis in range(values.ndim):
        along = np.moveaxis(centred, axis, -1)
        pairs = along[..., 1:] * along[..., :-1]
        if along.shape[-1] < _TELLS_NEIGHBOURS:
            continue
        if abs(float(pairs.mean())) > 4.0 / np.sqrt(pairs.size) * deviation**2:
            return False
    if not _rows_are_alike(flat, array.shape[-1]):  # token embeddings, spectra
        return False
    kurtosis = float(np.mean(((flat - flat.mean()) / deviation) ** 4))
    slack = 10.0 / np.sqrt(flat.size)
    normal, uniform = abs(kurtosis - 3.0) < 5 * slack, abs(kurtosis - 1.8) < 2 * slack
    return bool(normal or uniform)


_FEW_ROWS, _FEW_VALUES = 8, 16


def _rows_are_alike(values: NDArray[np.float64], length: int) -> bool:
    """Whether the norms of the rows spread as those of independent draws do; True where rows are
    too few or too short to tell.
    """
    if length < _FEW_VALUES or values.size < _FEW_ROWS * length:
        return True
    rows = values.reshape(-1, length)
    squares = rows * rows
    expected = float(squares.std()) / (2.0 * float(squares.mean()) * np.sqrt(length))
    norms = np.sqrt(squares.sum(axis=1))
    if len(np.unique(norms)) < len(norms):  # a token that comes twice
        return False
    spread = float(norms.std() / norms.mean())
    return bool(0.5 * expected < spread < 1.5 * expected)
