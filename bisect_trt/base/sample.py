"""One input of the model, and arrays that are loaded when they are used."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Sample:
    """One input: ``arrays`` by graph input, ``name`` for tables and messages.

    ``copied``: it is a perturbed or augmented copy of another.
    """

    name: str
    arrays: Mapping[str, NDArray[Any]]
    copied: bool = False

    @property
    def digest(self) -> str:
        """SHA-256 of names, types, shapes and values, for the cache's keys."""
        return self._properties[0]

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes by graph input."""
        return self._properties[1]

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays."""
        return self._properties[2]

    @cached_property
    def _properties(self) -> tuple[str, dict[str, tuple[int, ...]], int]:
        """The digest, the shapes and the bytes."""
        # All three at once, since the arrays may have to be loaded for each.
        digest, shapes, nbytes = hashlib.sha256(), {}, 0
        for name in sorted(self.arrays):
            array = self.arrays[name]
            shapes[name], nbytes = tuple(array.shape), nbytes + int(array.nbytes)
            digest.update(f"{name}\0{array.dtype.str}\0{array.shape}\0".encode())
            # Hashed in place: tobytes() copies.
            whole = array if array.flags.c_contiguous else array.copy()
            digest.update(whole.view("u1").data if whole.ndim and whole.size else whole.tobytes())
        return digest.hexdigest(), shapes, nbytes


Item = TypeVar("Item")


def evenly(items: Sequence[Item], most: int) -> list[Item]:
    """At most ``most`` of ``items``, evenly spread over their order."""
    if len(items) <= most:
        return list(items)
    return [items[i * len(items) // most] for i in range(most)]


RECENT_BYTES = 16 << 20
"""The bytes of loaded arrays that :class:`RecentArrays` keeps."""


class RecentArrays:
    """Keeps the latest arrays that several :class:`LazyArrays` have loaded."""

    def __init__(self) -> None:
        self._arrays: OrderedDict[int, Mapping[str, Any]] = OrderedDict()
        self._bytes = 0
        self._keys = count()
        self._lock = Lock()

    def new_key(self) -> int:
        """A key that no other mapping has."""
        return next(self._keys)

    def get(self, key: int, load: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        """The arrays of ``key``, from ``load`` if they are not kept."""
        with self._lock:
            if key in self._arrays:
                self._arrays.move_to_end(key)
                return self._arrays[key]
        loaded = load()  # without the lock: loading may take long
        with self._lock:
            if key not in self._arrays:
                self._arrays[key] = loaded
                self._bytes += _size(loaded)
            while self._bytes > RECENT_BYTES and len(self._arrays) > 1:
                self._bytes -= _size(self._arrays.popitem(last=False)[1])
        return loaded


class LazyArrays(Mapping[str, Any]):
    """Arrays by name that are loaded on use, and again once ``recent`` has dropped them."""

    def __init__(self, load: Callable[[], Mapping[str, Any]], recent: RecentArrays) -> None:
        self._load = load
        self._recent = recent
        self._key = recent.new_key()

    def __getitem__(self, name: str) -> Any:
        return self._arrays()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays())

    def __len__(self) -> int:
        return len(self._arrays())

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the arrays themselves: another process may not have the file."""
        return dict, (dict(self._arrays()),)

    def _arrays(self) -> Mapping[str, Any]:
        return self._recent.get(self._key, self._load)


def _size(arrays: Mapping[str, Any]) -> int:
    return sum(int(array.nbytes) for array in arrays.values())
