"""Small sets where the blame is shared: an oracle that adds lognormal errors, whose best set is known."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.searching import additive
from bisect_trt.search import Verdict, find_pins
from bisect_trt.search.shares import Shares, shares_prior


@pytest.mark.parametrize(("n", "k", "seeds"), [(200, 4, 40), (200, 16, 5), (1000, 4, 60), (1000, 16, 5)])
def test_the_set_is_hardly_larger_than_the_best_one(n: int, k: int, seeds: int) -> None:
    """The limit is the tightest that ``k`` pins can meet, so that only the one best set does."""
    ratios = []
    for seed in range(seeds):
        layers, probe, suspicion = additive(seed, n, k)
        found = find_pins(layers, probe, suspicion=suspicion)
        assert found.shared and found.complete and probe(found.pinned).passed
        assert set(found.certificate) == found.pinned
        assert all(not probe(found.pinned - {name}).passed for name in found.pinned)
        assert len(found.probes) <= 2 + 3 * n // 4 + 160 + 20 * 2 * k
        ratios.append(len(found.pinned) / k)
    assert min(ratios) >= 1.0
    assert np.mean(ratios) <= 1.1


def test_exchanges_bound_the_probes_and_none_asks_for_none() -> None:
    layers, probe, suspicion = additive(3, 200, 4)
    plain = find_pins(layers, probe, suspicion=suspicion, exchanges=0)
    some = find_pins(layers, probe, suspicion=suspicion, exchanges=10)
    assert plain.shared and some.shared
    assert len(some.probes) <= len(plain.probes) + 10 + len(some.pinned)
    assert len(some.pinned) <= len(plain.pinned)


def test_culprits_of_their_own_are_not_taken_for_shares() -> None:
    layers = [f"layer{i}" for i in range(100)]
    culprits = frozenset({"layer97", "layer98", "layer99"})
    found = find_pins(layers, lambda pins: Verdict.PASS if culprits <= pins else Verdict.FAIL)
    assert found.pinned == culprits and not found.shared


def test_a_verdict_moves_the_shares_the_right_way() -> None:
    names = ["a", "b", "c"]
    prior = shares_prior(names, informed=True)
    assert prior["a"] < prior["b"] < prior["c"]
    mean, variance = (np.asarray([prior[n][i] for n in names]) for i in (0, 1))
    shares = Shares(names, (mean, variance), frozenset("c"))
    exchanged = shares.mask(frozenset("a"))
    before = shares.pass_probability(exchanged[None])[0]
    shares.learn(exchanged, True)
    assert shares.pass_probability(exchanged[None])[0] > before
