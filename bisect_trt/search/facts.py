"""What can be said of a search afterwards: what kind of set it found, and what finding it took."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum

import numpy as np

_BULK = 0.9


class Regime(str, Enum):
    """What kind of problem the search met."""

    FEW_CULPRITS = "few culprits"
    DIFFUSE = "diffuse accumulation"

    def __str__(self) -> str:
        return self.value


def regime_of(pinned: Sequence[str], alone: Mapping[str, float]) -> tuple[Regime, int]:
    """The regime, and over how many layers the error spreads.

    ``alone`` maps layers to their scores when only they are lowered. Few culprits: at least half of
    the pins miss the requirement alone, or of the layers that do not, the pins make up nine tenths
    of the squared effects, or it was not measured. Else the error is spread over the fewest layers
    that make up nine tenths.
    """
    guilty = sum(not alone[name] <= 1.0 for name in pinned if name in alone)
    rest = {name: score**2 for name, score in alone.items() if score <= 1.0}
    if not pinned or not alone or 2 * guilty >= len(pinned) or not rest:
        return Regime.FEW_CULPRITS, len(pinned)
    squares = np.sort(np.asarray(list(rest.values()), np.float64))[::-1]
    total = float(squares.sum())
    spread = (
        int(np.searchsorted(np.cumsum(squares), _BULK * total * (1.0 - 1e-9))) + 1
        if total > 0.0
        else len(pinned)
    )
    theirs = sum(rest.get(name, 0.0) for name in pinned)
    return (
        (Regime.FEW_CULPRITS, len(pinned))
        if theirs >= _BULK * total
        else (Regime.DIFFUSE, spread + guilty)
    )


def ranking_auc(suspicion: Mapping[str, float], pinned: Sequence[str]) -> float:
    """How well ``suspicion`` ranked the pins above the rest: 1 is perfect, 0.5 a coin's (Mann and
    Whitney); NaN where there is no rest.
    """
    chosen = set(pinned) & set(suspicion)
    names = list(suspicion)
    if not chosen or len(chosen) == len(names):
        return math.nan
    values = np.asarray([suspicion[n] for n in names])
    order = np.argsort(values, kind="stable")
    ranks = np.empty(len(names))
    ranks[order] = np.arange(1, len(names) + 1)
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.bincount(inverse, weights=ranks) / counts)[inverse]  # ties share their mean rank
    mine = np.asarray([n in chosen for n in names])
    k = len(chosen)
    return float((ranks[mine].sum() - k * (k + 1) / 2.0) / (k * (len(names) - k)))


def information_bound(layers: int, pins: int) -> float:
    """log2 of the number of sets of that size: no search by yes and no can average fewer probes."""
    return (
        math.lgamma(layers + 1) - math.lgamma(pins + 1) - math.lgamma(layers - pins + 1)
    ) / math.log(2.0)


def count_violations(tried: Sequence[tuple[frozenset[str], bool]]) -> int:
    """How many failing sets hold a passing one: none where more pins never hurt. Sets as bits, so
    that hundreds are quick.
    """
    names: dict[str, int] = {}
    bits = [
        (sum(1 << names.setdefault(n, len(names)) for n in pins), passed) for pins, passed in tried
    ]
    passing = [b for b, passed in bits if passed]
    return sum(any(p & failed == p for p in passing) for failed, passed in bits if not passed)
