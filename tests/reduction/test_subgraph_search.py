"""The reduction against oracles whose answer is known, with the number of probes asserted."""

from __future__ import annotations

from collections.abc import Callable
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bisect_trt.base.interrupt import BudgetSpentError
from bisect_trt.base.outcomes import Verdict
from bisect_trt.reduction.reduce import SubgraphSearch

Bad = Callable[[frozenset[str]], bool]


def names(n: int) -> list[str]:
    return [f"node{i}" for i in range(n)]


def some(*numbers: int) -> frozenset[str]:
    return frozenset(f"node{i}" for i in numbers)


def reduced(
    n: int,
    bad: Bad,
    *,
    budget: int | None = None,
    otherwise: Verdict = Verdict.FAIL,
) -> SubgraphSearch:
    made = 0

    def ask(subgraph: frozenset[str]) -> Verdict:
        nonlocal made
        if made == budget:
            raise BudgetSpentError
        made += 1
        return Verdict.PASS if bad(subgraph) else otherwise

    found = SubgraphSearch(names(n), ask)
    found.run()
    assert len(found.evaluations) == made == len({p.subgraph for p in found.evaluations})
    if found.best is not None:
        seen = [p for p in found.evaluations if p.subgraph == found.best]
        assert [p.verdict for p in seen] == [Verdict.PASS]
    return found


def needs(*numbers: int) -> Bad:
    return lambda subgraph: subgraph >= some(*numbers)


@pytest.mark.parametrize(
    ("n", "numbers", "probes"),
    [
        (64, (40,), 12),  # the whole, 6 for the outputs, 5 for the inputs: then one node is left
        (64, (0,), 7),
        (64, (63,), 13),
        (1000, (500,), 18),
        (64, (10, 50), 24),
        (1000, (100, 900), 39),
        (64, (30, 31, 32, 33), 16),
        (1, (0,), 1),
    ],
)
def test_finds_exactly_what_is_needed(n: int, numbers: tuple[int, ...], probes: int) -> None:
    found = reduced(n, needs(*numbers))
    assert found.complete and found.best == some(*numbers)
    assert len(found.evaluations) == probes


@given(st.integers(1, 80), st.data())
def test_any_set_is_found(n: int, data: st.DataObject) -> None:
    numbers = data.draw(st.sets(st.integers(0, n - 1), min_size=1))
    found = reduced(n, needs(*numbers))
    assert found.complete and found.best is not None and found.best == some(*numbers)


@given(st.integers(1, 40), st.integers(0, 2**32))
def test_a_chaotic_oracle_ends_with_a_piece_that_it_called_bad(n: int, seed: int) -> None:
    """Verdicts drawn at random by subgraph: nothing is monotone."""
    bad = frozenset(names(n))

    def chance(subgraph: frozenset[str]) -> bool:
        return subgraph == bad or crc32(repr((seed, sorted(subgraph))).encode()) % 3 == 0

    found = reduced(n, chance)
    assert found.complete and found.best is not None and chance(found.best)
    for node in found.best:
        rest = found.best - {node}
        assert not rest or not chance(rest)


def test_a_set_that_more_nodes_hide() -> None:
    """Not monotone: an output next to the culprit breaks the fusion, so its neighbours must both be
    there or both be gone.
    """

    def bad(subgraph: frozenset[str]) -> bool:
        beside = len(subgraph & some(19, 21))
        return "node20" in subgraph and beside != 1

    found = reduced(40, bad)
    assert found.complete and found.best is not None and bad(found.best)
    assert found.best in (some(20), some(19, 20, 21))
    assert len(found.evaluations) <= 20


def test_a_whole_that_is_not_bad_costs_one_probe() -> None:
    found = reduced(30, lambda _: False)
    assert found.best is None and not found.complete and len(found.evaluations) == 1


@pytest.mark.parametrize("verdict", [v for v in Verdict if v is not Verdict.PASS])
def test_what_is_unclear_was_not_seen_to_be_bad(verdict: Verdict) -> None:
    found = reduced(20, needs(3, 12), otherwise=verdict)
    assert found.complete and found.best == some(3, 12)


@pytest.mark.parametrize("budget", range(1, 28))
def test_a_budget_ends_with_the_smallest_piece_seen(budget: int) -> None:
    found = reduced(64, needs(10, 50), budget=budget)
    assert found.best is not None and needs(10, 50)(found.best)
    bad = [len(p.subgraph) for p in found.evaluations if p.verdict.passed]
    assert len(found.best) == min(bad)
    assert found.complete is (budget >= 24)
