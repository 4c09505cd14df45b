"""Removal to a fixpoint: nothing that is left can go, and the proof says so."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bisect_trt.search.minimise import one_minimal

NAMES = [f"layer{i}" for i in range(12)]


@given(st.sets(st.sampled_from(NAMES)), st.sampled_from([1, 3]))
def test_what_is_left_is_what_is_needed(needed: set[str], workers: int) -> None:
    told: list[frozenset[str]] = []
    asked: list[frozenset[str]] = []

    def ask(pins: frozenset[str]) -> bool:
        asked.append(pins)
        return needed <= pins

    found = one_minimal(NAMES, ask, bool, ahead=told.extend, workers=workers)
    assert found.pinned == needed and found.removed == len(NAMES) - len(needed)
    assert set(found.proof) == needed and not any(found.proof.values())
    # Each removal is asked once a round; a round without a removal ends it.
    assert len(asked) <= len(NAMES) + len(needed)
    if workers == 1:
        assert told == asked


def test_it_goes_round_again_where_removals_help_each_other() -> None:
    """Not monotone: what cannot go in the first round may go in the second."""
    passing = [{"c", "a"}, {"c"}, {"b", "c"}, {"a", "b", "c"}]
    found = one_minimal(["c", "b", "a"], lambda pins: set(pins) in passing, bool)
    assert found.pinned == {"c"}


def test_giving_up_is_the_caller_s() -> None:
    with pytest.raises(RuntimeError):
        one_minimal(["a"], lambda _: (_ for _ in ()).throw(RuntimeError()), bool)
