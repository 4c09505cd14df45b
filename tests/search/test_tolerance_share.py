"""What share of the tolerance a set may use."""

from __future__ import annotations

import math

import pytest

from bisect_trt.search.tolerance_share import Room


@pytest.mark.parametrize(
    ("pinned", "proportional", "within"),
    [
        (0.0, True, 0.95),
        (0.6, True, 0.98),  # an engine whose FP32 is TF32
        (0.98, True, 0.95),  # nothing but all pins is left to give
        (0.98, False, 0.999),  # a metric that is best near its limit
        (2.0, False, 1.0),
    ],
)
def test_a_margin_is_a_part_of_what_pins_decide(
    pinned: float, proportional: bool, within: float
) -> None:
    room = Room.of(1.0, pinned, proportional, 0.95)
    assert room.within(1.0) == 1.0 and math.isclose(room.kept, within)
