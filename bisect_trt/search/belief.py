"""Where the culprits probably are: a Bayesian mixture that sizes the groups of a search.

It never decides a verdict.

Layers stand in order, least suspicious first. A hypothesis says that about ``count`` layers are
culprits, independently, and that they lean towards the suspicious end by a power ``lean``: layer
``i`` of ``n`` is one with probability ``count * lean * u**(lean - 1) / n`` at ``u = (i + 1/2) /
n``. A lean of 1 is a useless prior, 50 has an AUC of 0.98, and the mirrored leans are hostile
priors. Each finding re-weighs the hypotheses, so a bad prior is recognised and costs little.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_LEANS = {4.0: 0.5, 16.0: 1.0, 32.0: 2.0, 64.0: 5.0, 128.0: 5.0}
_HOSTILE_LEANS = {4.0: 0.1, 16.0: 0.1}
"""Leans and their weights beside the even one's 1: a measured prior is usually a good one, and
rarely hostile.
"""

_COUNT_POWER = 0.8
"""Culprits are few: a count's prior falls with this power of it, tuned on synthetic culprits."""

_MAX_HAZARD = 0.9


@dataclass(frozen=True)
class Hypotheses:
    """The grid of hypotheses.

    ``log_survival[h, i]`` is the log probability that none of the first ``i`` layers is a culprit
    under ``h``.
    """

    log_survival: NDArray[np.float64]
    log_hazard: NDArray[np.float64]
    log_prior: NDArray[np.float64]

    @property
    def size(self) -> int:
        """The number of layers."""
        return int(self.log_hazard.shape[1])


def make_hypotheses(n: int, *, informed: bool) -> Hypotheses:
    """The grid for ``n`` layers; without a prior (``informed`` false) only the even lean stands."""
    u = (np.arange(n) + 0.5) / n
    shapes, weights = [np.ones(n)], [1.0]
    if informed:
        shapes += [a * u ** (a - 1.0) for a in _LEANS]
        shapes += [a * (1.0 - u) ** (a - 1.0) for a in _HOSTILE_LEANS]
        weights += [*_LEANS.values(), *_HOSTILE_LEANS.values()]
    counts = 2.0 ** np.arange(0.0, max(np.log2(max(n, 2)), 1.0))
    hazards, priors = [], []
    for shape, weight in zip(shapes, weights, strict=True):
        for count in counts:
            hazards.append(np.clip(count * shape / n, 1e-12, _MAX_HAZARD))
            priors.append(weight / count**_COUNT_POWER)
    hazard = np.asarray(hazards)
    log_survival = np.zeros((len(hazards), n + 1))
    np.cumsum(np.log1p(-hazard), axis=1, out=log_survival[:, 1:])
    prior = np.asarray(priors)
    return Hypotheses(log_survival, np.log(hazard), np.log(prior / prior.sum()))


@dataclass(frozen=True)
class Belief:
    """The weights of the hypotheses after what was found so far."""

    hypotheses: Hypotheses
    log_weight: NDArray[np.float64]

    @staticmethod
    def start(hypotheses: Hypotheses) -> Belief:
        """The belief before the first probe."""
        return Belief(hypotheses, hypotheses.log_prior)

    def innocent(self, start: int, stop: int) -> Belief:
        """The belief after layers ``start`` to ``stop`` were seen to pass unpinned."""
        s = self.hypotheses.log_survival
        return self._weighed(s[:, stop] - s[:, start])

    def culprit(self, at: int) -> Belief:
        """The belief after layer ``at`` was found guilty."""
        return self._weighed(self.hypotheses.log_hazard[:, at])

    def pass_probability(self, start: int, stop: int, fails_at: int | None = None) -> float:
        """The probability of no culprit from ``start`` to ``stop``, but one before ``fails_at``."""
        s, weight = self.hypotheses.log_survival, np.exp(self.log_weight)
        survives = np.exp(s[:, stop] - s[:, start])
        if fails_at is None:
            return float(weight @ survives)
        all_survive = np.exp(s[:, fails_at] - s[:, start])
        denominator = float(weight @ (1.0 - all_survive))
        return float(weight @ (survives - all_survive)) / denominator if denominator > 0.0 else 0.5

    def even_split(self, start: int, fails_at: int | None) -> int:
        """The group end at which pass and fail are most nearly equally likely."""
        low, high = start + 1, self.hypotheses.size if fails_at is None else fails_at - 1
        # The probability falls with the end: find the last at which it is at least one half.
        while low < high:
            middle = (low + high + 1) // 2
            if self.pass_probability(start, middle, fails_at) >= 0.5:
                low = middle
            else:
                high = middle - 1
        following = low + 1
        if following < (self.hypotheses.size + 1 if fails_at is None else fails_at):
            here = self.pass_probability(start, low, fails_at)
            there = self.pass_probability(start, following, fails_at)
            if abs(there - 0.5) < abs(here - 0.5):
                return following
        return low

    def _weighed(self, log_likelihood: NDArray[np.float64]) -> Belief:
        weight = self.log_weight + log_likelihood
        top = float(weight.max())
        return Belief(self.hypotheses, weight - (top + np.log(np.exp(weight - top).sum())))
