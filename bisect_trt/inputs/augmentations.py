"""Augmented inputs: shifted, flipped, scaled, mixed copies that stand in for unseen inputs.

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

_MAX_REPEATS = 4
"""How often a sequence is repeated at most."""


def augmented_input(
    kind: str,
    arrays: Arrays,
    others: Sequence[Arrays],
    random: Random,
    discrete: Collection[str] = (),
    lengths: Mapping[str, int] | None = None,
) -> dict[str, NDArray[Any]]:
    """An augmented input of ``kind``, one of :data:`KINDS`, made from ``arrays``."""
    move = moving(arrays, discrete)
    source = _Source(arrays, others, move, move.intersection(discrete), lengths or {})
    return KINDS[kind](source, random)


@dataclass(frozen=True)
class _Source:
    """What an augmented input is made from.

    ``arrays``: the sample's. ``others``: samples to mix with. ``move``: the arrays to change.
    ``padded``: those of ``move`` whose zeros stay. ``lengths``: by array, the axis that may grow.
    """

    arrays: Arrays
    others: Sequence[Arrays]
    move: frozenset[str]
    padded: frozenset[str]
    lengths: Mapping[str, int] = field(default_factory=dict)

    def noisy(self, random: Random, amount: float) -> _Arrays:
        """The arrays with noise of ``amount`` deviations in those that move."""
        return self.changed(lambda n, a: noisy(a, random, amount, zeros_stay=n in self.padded))

    def changed(self, change: Callable[[str, NDArray[Any]], NDArray[Any]]) -> _Arrays:
        """The arrays with ``change`` applied to those that move."""
        return {n: change(n, a) if n in self.move else a for n, a in self.arrays.items()}


def _shift(source: _Source, random: Random) -> _Arrays:
    arrays = source.arrays
    pick, steps = float(random.random()), int(random.integers(1, 14))
    return {n: _rolled(a, pick, steps) if a.dtype.kind == "f" else a for n, a in arrays.items()}


def _flip(source: _Source, random: Random) -> _Arrays:
    pick = float(random.random())

    def flipped(array: NDArray[Any]) -> NDArray[Any]:
        axes = _long_axes(array)
        return np.flip(array, axes[int(pick * len(axes))]) if axes else array

    arrays = {n: flipped(a) if a.dtype.kind == "f" else a for n, a in source.arrays.items()}
    # There is one flip for each axis: a little noise makes each input a different one.
    return replace(source, arrays=arrays).noisy(random, PERTURB)


def _scale(source: _Source, random: Random) -> _Arrays:
    factor = random.uniform(0.8, 1.2)
    return source.changed(lambda n, a: _like(a * factor, a))


def _noise(source: _Source, random: Random) -> _Arrays:
    return source.noisy(random, 0.1)


def _mix(source: _Source, random: Random) -> _Arrays:
    """A weighted mean of the sample and another given one, or itself shifted."""
    others = source.others
    use_other = bool(others) and bool(random.random() < 0.5)
    other = others[int(random.integers(len(others)))] if use_other else None
    if other is not None and any(other[n].shape != a.shape for n, a in source.arrays.items()):
        other = None
    shifted = _shift(source, random)
    share = random.uniform(0.3, 0.7)

    def mixed(name: str, array: NDArray[Any]) -> NDArray[Any]:
        partner = flat(other[name] if other is not None else shifted[name])
        result = np.empty(array.shape, array.dtype)
        own, target = flat(array), flat(result)
        for part in slices(own.size):
            target[part] = share * own[part] + (1.0 - share) * partner[part]
        return result

    return source.changed(mixed)


def _rotate(source: _Source, random: Random) -> _Arrays:
    """Token ids rotated along their longest axis."""
    pick = random.random()

    def turned(array: NDArray[Any]) -> NDArray[Any]:
        axis = int(np.argmax(array.shape))
        return np.roll(array, 1 + int(pick * (array.shape[axis] - 1)), axis)

    return {n: turned(a) if is_ids(a) else a for n, a in source.arrays.items()}


def _swap(source: _Source, random: Random) -> _Arrays:
    """A tenth of the token ids permuted."""
    seed = int(random.integers(2**31))

    def swapped(array: NDArray[Any]) -> NDArray[Any]:
        order = np.random.default_rng(seed)  # inputs of one size change the same places
        flat = array.ravel().copy()
        chosen = order.choice(flat.size, max(2, flat.size // 10), replace=False)
        flat[chosen] = flat[np.roll(chosen, 1)]
        return flat.reshape(array.shape)

    return {n: swapped(a) if is_ids(a) else a for n, a in source.arrays.items()}


def _longer(source: _Source, random: Random) -> _Arrays:
    """Sequences repeated two to four times."""
    times, begin = int(random.integers(2, _MAX_REPEATS + 1)), float(random.random())
    lengths = source.lengths

    def repeated(name: str, array: NDArray[Any]) -> NDArray[Any]:
        if name not in lengths:
            return array
        counts = [times if axis == lengths[name] else 1 for axis in range(array.ndim)]
        tiled = np.tile(array, counts)
        return np.roll(tiled, int(begin * array.shape[lengths[name]]), lengths[name])

    arrays = {n: repeated(n, a) for n, a in source.arrays.items()}
    # The place to begin at and a little noise make each input a different one.
    return replace(source, arrays=arrays).noisy(random, PERTURB)


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
"""The kinds of augmented inputs; :func:`kinds_for` says which a model can take."""


def check_kinds(text: str) -> None:
    """Refuse anything but a list of kinds, ``none`` or ``auto``."""
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
    """The kinds in a comma-separated list."""
    return [kind.strip() for kind in text.split(",")]


def is_own_kind(kind: str) -> bool:
    """Whether ``kind`` names a function of the user's."""
    return ":" in kind


def own_augmentation(kind: str, arrays: Arrays, random: Random) -> dict[str, NDArray[Any]]:
    """An augmented input made from ``arrays`` by the user's function of arrays and a generator.

    Raises:
        BadInputError: it raises, or changes a name, a dtype or a number of dimensions.
    """
    function = load_function(kind, "--augmented")
    with users_code(f"--augmented {kind}"):
        made = function({n: a.copy() for n, a in arrays.items()}, random)
        if not isinstance(made, Mapping):
            raise BadInputError(
                f"--augmented {kind}: it gave {type(made).__name__}; let it give the changed "
                "inputs by name"
            )
        augmented = {str(n): np.asarray(a) for n, a in made.items()}
    expected = {n: (a.dtype, a.ndim) for n, a in arrays.items()}
    if {n: (a.dtype, a.ndim) for n, a in augmented.items()} != expected:
        raise BadInputError(
            f"--augmented {kind}: gave other names, dtypes or dimensions than the inputs have"
        )
    return augmented


def kinds_for(
    arrays: Arrays, discrete: Collection[str] = (), lengths: Mapping[str, int] | None = None
) -> tuple[str, ...]:
    """The kinds that change something in ``arrays``."""
    floats = [arrays[name] for name in moving(arrays, discrete)]
    kinds: list[str] = []
    if floats:
        kinds += ["scale", "noise"]
        if any(_long_axes(a) for a in floats):
            kinds = ["shift", "flip", "scale", "noise", "mix"]
    if any(is_ids(a) for a in arrays.values()):
        kinds += ["rotate", "swap"]
    longest = _MAX_REPEATS * sum(a.size for a in arrays.values())
    if lengths and longest <= 1 << 22:  # not for large inputs, to bound memory
        kinds += ["longer"]
    return tuple(kinds)


def _long_axes(array: NDArray[Any]) -> list[int]:
    """The axes that may be shifted or flipped: not the batch or channels, which are shorter."""
    return [axis for axis, size in enumerate(array.shape) if size >= 8]


def _rolled(array: NDArray[Any], pick: float, steps: int) -> NDArray[Any]:
    axes = _long_axes(array)
    return np.roll(array, steps, axes[int(pick * len(axes))]) if axes else array


def _like(values: NDArray[Any], array: NDArray[Any]) -> NDArray[Any]:
    result: NDArray[Any] = np.ascontiguousarray(values, array.dtype).reshape(array.shape)
    return result
