"""Augmented inputs: they stress a plan as an unseen input would, and are no substitute for one.

Arrays are never changed in place, and keep their dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.base.errors import BadInputError
from bisect_trt.base.user_code import load_function, users_code
from bisect_trt.inputs.perturbations import PERTURB, is_ids, moving, noisy
from bisect_trt.metrics.arrays import Arrays, flat, slices

_Arrays = dict[str, NDArray[Any]]
Random = np.random.Generator

LONG = 8
"""An axis of fewer places (a batch, channels) is not shifted or flipped."""

_NOISE_DEVIATIONS = 0.1
_MAX_SHIFT = 13
_MAX_LENGTHS = 4
_MAX_LONGER_ELEMENTS = 1 << 22


def augmented_input(
    kind: str,
    arrays: Arrays,
    others: Sequence[Arrays],
    random: Random,
    discrete: Collection[str] = (),
    lengths: Mapping[str, int] | None = None,
) -> dict[str, NDArray[Any]]:
    """One augmented input of ``arrays`` of ``kind``, one of :data:`KINDS`."""
    move = moving(arrays, discrete)
    source = _Source(arrays, others, move, move.intersection(discrete), lengths or {})
    return KINDS[kind](source, random)


@dataclass(frozen=True)
class _Source:
    """A sample's ``arrays``, the ``others`` to mix with, and the names of those that ``move``.

    Of these the exact zeros of the ``padded`` mean something; ``lengths`` are axes that may grow.
    """

    arrays: Arrays
    others: Sequence[Arrays]
    move: frozenset[str]
    padded: frozenset[str]
    lengths: Mapping[str, int] = field(default_factory=dict)

    def noisy(self, random: Random, amount: float) -> _Arrays:
        """With noise of ``amount`` deviations in what moves."""
        return self.changed(lambda n, a: noisy(a, random, amount, zeros_stay=n in self.padded))

    def changed(self, change: Callable[[str, NDArray[Any]], NDArray[Any]]) -> _Arrays:
        """What moves as ``change`` makes it of a name and an array; the others as they are."""
        return {n: change(n, a) if n in self.move else a for n, a in self.arrays.items()}


def _shift(source: _Source, random: Random) -> _Arrays:
    arrays = source.arrays
    pick, steps = float(random.random()), int(random.integers(1, _MAX_SHIFT + 1))
    return {n: _rolled(a, pick, steps) if a.dtype.kind == "f" else a for n, a in arrays.items()}


def _flip(source: _Source, random: Random) -> _Arrays:
    pick = float(random.random())

    def flipped(array: NDArray[Any]) -> NDArray[Any]:
        axes = _long_axes(array)
        return np.flip(array, axes[int(pick * len(axes))]) if axes else array

    found = {n: flipped(a) if a.dtype.kind == "f" else a for n, a in source.arrays.items()}
    # There is one flip an axis: a little noise makes each an input of its own.
    return replace(source, arrays=found).noisy(random, PERTURB)


def _scale(source: _Source, random: Random) -> _Arrays:
    factor = random.uniform(0.8, 1.2)
    return source.changed(lambda n, a: _like(a * factor, a))


def _noise(source: _Source, random: Random) -> _Arrays:
    return source.noisy(random, _NOISE_DEVIATIONS)


def _mix(source: _Source, random: Random) -> _Arrays:
    """A half of the sample, and a half of another given one, or of itself shifted."""
    others = source.others
    use_other = bool(others) and bool(random.random() < 0.5)
    other = others[int(random.integers(len(others)))] if use_other else None
    if other is not None and any(other[n].shape != a.shape for n, a in source.arrays.items()):
        other = None
    shifted = _shift(source, random)
    share = random.uniform(0.3, 0.7)

    def mixed(name: str, array: NDArray[Any]) -> NDArray[Any]:
        partner = flat(other[name] if other is not None else shifted[name])
        found = np.empty(array.shape, array.dtype)
        own, target = flat(array), flat(found)
        for part in slices(own.size):
            target[part] = share * own[part] + (1.0 - share) * partner[part]
        return found

    return source.changed(mixed)


def _rotate(source: _Source, random: Random) -> _Arrays:
    """Token ids turned along their longest axis."""
    pick = random.random()

    def turned(array: NDArray[Any]) -> NDArray[Any]:
        axis = int(np.argmax(array.shape))
        return np.roll(array, 1 + int(pick * (array.shape[axis] - 1)), axis)

    return {n: turned(a) if is_ids(a) else a for n, a in source.arrays.items()}


def _swap(source: _Source, random: Random) -> _Arrays:
    """A tenth of the token ids exchanged with each other."""
    seed = int(random.integers(2**31))

    def swapped(array: NDArray[Any]) -> NDArray[Any]:
        order = np.random.default_rng(seed)  # inputs of one size change the same places
        flat = array.ravel().copy()
        chosen = order.choice(flat.size, max(2, flat.size // 10), replace=False)
        flat[chosen] = flat[np.roll(chosen, 1)]
        return flat.reshape(array.shape)

    return {n: swapped(a) if is_ids(a) else a for n, a in source.arrays.items()}


def _longer(source: _Source, random: Random) -> _Arrays:
    """Sequences of two to four times the length, by repeating them."""
    times, begin = int(random.integers(2, _MAX_LENGTHS + 1)), float(random.random())
    lengths = source.lengths

    def repeated(name: str, array: NDArray[Any]) -> NDArray[Any]:
        if name not in lengths:
            return array
        counts = [times if axis == lengths[name] else 1 for axis in range(array.ndim)]
        made = np.tile(array, counts)
        return np.roll(made, int(begin * array.shape[lengths[name]]), lengths[name])

    found = {n: repeated(n, a) for n, a in source.arrays.items()}
    # A place to begin at, and a little noise, make each an input of its own.
    return replace(source, arrays=found).noisy(random, PERTURB)


KINDS: dict[str, Callable[[_Source, Random], _Arrays]] = {
    "shift": _shift,
    "flip": _flip,
    "scale": _scale,
    "noise": _noise,
    "mix": _mix,
    "rotate": _rotate,
    "swap": _swap,
    "longer": _longer,
}
"""What an augmented input can be: of float inputs, of token ids, and of sequences."""


def check_kinds(text: str) -> None:
    """Refuse what is no list of kinds, ``none`` or ``auto``."""
    if text in ("auto", "none"):
        return
    for kind in named_kinds(text):
        if is_own_kind(kind):
            load_function(kind, "--augmented")
        elif kind not in KINDS:
            raise BadInputError(
                f"--augmented {kind}: unknown; choose of {', '.join(KINDS)}, MODULE:FUNCTION, or "
                "none, or auto"
            )


def named_kinds(text: str) -> list[str]:
    """The kinds of a list of them."""
    return [kind.strip() for kind in text.split(",")]


def is_own_kind(kind: str) -> bool:
    """Whether ``kind`` names a function of the user's."""
    return ":" in kind


def own_augmentation(kind: str, arrays: Arrays, random: Random) -> dict[str, NDArray[Any]]:
    """One augmented input of ``arrays`` by the user's function.

    It takes the inputs by name and a ``numpy.random.Generator``, and gives the changed inputs.

    Raises:
        BadInputError: the function raises, or changes a name, a dtype or a number of dimensions.
    """
    function = load_function(kind, "--augmented")
    with users_code(f"--augmented {kind}"):
        made = function({n: a.copy() for n, a in arrays.items()}, random)
        if not isinstance(made, Mapping):
            raise BadInputError(
                f"--augmented {kind}: it gave {type(made).__name__}; let it give the changed "
                "inputs by name"
            )
        found = {str(n): np.asarray(a) for n, a in made.items()}
    like = {n: (a.dtype, a.ndim) for n, a in arrays.items()}
    if {n: (a.dtype, a.ndim) for n, a in found.items()} != like:
        raise BadInputError(
            f"--augmented {kind}: gave other names, dtypes or dimensions than the inputs have"
        )
    return found


def kinds_for(
    arrays: Arrays, discrete: Collection[str] = (), lengths: Mapping[str, int] | None = None
) -> tuple[str, ...]:
    """The kinds that change ``arrays``."""
    floats = [arrays[name] for name in moving(arrays, discrete)]
    kinds: list[str] = []
    if floats:
        kinds += ["scale", "noise"]
        if any(_long_axes(a) for a in floats):
            kinds = ["shift", "flip", "scale", "noise", "mix"]
    if any(is_ids(a) for a in arrays.values()):
        kinds += ["rotate", "swap"]
    longest = _MAX_LENGTHS * sum(a.size for a in arrays.values())
    if lengths and longest <= _MAX_LONGER_ELEMENTS:
        kinds += ["longer"]
    return tuple(kinds)


def _long_axes(array: NDArray[Any]) -> list[int]:
    return [axis for axis, size in enumerate(array.shape) if size >= LONG]


def _rolled(array: NDArray[Any], pick: float, steps: int) -> NDArray[Any]:
    axes = _long_axes(array)
    return np.roll(array, steps, axes[int(pick * len(axes))]) if axes else array


def _like(values: NDArray[Any], array: NDArray[Any]) -> NDArray[Any]:
    found: NDArray[Any] = np.ascontiguousarray(values, array.dtype).reshape(array.shape)
    return found
