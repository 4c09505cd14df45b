"""The search for a small set of layers to keep in FP32.

A Bayesian mixture says where the culprits probably are. It sizes the groups of the search and never
decides a verdict. Layers are in order, the least suspicious first. A hypothesis says that about
``count`` layers are culprits, independently. It makes layer ``i`` of ``n`` one with probability
``count * lean * u**(lean - 1) / n`` at ``u = (i + 1/2) / n``. The power ``lean`` says how good the
ranking is: 1 is useless, a mirrored one is hostile. Each evaluation re-weighs the hypotheses, so
that a bad ranking is recognised.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from bisect_trt.base.interrupt import BudgetSpentError
from bisect_trt.base.outcomes import Verdict
from bisect_trt.search.minimise import one_minimal


@dataclass(frozen=True)
class Probe:
    """One evaluation: its number (from 0), the pinned set, the outcome."""

    index: int
    pinned: frozenset[str]
    verdict: Verdict


@dataclass(frozen=True)
class PinSearch:
    """The result of a search.

    ``pinned``: the smallest set that passed, or all layers.
    ``feasible``: pinning everything passes.
    ``complete``: the budget did not end the search.
    ``probes``: the evaluations in order. ``rounds``: the rounds of parallel ones.
    ``certificate``: by pin, the evaluation that failed without it; of every pin if ``complete``.
    """

    pinned: frozenset[str]
    feasible: bool
    complete: bool
    probes: tuple[Probe, ...] = ()
    certificate: Mapping[str, Probe] = field(default_factory=dict)
    rounds: int = 0


ProbeFunction = Callable[[frozenset[str]], Verdict]


class Oracle:
    """Evaluates sets, each once, and keeps the budget and the order."""

    def __init__(
        self, probe: ProbeFunction, workers: int = 1, max_probes: int | None = None
    ) -> None:
        self._probe = probe
        self.workers = max(1, workers)
        self._max = max_probes
        self._pool = ThreadPoolExecutor(self.workers) if self.workers > 1 else None
        self.evaluated: dict[frozenset[str], Probe] = {}
        self.rounds = 0

    @property
    def probes(self) -> tuple[Probe, ...]:
        """The evaluations in order."""
        return tuple(self.evaluated.values())

    def ask(self, wanted: Sequence[frozenset[str]]) -> Probe:
        """The evaluation of ``wanted[0]``; the others may be evaluated beside it.

        Raises:
            BudgetSpentError: no evaluation is left.
        """
        if wanted[0] not in self.evaluated:
            self.run(wanted)
        return self.evaluated[wanted[0]]

    def run(self, wanted: Sequence[frozenset[str]]) -> None:
        """Evaluate the first new ones of ``wanted``, one for each worker.

        Raises:
            BudgetSpentError: no evaluation is left.
        """
        new = [w for w in dict.fromkeys(wanted) if w not in self.evaluated][: self.workers]
        if not new:
            return
        if self._max is not None:
            if len(self.evaluated) >= self._max:
                raise BudgetSpentError
            new = new[: self._max - len(self.evaluated)]
        verdicts = (
            [self._probe(new[0])] if self._pool is None else list(self._pool.map(self._probe, new))
        )
        for pinned, verdict in zip(new, verdicts, strict=False):
            self.evaluated[pinned] = Probe(len(self.evaluated), pinned, Verdict(verdict))
        self.rounds += 1

    def close(self) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


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
    # 1, 2, 4 ... culprits.
    counts = 2.0 ** np.arange(0.0, max(np.log2(max(n, 2)), 1.0))
    hazards, priors = [], []
    for shape, weight in zip(shapes, weights, strict=True):
        for count in counts:
            # Inside 0 to 1, as logarithms of both sides are taken.
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
        # The group passes, and the rest up to ``fails_at`` does not: over the latter's probability.
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
        # Normalised from the largest on, since exp() of very negative weights is 0.
        top = float(weight.max())
        return Belief(self.hypotheses, weight - (top + np.log(np.exp(weight - top).sum())))


@dataclass(frozen=True)
class Position:
    """The state of a bisection.

    Layers before ``position`` are decided, the ``culprits`` among them pinned; unpinning up to
    ``fails_at`` fails.
    """

    belief: Belief
    position: int = 0
    fails_at: int | None = None
    culprits: tuple[int, ...] = ()

    @property
    def done(self) -> bool:
        """Whether every layer is decided."""
        return self.position >= self.belief.hypotheses.size

    @property
    def next_end(self) -> int:
        """The end of the group to unpin next."""
        return self.belief.even_split(self.position, self.fails_at)

    def pass_probability(self, end: int) -> float:
        """The probability that unpinning up to ``end`` passes."""
        return self.belief.pass_probability(self.position, end, self.fails_at)

    def after(self, end: int, passed: bool) -> Position:
        """The position after unpinning up to ``end`` has ``passed`` or not."""
        if passed:
            moved = Position(
                self.belief.innocent(self.position, end), end, self.fails_at, self.culprits
            )
        else:
            moved = Position(self.belief, self.position, end, self.culprits)
        if moved.fails_at is None or moved.fails_at - moved.position > 1:
            return moved
        culprit = moved.position  # the only layer left that can be to blame
        belief = moved.belief.culprit(culprit)
        return Position(belief, culprit + 1, None, (*moved.culprits, culprit))


class Pool:
    """The bisection of the layers in ``order``, with ``pinned`` pinned throughout.

    ``unpinned`` is the failed evaluation without any of them pinned, if there is one.
    """

    def __init__(
        self,
        order: Sequence[str],
        pinned: frozenset[str],
        informed: bool,
        unpinned: Probe | None,
    ) -> None:
        n = len(order)
        self.order = order
        self.pinned = pinned
        self.at = Position(
            Belief.start(make_hypotheses(n, informed=informed)),
            fails_at=None if unpinned is None else n,
        )
        if unpinned is not None and n == 1:
            self.at = self.at.after(n, passed=False)
        self.certificate: dict[str, Probe] = (
            {} if unpinned is None or n > 1 else {order[0]: unpinned}
        )
        self._failed_with: dict[int, Probe] = {} if unpinned is None else {n: unpinned}

    @property
    def culprits(self) -> frozenset[str]:
        """The culprits found so far."""
        return frozenset(self.order[c] for c in self.at.culprits)

    def pins(self, at: Position) -> frozenset[str]:
        """The pinned set to evaluate next from position ``at``."""
        return self.pinned.union(self.order[at.next_end :], (self.order[c] for c in at.culprits))

    def learn(self, probe: Probe) -> None:
        """Move on by the evaluation of ``pins(self.at)``."""
        end = self.at.next_end
        if not probe.verdict.passed:
            self._failed_with[end] = probe
        before, self.at = len(self.at.culprits), self.at.after(end, probe.verdict.passed)
        if len(self.at.culprits) > before:
            culprit = self.at.culprits[-1]
            self.certificate[self.order[culprit]] = self._failed_with[culprit + 1]
            self._failed_with.clear()


def find_pins(
    layers: Sequence[str],
    probe: ProbeFunction,
    *,
    suspicion: Mapping[str, float] | None = None,
    workers: int = 1,
    max_probes: int | None = None,
) -> PinSearch:
    """Find a one-minimal set of ``layers`` that passes pinned: none of them can be left out alone.

    It is deterministic for given verdicts. Where more pins may hurt, the caller verifies the final
    set; the certificate holds for the sets that were evaluated.

    Args:
        layers: unique ids in network order.
        probe: evaluates a pinned set; called from ``workers`` threads.
        suspicion: by layer, in any unit; larger is more suspicious, absent is 0.
        workers: how many evaluations may run at a time.
        max_probes: the most distinct evaluations, those of no pins and of all pins included.

    Returns:
        The set, its proof and every evaluation; ``complete`` is false where the budget ended it.

    Raises:
        ValueError: two layers have one id.
    """
    if len(set(layers)) != len(layers):
        raise ValueError("layer ids must be unique")
    oracle = Oracle(probe, workers, max_probes)
    try:
        return _Search(layers, oracle, suspicion).run()
    finally:
        oracle.close()


class _Search:
    def __init__(
        self, layers: Sequence[str], oracle: Oracle, suspicion: Mapping[str, float] | None
    ) -> None:
        self._oracle = oracle
        self._everything = frozenset(layers)
        # sorted() is stable: of equal suspicion, the network's order remains.
        self._order = (
            sorted(layers, key=lambda name: suspicion.get(name, 0.0)) if suspicion else list(layers)
        )
        self._informed = bool(suspicion)
        self._best = self._everything
        self._certificate: dict[str, Probe] = {}

    def run(self) -> PinSearch:
        feasible = False
        try:
            nothing, everything = frozenset[str](), self._everything
            unpinned = self._oracle.ask([nothing, everything])
            if unpinned.verdict.passed:
                feasible, self._best = True, nothing
            passes_pinned = self._oracle.ask([everything]).verdict.passed
            if unpinned.verdict.passed:
                return self._result(nothing, True, True)
            feasible = passes_pinned
            if not feasible:
                return self._result(everything, False, True)
            self._settle(unpinned)
        except BudgetSpentError:
            return self._result(self._best, feasible, False)
        return self._result(self._best, True, True)

    def _settle(self, unpinned: Probe) -> None:
        count = max(1, min(self._oracle.workers, len(self._order) // 8))  # 8 layers a pool
        if count == 1:
            self._explore([Pool(self._order, frozenset(), self._informed, unpinned)])
            return
        dealt = [self._order[i::count] for i in range(count)]
        pools = [Pool(o, self._everything.difference(o), self._informed, None) for o in dealt]
        self._explore(pools)
        found = frozenset().union(*(pool.culprits for pool in pools))
        together = self._oracle.ask([found])
        if together.verdict.passed:
            self._best = found
            return
        # Each pool was judged with the others pinned: together they may unpin too much. The missing
        # layers are in the rest.
        rest = [name for name in self._order if name not in found]
        self._explore([Pool(rest, found, self._informed, together)])
        self._leave_out()

    def _leave_out(self) -> None:
        """Make the best set one-minimal: each pool's proof is beside other layers."""
        ordered = [name for name in self._order if name in self._best]
        workers = self._oracle.workers

        def ask(pins: frozenset[str]) -> Probe:
            probe = self._oracle.ask([pins])
            if probe.verdict.passed:  # kept in case the budget ends
                self._best = pins
            return probe

        minimal = one_minimal(
            ordered,
            ask,
            lambda probe: probe.verdict.passed,
            ahead=self._oracle.run,
            workers=workers,
        )
        self._best, self._certificate = minimal.pinned, dict(minimal.proof)

    def _explore(self, pools: Sequence[Pool]) -> None:
        """Decide all layers of ``pools``, a round of evaluations at a time."""
        while True:
            for pool in pools:
                while not pool.at.done and (pins := pool.pins(pool.at)) in self._oracle.evaluated:
                    probe = self._oracle.evaluated[pins]
                    if probe.verdict.passed and len(pins) <= len(self._best):
                        self._best = pins
                    pool.learn(probe)
            if all(pool.at.done for pool in pools):
                break
            self._oracle.run(self._likely_next(pools))
        for pool in pools:
            self._certificate.update(pool.certificate)

    def _likely_next(self, pools: Sequence[Pool]) -> list[frozenset[str]]:
        """Each pool's next set, then the sets that may follow, the likeliest first."""
        wanted: dict[frozenset[str], None] = {}
        queue: list[tuple[float, int, Pool, Position]] = []
        for number, pool in enumerate(pools):
            if not pool.at.done:
                queue.append((-1.0, number, pool, pool.at))
        pushed = len(pools)
        while queue and len(wanted) < self._oracle.workers:
            probability, _, pool, state = heapq.heappop(queue)
            wanted.setdefault(pool.pins(state))
            if self._oracle.workers == 1:
                break
            chance = state.pass_probability(state.next_end)
            for passed, share in ((True, chance), (False, 1.0 - chance)):
                following = state.after(state.next_end, passed)
                if not following.done:
                    pushed += 1
                    heapq.heappush(queue, (probability * share, pushed, pool, following))
        return list(wanted)

    def _result(self, pinned: frozenset[str], feasible: bool, complete: bool) -> PinSearch:
        proved = {
            name: self._certificate[name] for name in sorted(pinned) if name in self._certificate
        }
        return PinSearch(
            pinned, feasible, complete, self._oracle.probes, proved, self._oracle.rounds
        )


class Regime(StrEnum):
    """Whether few layers are to blame, or many share the blame."""

    FEW_CULPRITS = "few culprits"
    DIFFUSE = "diffuse"


def regime_of(pins: int, layers: int) -> Regime | None:
    """The regime by the share of ``layers`` that is pinned; None between the two."""
    if pins <= 0.15 * layers:  # a transformer's LayerNorms are fewer
        return Regime.FEW_CULPRITS
    # Fewer than eight pins are few, however small the model.
    return Regime.DIFFUSE if pins >= max(8, layers / 3.0) else None


def ranking_auc(suspicion: Mapping[str, float], pinned: Sequence[str]) -> float:
    """The AUC of ``suspicion`` as a ranking of the pins: 1 is perfect, 0.5 is chance."""
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
    is_pinned = np.asarray([n in chosen for n in names])
    k = len(chosen)
    # The statistic of Mann and Whitney.
    return float((ranks[is_pinned].sum() - k * (k + 1) / 2.0) / (k * (len(names) - k)))


def information_bound(layers: int, pins: int) -> float:
    """log2 of the number of sets of that size: the fewest evaluations on average of any search."""
    return (
        math.lgamma(layers + 1) - math.lgamma(pins + 1) - math.lgamma(layers - pins + 1)
    ) / math.log(2.0)


def count_violations(tried: Sequence[tuple[frozenset[str], bool]]) -> int:
    """How many failing sets include a passing one; 0 where more pins never hurt."""
    # Sets as bits: every pair is compared.
    names: dict[str, int] = {}
    bits = [
        (sum(1 << names.setdefault(n, len(names)) for n in pins), passed) for pins, passed in tried
    ]
    passing = [b for b, passed in bits if passed]
    return sum(any(p & failed == p for p in passing) for failed, passed in bits if not passed)
