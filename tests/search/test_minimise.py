"""Removal of layers to a fixpoint, and the share of the tolerance that a set may use."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bisect_trt.search.minimise import Headroom, matching_limit, one_minimal, tightened

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


@pytest.mark.parametrize(
    ("pinned", "kept"),
    [
        (0.0, 0.95),
        (0.6, 0.98),  # an engine whose FP32 is TF32
        (0.98, 0.999),  # a metric that is best near its limit
        (1.0, 1.0),
        (2.0, 1.0),
    ],
)
def test_a_margin_is_a_part_of_what_pins_decide(pinned: float, kept: float) -> None:
    room = Headroom(1.0, pinned, 0.95)
    assert room.within(1.0) == 1.0 and math.isclose(room.kept, kept)


def test_no_limit_is_nothing_however_little_an_engine_leaves() -> None:
    """A decision of which the engine's FP32 uses all that is allowed."""
    assert matching_limit(3.0, 1.0, (0.0, 1.0)) > 0.0
    assert tightened(1.0, 2.0, 1.0, (0.0, 1.0)) > 0.0


def test_a_metric_that_is_best_at_its_limit_is_searched_within_all_of_it() -> None:
    """The same text on both, with all pins and with none on the emulator; the engine misses."""
    assert matching_limit(2.0, 1.0, (1.0, 1.0)) >= 1.0
