"""Where the culprits probably are: a Bayesian mixture that sizes the groups of a search.

It never decides a verdict. Layers are in order, the least suspicious first. A hypothesis says that
about ``count`` layers are culprits, independently. It makes layer ``i`` of ``n`` one with
probability ``count * lean * u**(lean - 1) / n`` at ``u = (i + 1/2) / n``. The power ``lean`` says
how good the ranking is: 1 is useless, a mirrored one is hostile. Each evaluation re-weighs the
hypotheses, so that a bad ranking is recognised.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_LEANS = {4.0: 0.5, 16.0: 1.0, 32.0: 2.0, 64.0: 5.0, 128.0: 5.0}
_HOSTILE_LEANS = {4.0: 0.1, 16.0: 0.1}
"""Prior weights of the leans, that of lean 1 being 1: a measured ranking is usually good."""


@dataclass(frozen=True)
class Hypotheses:
    """The grid of hypotheses, by hypothesis and layer.

    ``log_survival[h, i]``: the log probability of no culprit among the first ``i`` layers.
    ``log_hazard[h, i]``: that of layer ``i`` being one. ``log_prior[h]``: that of the hypothesis.
    """

    log_survival: NDArray[np.float64]
    log_hazard: NDArray[np.float64]
    log_prior: NDArray[np.float64]

    @property
    def size(self) -> int:
        """The number of layers."""
        return int(self.log_hazard.shape[1])


def make_hypotheses(n: int, *, informed: bool) -> Hypotheses:
    """The grid for ``n`` layers; with lean 1 only unless the order is ``informed``."""
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
            hazards.append(np.clip(count * shape / n, 1e-12, 0.9))
            # Culprits are few. The power was tuned on synthetic culprits.
            priors.append(weight / count**0.8)
    hazard = np.asarray(hazards)
    log_survival = np.zeros((len(hazards), n + 1))
    np.cumsum(np.log1p(-hazard), axis=1, out=log_survival[:, 1:])
    prior = np.asarray(priors)
    return Hypotheses(log_survival, np.log(hazard), np.log(prior / prior.sum()))


@dataclass(frozen=True)
class Belief:
    """The weights of the hypotheses after the evaluations so far."""

    hypotheses: Hypotheses
    log_weight: NDArray[np.float64]

    @staticmethod
    def start(hypotheses: Hypotheses) -> Belief:
        """The belief before the first evaluation."""
        return Belief(hypotheses, hypotheses.log_prior)

    def innocent(self, start: int, stop: int) -> Belief:
        """The belief after layers ``start`` to ``stop`` passed unpinned."""
        s = self.hypotheses.log_survival
        return self._weighed(s[:, stop] - s[:, start])

    def culprit(self, at: int) -> Belief:
        """The belief after layer ``at`` was found to be a culprit."""
        return self._weighed(self.hypotheses.log_hazard[:, at])

    def pass_probability(self, start: int, stop: int, fails_at: int | None = None) -> float:
        """The probability of no culprit in ``start:stop``, given one before ``fails_at``."""
        s, weight = self.hypotheses.log_survival, np.exp(self.log_weight)
        survives = np.exp(s[:, stop] - s[:, start])
        if fails_at is None:
            return float(weight @ survives)
        all_survive = np.exp(s[:, fails_at] - s[:, start])
        denominator = float(weight @ (1.0 - all_survive))
        return float(weight @ (survives - all_survive)) / denominator if denominator > 0.0 else 0.5

    def even_split(self, start: int, fails_at: int | None) -> int:
        """The end of the group that passes with a probability nearest one half."""
        low, high = start + 1, self.hypotheses.size if fails_at is None else fails_at - 1
        # The probability falls with the end: bisect for the last with at least one half.
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
