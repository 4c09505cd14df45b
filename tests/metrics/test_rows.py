"""Rows held against each other."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bisect_trt.metrics.errors import rows_apart

NAN, INF = np.nan, np.inf


@pytest.mark.parametrize(
    ("rows", "apart", "named"),
    [
        ([[1, 2], [1, 2], [1, 2]], 0.0, ()),
        ([[1, NAN], [1, NAN], [1, NAN]], 0.0, ()),
        ([[1, INF], [1, INF]], 0.0, ()),
        ([[1, 2], [1, 2.5], [1, 2], [1, 2]], 0.5, (1,)),
        ([[3, 2], [1, 2], [1, 2]], 2.0, (0,)),
        ([[1, 2], [1, NAN], [1, 2]], math.inf, (1,)),
        ([[1, 2], [1, INF]], math.inf, (1,)),
        ([[1], [2]], 1.0, (0, 1)),
        ([[1, 2]], 0.0, ()),
    ],
)
def test_rows(rows: list[list[float]], apart: float, named: tuple[int, ...]) -> None:
    found = rows_apart(np.asarray(rows, np.float32))
    assert (found.apart, found.rows) == (apart, named)
    assert rows_apart(np.asarray(rows, np.float32)[:, :, None]) == found
