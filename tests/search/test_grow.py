"""Growing sets where errors add up: the sets must be near the optimum, and probes few."""

from __future__ import annotations

import numpy as np

from bisect_trt.search.grow import Trial, grow


def additive(sensitivities: dict[str, np.ndarray]):
    """An oracle in which the error is exactly the sum of the reduced layers' effects."""
    total = np.sum(list(sensitivities.values()), axis=0)
    calls = []

    def evaluate(sets):
        trials = []
        for pinned in sets:
            vector = (total - np.sum([sensitivities[n] for n in pinned], axis=0)).astype(np.float32)
            score = float(np.abs(vector).max())
            trials.append(Trial(pinned, score <= 1.0, score, vector))
        calls.extend(sets)
        return trials

    return evaluate, calls


def test_positive_effects_are_pinned_largest_first() -> None:
    random = np.random.default_rng(0)
    sizes = np.sort(random.lognormal(size=200))[::-1]
    sensitivities = {f"l{i}": np.float32([s, s / 2]) for i, s in enumerate(sizes / sizes[4:].sum())}
    evaluate, calls = additive(sensitivities)
    start = evaluate([frozenset()])[0]
    found = grow(start, sensitivities, 8.0, evaluate, max_trials=200)
    assert found.passed and len(found.pinned) <= 5
    assert len(calls) <= 1 + 4 * 5


def test_cancelling_effects_are_kept_together() -> None:
    sensitivities = {
        "up": np.float32([3.0]),
        "down": np.float32([-3.0]),
        "alone": np.float32([2.0]),
        "small": np.float32([0.1]),
    }
    evaluate, _ = additive(sensitivities)
    found = grow(evaluate([frozenset()])[0], sensitivities, 8.0, evaluate, max_trials=20)
    assert found.passed and found.pinned == {"alone"}


def test_a_budget_ends_with_the_best_scoring_set() -> None:
    sensitivities = {f"l{i}": np.float32([1.0]) for i in range(50)}
    evaluate, calls = additive(sensitivities)
    found = grow(evaluate([frozenset()])[0], sensitivities, 8.0, evaluate, max_trials=12)
    assert not found.passed and found.score < 50 and len(calls) - 1 <= 12 + 4


def test_effects_that_are_not_finite_are_no_candidates() -> None:
    sensitivities = {"bad": np.float32([np.nan]), "good": np.float32([5.0])}
    start = Trial(frozenset(), False, 5.0, np.float32([5.0]))
    found = grow(
        start,
        sensitivities,
        8.0,
        lambda sets: [Trial(s, "good" in s, 0.0, np.float32([0.0])) for s in sets],
        max_trials=4,
    )
    assert found.pinned == {"good"}
