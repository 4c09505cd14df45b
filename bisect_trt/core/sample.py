"""One set of real inputs, as every station and runner takes it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Sample:
    """``arrays`` by graph input name, ``name`` for tables and messages; ``drawn`` if this program
    made it from others.
    """

    name: str
    arrays: Mapping[str, NDArray[Any]]
    drawn: bool = False

    @property
    def digest(self) -> str:
        """SHA-256 of the names, types, shapes and values: what the journal knows the sample by."""
        return self._read[0]

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """By graph input name."""
        return self._read[1]

    @property
    def nbytes(self) -> int:
        """Of all arrays."""
        return self._read[2]

    @cached_property
    def _read(self) -> tuple[str, dict[str, tuple[int, ...]], int]:
        """Digest, shapes and bytes: arrays that come from files, or are made, are read once for
        all three.
        """
        found, shapes, nbytes = hashlib.sha256(), {}, 0
        for name in sorted(self.arrays):
            array = self.arrays[name]
            shapes[name], nbytes = tuple(array.shape), nbytes + int(array.nbytes)
            found.update(f"{name}\0{array.dtype.str}\0{array.shape}\0".encode())
            whole = array if array.flags.c_contiguous else array.copy()
            found.update(whole.view("u1").data if whole.ndim and whole.size else whole.tobytes())
        return found.hexdigest(), shapes, nbytes


Item = TypeVar("Item")


def evenly(items: Sequence[Item], most: int) -> list[Item]:
    """At most ``most`` of ``items``, such as samples, spread over their order."""
    if len(items) <= most:
        return list(items)
    return [items[i * len(items) // most] for i in range(most)]
