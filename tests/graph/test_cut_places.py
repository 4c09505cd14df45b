"""Cuts stand where few tensors cross, and where a network repeats a block at the same place of each
copy.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import onnx
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from bisect_trt.model.segments import Crossing, kinds_of, repeated_blocks


@settings(max_examples=80, deadline=None)
@given(st.integers(3, 40), st.integers(16, 40), st.integers(0, 60), st.integers(0, 60), st.data())
def test_a_block_is_found_wherever_it_begins(
    period: int, copies: int, before: int, behind: int, data: st.DataObject
) -> None:
    """Its operators come several times in it, and outside of it too."""
    block = data.draw(st.lists(st.integers(0, 5), min_size=period - 1, max_size=period - 1))
    block.append(6)  # so that no part of it is a block by itself
    outside = list(range(100, 100 + before + behind))
    row = [*outside[:before], *block * copies, *outside[before:]]
    length = len(row) / 16
    found = max(repeated_blocks(np.asarray(row), length), key=lambda b: b.end - b.start)
    assert found.period == period
    assert (found.start, found.end) == (before, before + period * copies)
    assert found.step == max(1, int(length / period)) * period
    # At each offset the same place of each copy is cut.
    best = data.draw(st.integers(0, period - 1))
    alive = [1 if (place - before) % period == best else 2 for place in range(len(row) + 1)]
    places = Crossing(alive, 10).alike(np.asarray(row), length)
    inside = [p for p in places if before <= p <= before + period * copies]
    cut = [p for p in inside if (p - before) % period == best]
    assert len(cut) >= (period * copies - best) // found.step - 1  # the ends are no cuts
    assert {b - a for a, b in pairwise(cut)} <= {found.step}


@given(st.integers(32, 400))
def test_what_never_repeats_has_no_block_and_is_cut_evenly(count: int) -> None:
    kinds, crossing = np.arange(count), Crossing([1] * (count + 1), 10)
    assert repeated_blocks(kinds, count / 16) == []
    assert crossing.alike(kinds, count / 16) == crossing.even(0, count, count / 16)


def test_two_stages_are_two_blocks() -> None:
    kinds = np.asarray([0, 1, 2] * 40 + [9] + [0, 1, 3, 2] * 40)
    found = repeated_blocks(kinds, len(kinds) / 16)
    assert [(b.period, b.end - b.start >= 119) for b in found] == [(3, True), (4, True)]


@given(st.lists(st.integers(0, 9), min_size=20, max_size=200), st.floats(3, 50), st.integers(0, 9))
def test_no_cut_is_where_too_many_cross(alive: list[int], length: float, most: int) -> None:
    crossing = Crossing([*alive, 0], most)
    for places in (
        crossing.even(0, len(alive), length),
        crossing.alike(np.zeros(len(alive), np.intp), length),
    ):
        assert places == sorted(set(places))
        assert all(0 < place < len(alive) and alive[place] <= most for place in places)


def test_the_kind_of_a_node_is_what_it_does_and_not_what_it_is_called() -> None:
    def node(op: str, *reads: str, **attributes: object) -> onnx.NodeProto:
        return helper.make_node(op, reads, [f"y{len(reads)}"], **attributes)

    nodes = [
        node("Add", "a", "w"),
        node("Add", "b", "v"),
        node("Add", "b", "other"),
        node("Mul", "a", "w"),
        node("Softmax", "a", axis=1),
        node("Softmax", "b", axis=1),
        node("Softmax", "b", axis=0),
        node("Softmax", "b", axis=0, domain="mine"),
    ]
    shapes = {"w": (4,), "v": (4,), "other": (5,)}
    found = kinds_of(nodes, shapes.get, lambda _: False).tolist()
    assert found == [0, 0, 1, 2, 3, 3, 4, 5]
    apart = kinds_of(nodes, shapes.get, "Softmax".__eq__).tolist()
    assert apart == [0, 0, 1, 2, 3, 3, 3, 4]
