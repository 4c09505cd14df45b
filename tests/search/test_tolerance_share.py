"""What share of the tolerance a set may use."""

from __future__ import annotations

import math

import pytest

from bisect_trt.search.minimise import Headroom, matching_limit, tightened


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
