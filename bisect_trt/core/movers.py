"""Layers that only move values run as their neighbours do: between two that are kept in FP32 they
are kept there too, and cost no search of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

EXACT = ""
"""Stands for a neighbour that is FP32 in every plan: a graph input or output, or a node that is
never reduced."""


@dataclass(frozen=True, eq=False)
class Movers:
    """The layers that move values, in network order: ``sources`` names the layers that give what
    each reads, ``readers`` those that read what it gives, :data:`EXACT` among them.
    """

    sources: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    readers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def closed(self, pinned: frozenset[str]) -> frozenset[str]:
        """``pinned`` with the movers that stand between two of them."""
        if not pinned or not self.sources:
            return pinned
        exact: dict[str, bool] = {}  # whether a pinned layer is among what it is exact by
        for name, sources in self.sources.items():
            if all(s in exact or s in pinned or s == EXACT for s in sources):
                exact[name] = any(s in pinned or exact.get(s, False) for s in sources)
        wanted: dict[str, bool] = {}
        for name in reversed(list(self.readers)):
            asked = [r for r in self.readers[name] if r in wanted or r in pinned or r == EXACT]
            if asked:
                wanted[name] = any(r in pinned or wanted.get(r, False) for r in asked)
        return pinned | {n for n in exact.keys() & wanted.keys() if exact[n] and wanted[n]}

    def apart_from(self, names: frozenset[str]) -> Movers:
        """Those that are not among ``names``, which stay reduced in every plan."""
        if names.isdisjoint(self.sources):
            return self
        return Movers(
            {n: s for n, s in self.sources.items() if n not in names},
            {n: r for n, r in self.readers.items() if n not in names},
        )

    def inherited(self, pinned: frozenset[str]) -> frozenset[str]:
        """The movers among ``pinned`` that its other layers bring with them."""
        others = pinned.difference(self.sources)
        return (self.closed(others) & pinned) - others
