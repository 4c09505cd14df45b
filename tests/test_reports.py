"""Public bug reports end with the right cause, the right layers and the words that matter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.reports import answer, faults
from fixtures.reports import REPORTS
from fixtures.reports.network import Report
from tests.conftest import slow_where

SLOW = {"rope_bf16", "simcc_argmax"}


@pytest.mark.parametrize(
    "make", slow_where(lambda make: make().name in SLOW, REPORTS), ids=lambda make: make().name
)
def test_a_report_ends_with_the_right_answer(make: Callable[[], Report], tmp_path: Path) -> None:
    report = make()
    result, screen = answer(report, tmp_path / "run")
    assert result.passed and result.exit_code == 0
    assert faults(report, result, screen) == []
    (largest, *_) = result.causes
    assert largest.name is result.cause and largest.sentence in result.sentence
    assert set(largest.layers) <= {node.name for node in report.model.graph.node}
