"""Activations at the cuts of a model, kept so that a later probe need not compute them again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from threading import Lock

from bisect_trt.runners.ort.values import Value, bytes_of

_LEAST, MOST_BYTES = 8 << 20, 16 << 20
"""Of an OCR detector 8 MB are a sample at a quarter of its dozen cuts, of which the last are where
late pins begin: two, four and twelve times as much saved no time, on one page or eight, nor with
``--robust 0``. Of larger models a cut alone may take as much."""

Tensors = Mapping[str, Value]


def room_beside(weights: int) -> int:
    """The bytes to keep beside so many bytes of weights: the promise of memory leaves half of them
    where they are held as they are and rounded.

    Args:
        weights: as the model has them.
    """
    return min(MOST_BYTES, _LEAST + weights // 8)


class KeptActivations:
    """The tensors alive at a cut, by what they depend on; those used last, within a budget.

    Several threads may share it.

    Args:
        most_bytes: of all that is kept; a tensor that lives across several cuts counts at each.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._kept: OrderedDict[Hashable, tuple[Tensors, int]] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()

    def first_of(self, keys: Sequence[Hashable]) -> tuple[int, Tensors] | None:
        """The place among ``keys`` of the first one that is kept, and its tensors; None if none
        is.
        """
        with self._lock:
            for place, key in enumerate(keys):
                if key in self._kept:
                    self._kept.move_to_end(key)
                    return place, self._kept[key][0]
        return None

    def keep(self, key: Hashable, tensors: Tensors) -> None:
        """Remember ``tensors``, and forget what was not used for longest."""
        size = sum(bytes_of(value) for value in tensors.values())
        with self._lock:
            if size > self._most_bytes or key in self._kept:
                return
            self._kept[key] = (dict(tensors), size)
            self._bytes += size
            while self._bytes > self._most_bytes:
                _, (_, gone) = self._kept.popitem(last=False)
                self._bytes -= gone

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._kept.clear()
            self._bytes = 0
