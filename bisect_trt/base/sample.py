"""One input of the model, and arrays that are made when they are asked for."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from threading import RLock
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Sample:
    """``arrays`` by graph input name, ``name`` for tables and messages; ``copied`` if this program
    made it from others.
    """

    name: str
    arrays: Mapping[str, NDArray[Any]]
    copied: bool = False

    @property
    def digest(self) -> str:
        """SHA-256 of the names, types, shapes and values: what the cache knows the sample by."""
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


MOST_BYTES = 16 << 20
"""Who reads the same arrays several times reads so many at a time, or has them made again."""


class _Recent:
    """What was loaded last, up to 16 MB in all."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, Mapping[str, Any]] = OrderedDict()
        self._bytes = 0
        # Reentrant: the garbage collector may free a mapping while another is being looked up.
        self._lock = RLock()

    def get(self, key: int, load: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        found = load()
        with self._lock:
            if key not in self._known:
                self._known[key] = found
                self._bytes += _size(found)
            while self._bytes > MOST_BYTES and len(self._known) > 1:
                self._bytes -= _size(self._known.popitem(last=False)[1])
        return found

    def drop(self, key: int) -> None:
        with self._lock:
            found = self._known.pop(key, None)
            self._bytes -= _size(found) if found is not None else 0


_RECENT = _Recent()


class LazyArrays(Mapping[str, Any]):
    """A mapping of name to array, loaded again when it was not used for a while."""

    def __init__(self, load: Callable[[], Mapping[str, Any]]) -> None:
        self._load = load

    def __getitem__(self, name: str) -> Any:
        return self._arrays()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays())

    def __len__(self) -> int:
        return len(self._arrays())

    def __del__(self) -> None:
        _RECENT.drop(id(self))

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process gets the arrays themselves: it may not have the file."""
        return dict, (dict(self._arrays()),)

    def _arrays(self) -> Mapping[str, Any]:
        return _RECENT.get(id(self), self._load)


def _size(arrays: Mapping[str, Any]) -> int:
    return sum(int(array.nbytes) for array in arrays.values())
