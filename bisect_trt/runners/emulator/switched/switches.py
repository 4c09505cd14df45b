"""How a plan sets the switches of a segmented model: one array of booleans a segment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from bisect_trt.graph.passes.segments.segment import Segment

Setting = NDArray[np.bool_]
"""For one segment: its flags, then which of its weights are rounded as for a lowered layer."""


class Switches:
    """Turns the set of lowered layers into settings; what depends on names alone is done once.

    Args:
        segments: in order.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._place: dict[str, int] = {}
        # Each switch with each layer that asks for it, and the one that it is not needed for.
        switches: list[int] = []
        layers: list[int] = []
        unless: list[int] = []
        ends = []
        for segment in segments:
            asked = [(flag.on, flag.off) for flag in segment.flags.values()]
            asked += [((weight.layer,), ()) for weight in segment.weights.values()]
            for on, off in asked:
                layers += [self._index(name) for name in on]
                switches += [len(unless)] * len(on)
                assert len(off) <= 1
                unless.append(self._index(off[0]) if off else -1)
            ends.append(len(unless))
        self._switches, self._layers, self._unless = (
            np.asarray(column, np.intp) for column in (switches, layers, unless)
        )
        self._bounds = list(zip([0, *ends], ends, strict=False))
        self._starts = self._first_segments(ends)

    def of(self, lowered: Iterable[str]) -> list[Setting]:
        """The setting of each segment where the layers ``lowered`` are.

        A flag is on where one of its layers is lowered and not the one that has rounded the tensor
        already.
        """
        # The last place stands for no layer: index -1.
        low = np.zeros(len(self._place) + 1, np.bool_)
        low[[place for name in lowered if (place := self._place.get(name)) is not None]] = True
        values = np.zeros(len(self._unless), np.bool_)
        values[self._switches[low[self._layers]]] = True
        values &= ~low[self._unless]
        return [values[start:end] for start, end in self._bounds]

    def start_of(self, layer: str) -> int:
        """The first segment that ``layer`` may change where it alone is lowered."""
        return self._starts.get(layer, 0)

    def _index(self, layer: str) -> int:
        return self._place.setdefault(layer, len(self._place))

    def _first_segments(self, ends: Sequence[int]) -> dict[str, int]:
        first = np.full(len(self._place), len(ends), np.intp)
        np.minimum.at(first, self._layers, np.searchsorted(ends, self._switches, side="right"))
        return {name: int(first[i]) for name, i in self._place.items() if first[i] < len(ends)}
