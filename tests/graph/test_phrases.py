"""Layers that often stand together are one phrase, wherever they stand."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bisect_trt.model import phrases
from bisect_trt.model.phrases import together

FREQUENT = 4


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phrases, "_FREQUENT", FREQUENT)


def rows_of(rows: list[list[int]]) -> list[list[int]]:
    return together([np.asarray(row, np.intp) for row in rows])


def written_out(rows: list[list[int]]) -> list[list[int]]:
    """Larsson and Moffat's recursive pairing, one pair after the other on plain lists."""
    fresh = 1 + max((t for row in rows for t in row), default=0)
    spelt = {t: (t,) for row in rows for t in row}
    while True:
        counts = Counter(pair for row in rows for pair in pairwise(row))
        if not counts or max(counts.values()) < FREQUENT:
            break
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        spelt[fresh] = spelt[best[0]] + spelt[best[1]]
        rows = [_joined(row, best, fresh) for row in rows]
        fresh += 1
    ends = [np.cumsum([0, *(len(spelt[t]) for t in row)]).tolist() for row in rows]
    return [end[:-1] for end in ends]


def _joined(row: list[int], pair: tuple[int, int], fresh: int) -> list[int]:
    found, place = [], 0
    while place < len(row):
        if tuple(row[place : place + 2]) == pair:
            found.append(fresh)
            place += 2
        else:
            found.append(row[place])
            place += 1
    return found


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.lists(st.integers(0, 3), max_size=60), min_size=1, max_size=4))
def test_pairs_are_joined_as_they_are_by_hand(rows: list[list[int]]) -> None:
    assert rows_of(rows) == written_out(rows)


def test_what_stands_together_often_is_one_phrase() -> None:
    row = [0, 1, 2, 3, 1, 2, 1, 2, 0, 1, 2, 3]
    assert rows_of([row]) == [[0, 1, 3, 4, 6, 8, 9, 11]]
    assert rows_of([row[:6], row[6:]]) == [[0, 1, 3, 4], [0, 2, 3, 5]], "in whatever row it stands"
    assert rows_of([row[:2], row[2:]]) == [[0, 1], list(range(10))], "not over the end of one"


def test_a_kind_beside_itself_does_not_overlap() -> None:
    assert rows_of([[7] * 5]) == [[0, 2, 4]]
    assert rows_of([[7] * 8]) == [[0, 2, 4, 6]], "four pairs of two are one pair of four thrice"


@pytest.mark.parametrize("rows", [[[]], [[], [1]], [[3]]])
def test_rows_without_a_pair_stay_as_they_are(rows: list[list[int]]) -> None:
    assert rows_of(rows) == [list(range(len(row))) for row in rows]
