"""The search against oracles whose answer is known, with the number of probes asserted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bisect_trt import Verdict as PublicVerdict
from bisect_trt.search import PinSearch, Verdict, find_pins

NO_PRIOR = {
    (200, 1): 11,
    (200, 4): 31,
    (200, 16): 87,
    (1000, 1): 13,
    (1000, 4): 40,
    (1000, 16): 125,
}
"""Mean probes of the design's table, baselines not counted."""


def names(n: int) -> list[str]:
    return [f"layer{i}" for i in range(n)]


def needs(culprits: frozenset[str]):
    return lambda pinned: Verdict.PASS if culprits <= pinned else Verdict.FAIL


def check(found: PinSearch, culprits: frozenset[str]) -> None:
    assert found.feasible and found.complete and found.pinned == culprits
    assert set(found.certificate) == culprits
    for name, proof in found.certificate.items():
        assert (
            name not in proof.pinned
            and not proof.verdict.passed
            and found.probes[proof.index] == proof
        )
    assert len({p.pinned for p in found.probes}) == len(found.probes)


@given(st.integers(1, 60), st.data())
def test_finds_exactly_the_culprits(n: int, data: st.DataObject) -> None:
    layers = names(n)
    culprits = frozenset(data.draw(st.sets(st.sampled_from(layers), min_size=1)))
    suspicion = data.draw(
        st.none() | st.fixed_dictionaries({name: st.floats(-1, 1) for name in layers})
    )
    workers = data.draw(st.sampled_from([1, 3]))
    check(find_pins(layers, needs(culprits), suspicion=suspicion, workers=workers), culprits)


@pytest.mark.parametrize(("n", "k"), list(NO_PRIOR))
def test_mean_probes_without_a_prior(n: int, k: int) -> None:
    layers, counts = names(n), []
    for seed in range(200 if k < 16 else 100):
        culprits = frozenset(np.random.default_rng(seed).choice(layers, k, replace=False).tolist())
        found = find_pins(layers, needs(culprits))
        assert found.pinned == culprits
        counts.append(len(found.probes) - 2)
    assert np.mean(counts) <= 1.05 * NO_PRIOR[(n, k)]


def test_a_perfect_prior_needs_few_probes_and_a_useless_one_costs_little() -> None:
    layers, counts = names(1000), {"none": [], "perfect": [], "useless": []}
    for seed in range(40):
        random = np.random.default_rng(seed)
        culprits = frozenset(random.choice(layers, 4, replace=False).tolist())
        priors = {
            "none": None,
            "perfect": {name: float(name in culprits) for name in layers},
            "useless": dict(zip(layers, random.normal(size=1000).tolist(), strict=True)),
        }
        for kind, prior in priors.items():
            counts[kind].append(len(find_pins(layers, needs(culprits), suspicion=prior).probes) - 2)
    assert np.mean(counts["perfect"]) <= 14
    assert np.mean(counts["useless"]) <= 1.25 * np.mean(counts["none"])


def test_baselines_come_first_and_can_end_the_search() -> None:
    layers = names(5)
    nothing = find_pins(layers, lambda _: Verdict.PASS)
    assert nothing.feasible and nothing.pinned == frozenset() and len(nothing.probes) == 2
    hopeless = find_pins(layers, lambda _: Verdict.FAIL)
    assert not hopeless.feasible and hopeless.complete
    assert [p.pinned for p in hopeless.probes] == [frozenset(), frozenset(layers)]


@pytest.mark.parametrize("verdict", [v for v in Verdict if v is not Verdict.PASS])
def test_only_a_clear_pass_drops_a_pin(verdict: Verdict) -> None:
    culprits = frozenset({"layer3", "layer7"})
    found = find_pins(names(10), lambda pinned: Verdict.PASS if culprits <= pinned else verdict)
    check(found, culprits)
    assert {p.verdict for p in found.probes} == {Verdict.PASS, verdict}


@pytest.mark.parametrize("budget", [2, 3, 6, 12])
def test_a_budget_ends_with_a_set_that_passes(budget: int) -> None:
    culprits = frozenset({"layer30", "layer70"})
    found = find_pins(names(100), needs(culprits), max_probes=budget)
    assert len(found.probes) == budget and not found.complete and found.feasible
    assert culprits <= found.pinned
    assert {p.verdict for p in found.probes if p.pinned == found.pinned} == {Verdict.PASS}


def test_same_verdicts_same_walk() -> None:
    culprits = frozenset({"layer2", "layer44"})
    first, second = (find_pins(names(64), needs(culprits)) for _ in range(2))
    assert first == second


def test_workers_need_fewer_rounds() -> None:
    """Eight workers on 1,000 layers with 16 culprits: at most 22 rounds in the mean, and few probes
    wasted.
    """
    layers, rounds, counts = names(1000), [], []
    for seed in range(30):
        culprits = frozenset(np.random.default_rng(seed).choice(layers, 16, replace=False).tolist())
        found = find_pins(layers, needs(culprits), workers=8)
        check(found, culprits)
        rounds.append(found.rounds - 1)  # the two baselines are one
        counts.append(len(found.probes) - 2)
    assert np.mean(rounds) <= 22.0
    assert np.mean(counts) <= 1.5 * NO_PRIOR[(1000, 16)]


def test_pools_that_give_up_too_much_together_are_mended() -> None:
    """Errors add up: what each pool can spare alone is too much for all, and the last walk brings
    layers back.
    """
    layers = names(64)
    weight = {name: 1.0 + i % 7 for i, name in enumerate(layers)}

    def probe(pinned: frozenset[str]) -> Verdict:
        return (
            Verdict.PASS
            if sum(w for name, w in weight.items() if name not in pinned) <= 40.0
            else Verdict.FAIL
        )

    for workers in (1, 2, 4, 8):
        found = find_pins(layers, probe, suspicion=weight, workers=workers)
        assert found.complete and found.feasible and probe(found.pinned).passed
        assert set(found.certificate) == found.pinned


@pytest.mark.parametrize(
    ("n", "k"), [(200, 1), (200, 4), (200, 16), (1000, 1), (1000, 4), (1000, 16)]
)
def test_mean_probes_with_a_prior(n: int, k: int) -> None:
    """AUC 0.98: at most 1.1 times the design's count; useless at most 1.25 times no prior, hostile
    1.35 times.
    """
    reference = {
        (200, 1): 5,
        (200, 4): 14,
        (200, 16): 49,
        (1000, 1): 7,
        (1000, 4): 20,
        (1000, 16): 62,
    }
    layers, counts = names(n), {"none": [], "good": [], "useless": [], "hostile": []}
    shift = {
        "good": 2.9044,
        "useless": 0.0,
        "hostile": -2.9044,
    }  # of two unit normals: sqrt(2) times the normal quantile of 0.98
    for seed in range(100 if k < 16 else 40):
        random = np.random.default_rng(seed)
        chosen, noise = random.choice(n, k, replace=False), random.normal(size=n)
        culprits = frozenset(layers[i] for i in chosen)
        for kind, found in counts.items():
            scores = noise.copy()
            scores[chosen] += shift.get(kind, 0.0)
            prior = None if kind == "none" else dict(zip(layers, scores.tolist(), strict=True))
            found.append(len(find_pins(layers, needs(culprits), suspicion=prior).probes) - 2)
    mean = {kind: np.mean(found) for kind, found in counts.items()}
    assert mean["good"] <= 1.1 * reference[(n, k)]
    assert mean["useless"] <= 1.25 * mean["none"]
    assert mean["hostile"] <= 1.35 * mean["none"]


def test_duplicate_layers_are_refused_and_the_verdict_is_public() -> None:
    with pytest.raises(ValueError, match="unique"):
        find_pins(["a", "a"], lambda _: Verdict.PASS)
    assert PublicVerdict is Verdict


@given(
    st.lists(st.sets(st.integers(0, 15), min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(1, 4),
)
def test_no_pin_can_be_spared_where_several_sets_would_do(
    ways: list[set[int]], workers: int
) -> None:
    """With several workers layers were proved beside others that were left out in the end."""
    layers = names(16)
    pass_with = [frozenset(layers[i] for i in way) for way in ways]

    def probe(pinned: frozenset[str]) -> Verdict:
        return Verdict.PASS if any(way <= pinned for way in pass_with) else Verdict.FAIL

    found = find_pins(layers, probe, workers=workers)
    assert found.complete and probe(found.pinned).passed
    assert set(found.certificate) == found.pinned
    assert not any(probe(found.pinned - {name}).passed for name in found.pinned)
