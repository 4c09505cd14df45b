"""The predicted spread: incremental sums against sums made anew, and plans against what is known to be the best."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bisect_trt.search.spread import Rounding, Spread, fewest_pins, peak

_ELEMENTS = 3


def random_spread(seed: int, layers: int = 12, roundings: int = 30) -> Spread:
    random = np.random.default_rng(seed)
    names = [f"l{i}" for i in range(layers)]
    made = []
    for _ in range(roundings):
        chosen = random.choice(names, size=int(random.integers(1, 4)), replace=False)
        on, off = chosen[: max(1, len(chosen) - 1)], chosen[max(1, len(chosen) - 1) :]
        made.append(Rounding(tuple(on), tuple(off), random.standard_normal(_ELEMENTS), random.random(_ELEMENTS)))
    return Spread(names, made)


def by_hand(spread: Spread, roundings: list[Rounding], lowered: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    names = {n for n, low in zip(spread.layers, lowered, strict=True) if low}
    made = [r for r in roundings if names & set(r.on) and not names & set(r.off)]
    return sum((r.mean for r in made), np.zeros(_ELEMENTS)), sum((r.variance for r in made), np.zeros(_ELEMENTS))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_sums_kept_up_to_date_equal_sums_made_anew(seed: int) -> None:
    spread, random = random_spread(seed), np.random.default_rng(seed + 1)
    lowered = random.random(12) < 0.5
    before = spread.totals(lowered)
    turned = [int(i) for i in random.choice(12, size=2, replace=False)]
    mean, variance = spread.change(lowered, turned)
    after = spread.totals(lowered)
    np.testing.assert_allclose(before[0] + mean, after[0], atol=1e-12)
    np.testing.assert_allclose(before[1] + variance, after[1], atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_what_is_to_come_ends_at_nothing_and_is_exact_on_the_way(seed: int) -> None:
    spread, random = random_spread(seed), np.random.default_rng(seed + 1)
    planned = random.random(12) < 0.5
    mean, variance = spread.totals(planned)
    for layer in range(12):
        change = spread.decide(planned, layer, bool(random.random() < 0.5))
        mean, variance = mean + change[0], variance + change[1]
        decided = planned.copy()
        decided[layer + 1 :] = False
        # Roundings that the decided layers make already, and the plan of the rest keeps, are not to come.
        coming = [k for k in range(len(spread.mean)) if spread._made(k, planned, 12) and not spread._made(k, decided, 12)]
        np.testing.assert_allclose(mean, spread.mean[coming].sum(axis=0), atol=1e-9)
        np.testing.assert_allclose(variance, spread.variance[coming].sum(axis=0), atol=1e-9)
    np.testing.assert_allclose(variance, 0.0, atol=1e-9)


def test_totals_follow_on_and_off() -> None:
    one, two = np.ones(_ELEMENTS), 2.0 * np.ones(_ELEMENTS)
    roundings = [Rounding(("a",), (), one, two), Rounding(("b",), ("a",), two, one)]
    spread = Spread(["a", "b"], roundings)
    for mask in ([False, False], [True, False], [False, True], [True, True]):
        for found, expected in zip(spread.totals(np.asarray(mask)), by_hand(spread, roundings, np.asarray(mask)), strict=True):
            np.testing.assert_array_equal(found, expected)
    assert spread.alone(0) == np.sqrt(1.0 + 2.0)


def test_the_peak_norm_bounds_the_maximum_and_does_not_overflow() -> None:
    rows = np.asarray([[1e200, 1.0, 0.0], [0.5, -0.5, 0.5], [0.0, 0.0, 0.0]])
    norms = peak(rows)
    assert norms[0] == 1e200 and norms[2] == 0.0
    assert 0.5 <= norms[1] <= 0.5 * 3 ** (1 / 12) + 1e-12


def test_independent_roundings_the_largest_are_pinned() -> None:
    random = np.random.default_rng(0)
    sizes = np.sort(random.lognormal(size=80))
    names = [f"l{i}" for i in random.permutation(80)]
    of = {name: float(sizes[int(name[1:])]) for name in names}
    spread = Spread(names, [Rounding((n,), (), np.zeros(1), np.asarray([of[n]])) for n in names])
    limit = float(np.sqrt(sizes[:60].sum()))  # lowering the 60 smallest just fits: 20 pins are the fewest
    plan = fewest_pins(spread, frozenset({"l0"}), limit * 1.0001, 20_000)
    pinned = {n for n, low in zip(names, plan, strict=True) if not low}
    assert "l0" in pinned
    assert peak(np.sqrt(spread.totals(plan)[1])) <= limit * 1.001
    assert len(pinned) <= 22
    assert np.array_equal(plan, fewest_pins(spread, frozenset({"l0"}), limit * 1.0001, 20_000)), "deterministic"


def test_a_limit_that_all_layers_keep_pins_nothing_else() -> None:
    spread = Spread(["a", "b"], [Rounding(("a",), (), np.zeros(2), np.ones(2)), Rounding(("b",), (), np.zeros(2), np.ones(2))])
    assert fewest_pins(spread, frozenset({"b"}), 10.0, 100).tolist() == [True, False]
