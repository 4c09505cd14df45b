"""Cheaper sets from a smallest one, on costs written by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from bisect_trt.search.quicken import quicken


@dataclass(frozen=True)
class Chain:
    """Layers 0, 1, ... in a row: each has its price, and each border between a pinned and another layer costs ``border``."""

    prices: tuple[float, ...]
    border: float

    @property
    def neighbours(self) -> Mapping[str, frozenset[str]]:
        n = len(self.prices)
        return {str(i): frozenset(str(j) for j in (i - 1, i + 1) if 0 <= j < n) for i in range(n)}

    def seconds(self, pinned: frozenset[str]) -> float:
        states = [str(i) in pinned for i in range(len(self.prices))]
        borders = sum(a != b for a, b in zip([False, *states], [*states, False], strict=True))
        return sum(p for p, s in zip(self.prices, states, strict=True) if s) + borders * self.border


def test_a_gap_of_two_between_pins_is_filled_where_the_casts_cost_more() -> None:
    gap = Chain((1.0,) * 6, border=3.0)
    pins = frozenset({"1", "4"})
    assert quicken(pins, gap, lambda s: pins <= s) == {"1", "2", "3", "4"}
    assert quicken(pins, Chain((1.0,) * 6, border=0.5), lambda s: pins <= s) == pins


def test_removals_that_are_known_to_fail_cost_no_trial() -> None:
    """Forty pins apart from each other, and one gap that is worth filling."""
    chain = Chain(tuple(1.0 for _ in range(130)), border=0.6)
    pins = frozenset(str(3 * i) for i in range(40)) | {"122", "124"}
    asked: list[frozenset[str]] = []
    assert quicken(pins, chain, lambda s: bool(asked.append(s)) or pins <= s, max_trials=3) > pins


def test_a_pin_is_exchanged_for_a_cheaper_neighbour_that_serves() -> None:
    chain = Chain((1.0, 9.0, 2.0, 1.0), border=0.1)
    assert quicken(frozenset({"1"}), chain, lambda s: bool(s & {"1", "2"})) == {"2"}


@given(st.lists(st.floats(0.1, 5.0), min_size=2, max_size=12), st.floats(0.0, 5.0), st.data())
def test_never_a_dearer_set_and_never_one_that_fails(prices: list[float], border: float, data: st.DataObject) -> None:
    chain = Chain(tuple(prices), border)
    needed = frozenset(data.draw(st.sets(st.sampled_from([str(i) for i in range(len(prices))]), min_size=1)))
    asked: list[frozenset[str]] = []

    def passes(pinned: frozenset[str]) -> bool:
        asked.append(pinned)
        return needed <= pinned

    found = quicken(needed, chain, passes, max_trials=10)
    assert needed <= found and chain.seconds(found) <= chain.seconds(needed)
    assert len(asked) <= 10 and len(set(asked)) == len(asked)
