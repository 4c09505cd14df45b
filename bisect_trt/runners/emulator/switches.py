"""How a plan sets the switches of a segmented model: one array of booleans a segment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from bisect_trt.graph.passes.segmented import Segment

Setting = NDArray[np.bool_]
"""For one segment: its flags, then which of its weights are rounded as for a lowered layer."""


class Switches:
    """Turns the set of lowered layers into settings; what depends on names alone is done once.

    Args:
        segments: in order.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._place: dict[str, int] = {}
        rows: list[tuple[int, int, int]] = []
        ends = []
        for segment in segments:
            for flag in segment.flags.values():
                on = [self._index(name) for name in flag.on]
                off = self._index(flag.off[0]) if flag.off else -1
                assert len(on) <= 2 and len(flag.off) <= 1
                rows.append((on[0], on[-1], off))
            rows += [(i := self._index(w.layer), i, -1) for w in segment.weights.values()]
            ends.append(len(rows))
        table = np.asarray(rows, np.intp).reshape(-1, 3)
        self._first, self._second, self._unless = table.T
        self._bounds = list(zip([0, *ends], ends, strict=False))
        self._starts = self._first_segments()

    def of(self, lowered: Iterable[str]) -> list[Setting]:
        """The setting of each segment where the layers ``lowered`` are.

        A flag is on where one of its layers is lowered and not the one that has rounded the tensor
        already.
        """
        # The last place stands for no layer: index -1.
        low = np.zeros(len(self._place) + 1, np.bool_)
        places = [place for name in lowered if (place := self._place.get(name)) is not None]
        low[places] = True
        values = (low[self._first] | low[self._second]) & ~low[self._unless]
        return [values[start:end] for start, end in self._bounds]

    def start_of(self, layer: str) -> int:
        """The first segment that ``layer`` may change where it alone is lowered."""
        return self._starts.get(layer, 0)

    def _index(self, layer: str) -> int:
        return self._place.setdefault(layer, len(self._place))

    def _first_segments(self) -> dict[str, int]:
        first = np.full(len(self._place), len(self._bounds), np.intp)
        for number, (start, end) in enumerate(self._bounds):
            for column in (self._first, self._second):
                np.minimum.at(first, column[start:end], number)
        return {
            name: int(first[place])
            for name, place in self._place.items()
            if first[place] < len(self._bounds)
        }
