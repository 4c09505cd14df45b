"""A session whose inputs and outputs keep their places gives what one that is fed gives. On the CPU
nothing is captured; all else is as on a GPU.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bisect_trt.base.plan import Precision
from bisect_trt.model.segment_forms import with_weights_chosen, without_branches
from bisect_trt.model.segments import PackedSegment, cut
from bisect_trt.model.switched import Segment, to_switched
from bisect_trt.runners.captured import CapturedSession
from bisect_trt.runners.constants import ConstantStore
from bisect_trt.runners.device import CPU
from bisect_trt.runners.segment_session import SegmentForm, SegmentSession
from bisect_trt.runners.values import owned, value_of, viewed
from tests.runners.test_branchless import PAIRS, network


@cache
def both(low: Precision, pin: Precision) -> tuple[Segment, SegmentSession, CapturedSession]:
    """The segment, what is fed, and what keeps its places; each with constants of its own."""
    (segment,) = cut(to_switched(network(), low, pin), network(), 1)
    fed = SegmentSession(
        segment, ConstantStore(network()), SegmentForm(PackedSegment(segment), 0, CPU)
    )
    kept = CapturedSession(without_branches(segment), ConstantStore(network()), 0, CPU)
    return segment, fed, kept


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(PAIRS),
    st.integers(0, 2**24),
    st.booleans(),
    st.integers(1, 7),
    st.floats(-70000, 70000, width=32),
)
def test_places_change_no_number(
    pair: tuple[Precision, Precision], choice: int, flag: bool, rows: int, value: float
) -> None:
    segment, fed, kept = both(*pair)
    count = len(segment.flags) + len(segment.weights)
    setting = np.array([bool(choice >> place & 1) for place in range(count)])
    inputs = {
        "x": np.float32(value) * np.linspace(-1, 1, 4 * rows, dtype="f4").reshape(rows, 4),
        "empty": np.zeros((0, 4), np.float32),
        "flag": np.array(flag),
    }
    owners = {name: owned(array) for name, array in inputs.items()}
    tensors = {name: value_of(owner) for name, owner in owners.items()}
    wanted = fed.run(tensors, setting)
    for _ in range(2):  # the first of a shape makes its places, the others find them
        got = kept.run(tensors, setting)
        assert got is not None and got.keys() == wanted.keys()
        for name, one in wanted.items():
            assert tuple(got[name].shape()) == tuple(one.shape())
            np.testing.assert_array_equal(viewed(got[name]), viewed(one))


def test_a_shape_too_many_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bisect_trt.runners.captured._MOST_SHAPES", 2)
    (segment,) = cut(to_switched(network(), *PAIRS[0]), network(), 1)
    kept = CapturedSession(without_branches(segment), ConstantStore(network()), 0, CPU)
    setting = np.zeros(len(segment.flags) + len(segment.weights), np.bool_)

    def answered(rows: int) -> bool:
        owners = {
            "x": owned(np.ones((rows, 4), np.float32)),
            "empty": owned(np.zeros((0, 4), np.float32)),
            "flag": owned(np.array(True)),
        }
        tensors = {name: value_of(owner) for name, owner in owners.items()}
        return kept.run(tensors, setting) is not None

    assert [answered(rows) for rows in (1, 2, 3, 2)] == [True, True, False, True]


def test_the_names_of_the_choices_are_no_tensor_s() -> None:
    (segment,) = cut(to_switched(network(), *PAIRS[0]), network(), 1)
    weight = next(iter(segment.weights))
    segment.model.graph.node[0].output[0] = f"{weight}__pinned"
    _, choices = with_weights_chosen(without_branches(segment))
    assert choices[weight].pinned == f"{weight}__pinned_"


def test_segments_one_after_the_other_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: what crosses a cut goes through the host."""
    monkeypatch.setattr("bisect_trt.model.segments._FEWEST_NODES", 2)
    switched = to_switched(network(), *PAIRS[0])
    (whole,), parts = cut(switched, network(), 1), list(cut(switched, network(), 3))
    assert len(parts) > 1
    kept = [CapturedSession(without_branches(p), ConstantStore(network()), 0, CPU) for p in parts]
    all_at_once = CapturedSession(without_branches(whole), ConstantStore(network()), 0, CPU)
    names = (*whole.flags, *whole.weights)
    random = np.random.default_rng(0)
    for _ in range(20):
        state = {name: bool(random.integers(2)) for name in names}
        owners = {
            "x": owned(random.standard_normal((3, 4)).astype(np.float32)),
            "empty": owned(np.zeros((0, 4), np.float32)),
            "flag": owned(np.array(bool(random.integers(2)))),
        }
        tensors = {name: value_of(owner) for name, owner in owners.items()}
        wanted = all_at_once.run(tensors, np.array([state[name] for name in names]))
        assert wanted is not None
        for part, session in zip(parts, kept, strict=True):
            setting = np.array([state[n] for n in (*part.flags, *part.weights)], np.bool_)
            found = session.run(tensors, setting)
            assert found is not None
            tensors |= found
        for name, one in wanted.items():
            np.testing.assert_array_equal(viewed(tensors[name]), viewed(one))
