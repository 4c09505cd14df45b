"""From a passing set to one that costs less time: pins exchanged for cheaper neighbours, and added where that spares casts.

A pinned layer between reduced ones pays a cast on every border, so that pinning what lies between two pins can be faster than
not to. Each step takes the cheapest set that passes; a set that costs as much or more is never taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

MAX_TRIALS = 64


class Cost(Protocol):
    """What a set costs, and which layers exchange tensors."""

    @property
    def neighbours(self) -> Mapping[str, frozenset[str]]:
        """The layers that each layer reads from or writes to."""

    def seconds(self, pinned: frozenset[str]) -> float:
        """The estimated time that ``pinned`` adds."""


def quicken(pinned: frozenset[str], cost: Cost, passes: Callable[[frozenset[str]], bool], max_trials: int = MAX_TRIALS) -> frozenset[str]:
    """The cheapest passing set found from ``pinned``, in at most ``max_trials`` probes; never a dearer one.

    ``pinned`` passes, and is known to fail without any one of its pins.
    """
    tried, trials = {pinned, *(pinned - {name} for name in pinned)}, 0
    while True:
        here = cost.seconds(pinned)
        priced = sorted((cost.seconds(s), sorted(s)) for s in set(_next_to(pinned, cost.neighbours)) - tried)
        for seconds, names in priced:
            if seconds >= here * (1.0 - 1e-9) or trials == max_trials:
                return pinned
            candidate = frozenset(names)
            tried.add(candidate)
            trials += 1
            if passes(candidate):
                pinned = candidate
                break
        else:
            return pinned


def _next_to(pinned: frozenset[str], neighbours: Mapping[str, frozenset[str]]) -> Iterator[frozenset[str]]:
    """Sets one step away: a pin out, a pin exchanged for a neighbour, one or two neighbours in."""
    around: frozenset[str] = frozenset().union(*(neighbours[name] for name in pinned)) - pinned
    for name in pinned:
        yield pinned - {name}
        for other in neighbours[name] - pinned:
            yield pinned - {name} | {other}
    for name in around:
        yield pinned | {name}
        for other in neighbours[name] - pinned:
            yield pinned | {name, other}
