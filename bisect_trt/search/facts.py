"""What can be said of a search afterwards: what kind of set it found, and what finding it took."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum

import numpy as np

_FEW, _MANY = 0.15, 1.0 / 3.0
"""Of the layers: a transformer whose LayerNorms are to blame has up to 0.15 of them pinned."""

_SPREAD = 8
"""Fewer pins are named one by one, however small the model."""


class Regime(StrEnum):
    """What kind of problem the search met."""

    FEW_CULPRITS = "few culprits"
    DIFFUSE = "diffuse"


def regime_of(pins: int, layers: int) -> Regime | None:
    """The regime by the share of ``layers`` that is pinned: what a set needs is what it shows. None
    where it is neither few nor many.
    """
    if pins <= _FEW * layers:
        return Regime.FEW_CULPRITS
    return Regime.DIFFUSE if pins >= max(_SPREAD, _MANY * layers) else None


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
