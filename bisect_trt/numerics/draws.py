"""Inputs made from the given ones: the same with its roundings redrawn, and variants.

A redrawn copy is moved too little to change what the layers do, and enough to redraw which way each
rounding goes. A variant stresses a plan as an unseen input would; it is no substitute for one.
Arrays are never changed in place, and keep their shapes and dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.core.errors import BadInputError
from bisect_trt.core.user_code import load_function, users_code
from bisect_trt.numerics.blocks import flat, slices
from bisect_trt.numerics.noise import LARGE, deviation, with_noise

Arrays = Mapping[str, NDArray[Any]]
Random = np.random.Generator

REDRAW = 1e-3
"""How far a copy is moved, in deviations of the input: the most that leaves what the layers do
as it was (benchmarks/results/holds.md)."""

LONG = 8
"""An axis of fewer places (a batch, channels) is not shifted or flipped."""

_MOST_SHIFT = 13
_GLANCE = 64


def redrawn(arrays: Arrays, random: Random, amount: float = REDRAW) -> dict[str, NDArray[Any]]:
    """Each float input plus noise of ``amount`` of its deviation; others as they are.

    Args:
        arrays: one sample's inputs by name, any shapes and dtypes.
        random: draws the noise.
        amount: in deviations of each input.
    """
    return {name: _noisy(a, random, amount) if _moves(a) else a for name, a in arrays.items()}


def can_be_redrawn(arrays: Arrays) -> bool:
    """Whether there is a float input that varies: token ids and constants cannot be moved."""
    return any(_moves(array) for array in arrays.values())


def redrawn_lookups(
    arrays: Arrays, random: Random, amount: float = REDRAW
) -> dict[str, NDArray[Any]]:
    """What integers look up, each value times 1 plus noise of ``amount``; others as they are.

    Of a deviation of the whole, as inputs are moved, large values would fall as before, and where
    small ones were zero a padding would be none.

    Args:
        arrays: float32 by name, any shapes.
        random: draws the noise.
        amount: in parts of each value.
    """
    return {n: _stretched(a, random, amount) if _is_looked_up(a) else a for n, a in arrays.items()}


def can_redraw_lookups(arrays: Arrays) -> bool:
    """Whether :func:`redrawn_lookups` would move something."""
    return any(_is_looked_up(array) for array in arrays.values())


def variant(
    kind: str, arrays: Arrays, others: Sequence[Arrays], random: Random
) -> dict[str, NDArray[Any]]:
    """One variant of ``arrays`` of ``kind``, one of :data:`KINDS`.

    Args:
        kind: what is done; the same to every input of one shape, so that masks go with their ids.
        arrays: one sample's inputs by name.
        others: the other given samples, to mix with.
        random: decides how far.
    """
    return KINDS[kind](arrays, others, random)


def _shift(arrays: Arrays, others: Sequence[Arrays], random: Random) -> dict[str, NDArray[Any]]:
    pick, steps = float(random.random()), int(random.integers(1, _MOST_SHIFT + 1))
    return {n: _rolled(a, pick, steps) if a.dtype.kind == "f" else a for n, a in arrays.items()}


def _flip(arrays: Arrays, others: Sequence[Arrays], random: Random) -> dict[str, NDArray[Any]]:
    pick = float(random.random())

    def flipped(array: NDArray[Any]) -> NDArray[Any]:
        axes = _long_axes(array)
        return np.flip(array, axes[int(pick * len(axes))]) if axes else array

    found = {n: flipped(a) if a.dtype.kind == "f" else a for n, a in arrays.items()}
    # There is one flip an axis: a little noise makes each a draw of its own.
    return redrawn(found, random)


def _scale(arrays: Arrays, others: Sequence[Arrays], random: Random) -> dict[str, NDArray[Any]]:
    factor = random.uniform(0.8, 1.2)
    return {n: _like(a * factor, a) if _moves(a) else a for n, a in arrays.items()}


def _noise(arrays: Arrays, others: Sequence[Arrays], random: Random) -> dict[str, NDArray[Any]]:
    return redrawn(arrays, random, 0.1)


def _mix(arrays: Arrays, others: Sequence[Arrays], random: Random) -> dict[str, NDArray[Any]]:
    """A half of the sample, and a half of another given one, or of itself shifted."""
    fitting = [o for o in others if all(o[n].shape == a.shape for n, a in arrays.items())]
    use_other = bool(fitting) and bool(random.random() < 0.5)
    other = fitting[int(random.integers(len(fitting)))] if use_other else None
    shifted = _shift(arrays, others, random)
    share = random.uniform(0.3, 0.7)

    def mixed(name: str, array: NDArray[Any]) -> NDArray[Any]:
        partner = flat(other[name] if other is not None else shifted[name])
        found = np.empty(array.shape, array.dtype)
        source, target = flat(array), flat(found)
        for part in slices(source.size):
            target[part] = share * source[part] + (1.0 - share) * partner[part]
        return found

    return {n: mixed(n, a) if _moves(a) else a for n, a in arrays.items()}


def _rotate(arrays: Arrays, others: Sequence[Arrays], random: Random) -> dict[str, NDArray[Any]]:
    """Token ids turned along their longest axis."""
    pick = random.random()

    def turned(array: NDArray[Any]) -> NDArray[Any]:
        axis = int(np.argmax(array.shape))
        return np.roll(array, 1 + int(pick * (array.shape[axis] - 1)), axis)

    return {n: turned(a) if _is_ids(a) else a for n, a in arrays.items()}


def _swap(arrays: Arrays, others: Sequence[Arrays], random: Random) -> dict[str, NDArray[Any]]:
    """A tenth of the token ids exchanged with each other."""
    seed = int(random.integers(2**31))

    def swapped(array: NDArray[Any]) -> NDArray[Any]:
        order = np.random.default_rng(seed)  # inputs of one size change the same places
        flat = array.ravel().copy()
        chosen = order.choice(flat.size, max(2, flat.size // 10), replace=False)
        flat[chosen] = flat[np.roll(chosen, 1)]
        return flat.reshape(array.shape)

    return {n: swapped(a) if _is_ids(a) else a for n, a in arrays.items()}


KINDS: dict[str, Callable[[Arrays, Sequence[Arrays], Random], dict[str, NDArray[Any]]]] = {
    "shift": _shift,
    "flip": _flip,
    "scale": _scale,
    "noise": _noise,
    "mix": _mix,
    "rotate": _rotate,
    "swap": _swap,
}
"""What a variant can be: of float inputs, and the last two of token ids."""


def check_kinds(text: str) -> None:
    """Refuse what is no list of kinds, ``none`` or ``auto``.

    Raises:
        BadInputError: names the word and the kinds there are, or why a function of the user's
            cannot be imported.
    """
    if text in ("auto", "none"):
        return
    for kind in named_kinds(text):
        if is_own_kind(kind):
            load_function(kind, "--variants")
        elif kind not in KINDS:
            raise BadInputError(
                f"--variants {kind}: unknown; choose of {', '.join(KINDS)}, MODULE:FUNCTION, or "
                "none, or auto"
            )


def named_kinds(text: str) -> list[str]:
    """The kinds of a list of them."""
    return [kind.strip() for kind in text.split(",")]


def is_own_kind(kind: str) -> bool:
    """Whether ``kind`` names a function of the user's."""
    return ":" in kind


def own_variant(
    kind: str, arrays: Arrays, others: Sequence[Arrays], random: Random
) -> dict[str, NDArray[Any]]:
    """One variant of ``arrays`` by the user's function: it takes the inputs by name and a
    ``numpy.random.Generator``, and gives the changed inputs by name.

    Args:
        kind: ``module:function``.
        arrays: one sample's inputs by name; the function gets copies.
        others: not used.
        random: decides how far.

    Raises:
        BadInputError: the function raises, or changes a name, a dtype or a number of dimensions.
    """
    function = load_function(kind, "--variants")
    with users_code(f"--variants {kind}"):
        made = function({n: a.copy() for n, a in arrays.items()}, random)
        found = {str(n): np.asarray(a) for n, a in made.items()}
    like = {n: (a.dtype, a.ndim) for n, a in arrays.items()}
    if {n: (a.dtype, a.ndim) for n, a in found.items()} != like:
        raise BadInputError(
            f"--variants {kind}: gave other names, dtypes or dimensions than the inputs have"
        )
    return found


def kinds_for(arrays: Arrays) -> tuple[str, ...]:
    """The kinds that change ``arrays``."""
    floats = [a for a in arrays.values() if _moves(a)]
    kinds: list[str] = []
    if floats:
        kinds += ["scale", "noise"]
        if any(_long_axes(a) for a in floats):
            kinds = ["shift", "flip", "scale", "noise", "mix"]
    if any(_is_ids(a) for a in arrays.values()):
        kinds += ["rotate", "swap"]
    return tuple(kinds)


def _moves(array: NDArray[Any]) -> bool:
    """Floats that vary and are finite: a mask of -inf, or of the lowest number, stays as it is."""
    if array.dtype.kind != "f" or array.size < 2:
        return False
    with np.errstate(over="ignore", invalid="ignore"):
        spread = np.ptp(array)
        if not spread > 0.0:
            return False
        if array.dtype == np.float16:  # whose squares leave its range where nothing is wrong
            return bool(spread < np.finfo(np.float16).max / 4.0)
        # Of a large array the square tells as well, for less: it is asked about for every draw.
        return math.isfinite(deviation(array) if array.size <= LARGE else spread * spread)


def _is_looked_up(array: NDArray[Any]) -> bool:
    """Values that vary; of two values it is a mask, which means something else once it is moved."""
    values = flat(array)
    # Mostly a few values tell; all of a table of a vocabulary would be sorted for every draw.
    return _moves(array) and (np.unique(values[:_GLANCE]).size > 2 or np.unique(values).size > 2)


def _is_ids(array: NDArray[Any]) -> bool:
    """Integers of some length: a scalar or a pair is a size, not a sequence."""
    return array.dtype.kind in "iu" and array.size >= 4 and bool(np.ptp(array) > 0)


def _long_axes(array: NDArray[Any]) -> list[int]:
    return [axis for axis, size in enumerate(array.shape) if size >= LONG]


def _rolled(array: NDArray[Any], pick: float, steps: int) -> NDArray[Any]:
    axes = _long_axes(array)
    return np.roll(array, steps, axes[int(pick * len(axes))]) if axes else array


def _noisy(array: NDArray[Any], random: Random, amount: float) -> NDArray[Any]:
    scale = amount * deviation(array)
    return with_noise(array, random, lambda block, numbers: block + numbers * scale)


def _stretched(array: NDArray[Any], random: Random, amount: float) -> NDArray[Any]:
    return with_noise(array, random, lambda block, numbers: block * (1.0 + amount * numbers))


def _like(values: NDArray[Any], array: NDArray[Any]) -> NDArray[Any]:
    found: NDArray[Any] = np.ascontiguousarray(values, array.dtype).reshape(array.shape)
    return found
