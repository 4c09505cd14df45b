"""Smaller sets where the blame is shared: every unpinned layer adds its share of error, and the sum must stay below a limit.

A 1-minimal set is then rarely a small one: two weak pins may be exchanged for a stronger layer. The shares are unknown, but each
probe bounds a difference of sums. So the shares and the slack of the found set are held as a joint Gaussian, whose prior comes from
the order of suspicion, and each verdict truncates it (assumed density filtering: moments matched after each probe, the full
covariance kept). Sets to try are the top ones of draws from it (Thompson sampling): one pin fewer where that may pass, else as many
pins where the answer is open, which teaches what to exchange.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

_DRAWS = 128
_HOPELESS = 1e-6
_LIKELY = 0.25
_OPEN = (0.02, 0.98)
_RANK_SHARE, _RANK_REST = 0.894, 0.2
"""Shares are taken as lognormal with sigma 1, and an order of suspicion as that of the shares under a noise of half a sigma."""

_NORMAL = NormalDist()

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


class Shares:
    """What is known of the shares of ``names``; ``base`` is a passing set, and its slack the last variable."""

    def __init__(self, names: Sequence[str], prior: tuple[Floats, Floats], base: frozenset[str]) -> None:
        self.names = list(names)
        self._base = self.mask(base)
        mean, variance = prior
        slack = 0.5 * float(mean[self._base].min())
        self._mean = np.append(mean, slack)
        self._covariance = np.diag(np.append(variance, slack * slack))

    def mask(self, pinned: frozenset[str]) -> Mask:
        """``pinned`` as a vector over the names."""
        return np.asarray([name in pinned for name in self.names])

    def learn(self, pinned: Mask, passed: bool) -> None:
        """Take in the verdict on a set."""
        row = self._rows(pinned[None])[0]
        direction = self._covariance @ row
        variance = max(float(row @ direction), 1e-12)
        deviation = math.sqrt(variance)
        sign = -1.0 if passed else 1.0  # the sum over the limit: at most 0 passes
        t = sign * float(row @ self._mean) / deviation
        hazard = _hazard(t)
        self._mean = self._mean + direction * (sign * hazard / deviation)
        self._covariance = self._covariance - np.outer(direction, direction) * (hazard * (hazard + t) / variance)

    def pass_probability(self, sets: NDArray[np.bool_]) -> Floats:
        """How likely each row of ``sets`` passes."""
        rows = self._rows(sets)
        variance = np.einsum("ij,ij->i", rows @ self._covariance, rows)
        margins = -(rows @ self._mean) / np.sqrt(np.maximum(variance, 1e-12))
        return np.asarray([0.5 * math.erfc(-m / math.sqrt(2.0)) for m in margins])

    def draws(self, random: np.random.Generator) -> Floats:
        """The mean shares, then random ones: (draws, names)."""
        n = len(self.names)
        covariance = self._covariance[:n, :n]
        jitter = 1e-9 * float(np.trace(covariance)) * np.eye(n)  # truncation leaves it only nearly positive definite
        factor = np.linalg.cholesky(covariance + jitter)
        return np.vstack([self._mean[:n], self._mean[:n] + random.standard_normal((_DRAWS, n)) @ factor.T])

    def _rows(self, sets: NDArray[np.bool_]) -> Floats:
        """The sum over the limit, as coefficients: what the base pins and a set does not, minus the reverse, minus the slack."""
        exchanged = self._base.astype(np.float64) - sets.astype(np.float64)
        return np.hstack([exchanged, -np.ones((len(sets), 1))])


def shares_prior(order: Sequence[str], *, informed: bool) -> Mapping[str, tuple[float, float]]:
    """(mean, variance) of each layer's share, from its place in ``order``, least suspicious first."""
    n = len(order)
    rest = _RANK_REST if informed else 1.0
    place = np.asarray([_NORMAL.inv_cdf((i + 0.5) / n) for i in range(n)]) * (_RANK_SHARE if informed else 0.0)
    mean = np.exp(place + rest / 2.0)
    return {name: (float(m), float(m * m * math.expm1(rest))) for name, m in zip(order, mean, strict=True)}


def exchange(shares: Shares, best: frozenset[str], ask: Callable[[frozenset[str]], bool], budget: int) -> None:
    """Ask for sets that may be smaller than ``best``, up to ``budget``; whoever answers keeps the best. Deterministic."""
    random = np.random.default_rng(0)
    size, asked = len(best), set[bytes]()
    for turn in range(budget):
        if size < 2:
            return
        draws = shares.draws(random)
        chosen = _next(shares, draws, size, asked, explore=turn % 2 == 1)
        if chosen is None:
            return
        asked.add(chosen.tobytes())
        passed = ask(frozenset(name for name, pinned in zip(shares.names, chosen, strict=True) if pinned))
        shares.learn(chosen, passed)
        if passed:
            size = min(size, int(chosen.sum()))


def _hazard(t: float) -> float:
    """The normal density over the distribution function at ``t``; far below the mean it is -t, to first order."""
    return -t if t < -30.0 else _NORMAL.pdf(t) / (0.5 * math.erfc(-t / math.sqrt(2.0)))


def _next(shares: Shares, draws: Floats, size: int, asked: set[bytes], *, explore: bool) -> Mask | None:
    smaller = _tops(draws, size - 1, asked)
    likely = shares.pass_probability(smaller)
    best = int(likely.argmax()) if len(smaller) else -1
    if best >= 0 and likely[best] >= _LIKELY:
        return np.asarray(smaller[best])
    if explore or best < 0:
        equal = _tops(draws, size, asked)
        chance = shares.pass_probability(equal)
        if len(equal):
            even = int(np.abs(chance - 0.5).argmin())
            if _OPEN[0] < chance[even] < _OPEN[1]:
                return np.asarray(equal[even])
    return np.asarray(smaller[best]) if best >= 0 and likely[best] >= _HOPELESS else None


def _tops(draws: Floats, size: int, asked: set[bytes]) -> NDArray[np.bool_]:
    """The sets of the ``size`` largest shares of each draw that were not asked for yet."""
    sets = np.zeros(draws.shape, bool)
    np.put_along_axis(sets, np.argpartition(-draws, size - 1, axis=1)[:, :size], True, axis=1)
    sets = np.unique(sets, axis=0)
    return sets[[row.tobytes() not in asked for row in sets]]
