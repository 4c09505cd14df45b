"""The shortest prefix, with the number of questions asserted."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bisect_trt.search.prefix import affordable, by_worth, grown, shortest_prefix


@given(st.integers(0, 1999), st.data())
def test_finds_the_shortest_in_few_questions(length: int, data: st.DataObject) -> None:
    needed = data.draw(st.integers(0, length))
    first = data.draw(st.integers(0, length))
    asked: list[int] = []

    def passes(count: int) -> bool:
        asked.append(count)
        return count >= needed

    assert shortest_prefix(length, passes, first=first) == max(needed, first)
    assert len(asked) == len(set(asked)) and min(asked) >= first
    assert len(asked) <= 2 * math.log2(max(2, needed - first + 2)) + 2


@given(st.integers(0, 1999), st.data())
def test_from_a_guess_it_is_found_in_either_direction(length: int, data: st.DataObject) -> None:
    needed, first, guess = (data.draw(st.integers(0, length)) for _ in range(3))
    asked: list[int] = []

    def passes(count: int) -> bool:
        asked.append(count)
        return count >= needed

    answer = max(needed, first)
    assert shortest_prefix(length, passes, first=first, guess=guess) == answer
    assert len(asked) == len(set(asked)) and min(asked) >= first
    assert asked[0] == max(first, guess)
    assert len(asked) <= 2 * math.log2(abs(answer - asked[0]) + 2) + 2


def test_none_where_not_even_all_pass() -> None:
    assert shortest_prefix(5, lambda _: False) is None
    assert shortest_prefix(0, lambda _: False) is None


@pytest.mark.parametrize("needed", [{3, 4, 7, 8, 9}, {2, 9}])
def test_where_more_is_not_better_the_answer_passes_and_its_predecessor_fails(
    needed: set[int],
) -> None:
    found = shortest_prefix(9, lambda k: k in needed)
    assert found in needed and found - 1 not in needed


@given(st.integers(2000, 200_000))
def test_of_thousands_a_thousandth_is_near_enough(needed: int) -> None:
    asked: list[int] = []

    def passes(count: int) -> bool:
        asked.append(count)
        return count >= needed

    found = shortest_prefix(300_000, passes)
    assert found is not None and needed <= found <= needed + found // 1000
    assert len(asked) <= math.log2(needed) + 2 + 10


@given(
    st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=60),
    st.integers(0, 59),
    st.floats(0.05, 1.0),
)
def test_what_is_left_is_the_share_asked_for_and_no_shorter_prefix_leaves_it(
    strengths: list[float], length: int, share: float
) -> None:
    ranked = sorted(strengths, reverse=True)
    length = min(length, len(ranked) - 1)
    found = grown(ranked, length, share)

    def left(count: int) -> float:
        return math.sqrt(math.fsum(ranked[count:]))

    assert length <= found <= len(ranked)
    assert left(found) <= share * left(length) * (1 + 1e-9)
    assert found == length or left(found - 1) > share * left(length) * (1 - 1e-9)


@pytest.mark.parametrize(
    ("strengths", "length", "share"),
    [
        ([4.0, 1.0], 2, 0.5),  # nothing is left
        ([math.inf, math.inf, 1.0], 1, 0.5),  # what overflows has no size
        ([4.0, 1.0, 1.0], 1, 0.0),  # so does what it was refused by
        ([4.0, 0.0, 0.0], 1, 0.9),  # nothing of the rest was measured
    ],
)
def test_what_cannot_be_told_grows_by_nothing(
    strengths: list[float], length: int, share: float
) -> None:
    assert grown(strengths, length, share) == length


@given(st.permutations([f"layer{k}" for k in range(12)]))
def test_layers_are_ranked_by_what_their_cost_buys(names: list[str]) -> None:
    strength = {name: float(1 + int(name[5:]) % 5) for name in names[:9]}  # three are unknown
    cost = {name: float(1 + int(name[5:]) % 4) for name in names}
    first = set(names[3:5])
    ranked = by_worth(names, strength, cost, first)
    assert sorted(ranked) == sorted(names) and set(ranked[:2]) == first
    rest = ranked[2:]
    least = min(strength.values())
    worth = [strength.get(name, least) / cost[name] for name in rest]
    assert worth == sorted(worth, reverse=True)


def test_layers_that_cost_nothing_keep_their_order_of_strength() -> None:
    strength = {"dear": 100.0, "a": 1.0, "b": 3.0, "c": 2.0}
    cost = {"dear": 1000.0, "a": 0.0, "b": 0.01, "c": 0.5}
    assert by_worth(list(strength), strength, cost) == ["b", "c", "a", "dear"]
    assert by_worth(["a", "b"], {}, {}) == ["a", "b"]


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(0, 60))
def test_what_fits_is_taken_in_order_and_what_does_not_is_passed_over(
    costs: list[int], limit: int
) -> None:
    names = [f"layer{k}" for k in range(len(costs))]
    cost = dict(zip(names, costs, strict=True))
    kept = affordable(names, lambda pins: sum(cost[name] for name in pins) <= limit)
    expected: list[str] = []
    for name in names:
        if sum(cost[n] for n in expected) + cost[name] <= limit:
            expected.append(name)
    assert kept == expected
