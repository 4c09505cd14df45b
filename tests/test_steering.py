"""The steered walk in a whole run: a smaller set, true in both arithmetics, and recalled."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import bisect_trt
from bisect_trt import bisecting
from bisect_trt.graph import list_layers, to_emulated
from bisect_trt.precision import PrecisionPlan
from bisect_trt.report.documents import search_sentences
from bisect_trt.runners.histories import Histories
from tests.conftest import run_model
from tests.networks import convolutional

MODEL, INPUTS = convolutional(20)
LIMIT = 2.5e-4


def run(out: Path, require: str = f"atol={LIMIT},rtol=0") -> bisect_trt.Result:
    return bisect_trt.bisect(MODEL, INPUTS, runner="emulated", require=(require,), out=out)


def test_a_walk_finds_a_smaller_set_that_is_true_and_is_recalled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steered = run(tmp_path / "steered")
    with monkeypatch.context() as patched:
        patched.setattr(bisecting, "MANY_PINS", 10**6)
        plain = run(tmp_path / "plain")
    assert steered.passed and plain.passed
    assert len(steered.pinned) < len(plain.pinned) == steered.search_facts["pins_without_steering"]
    assert plain.search_facts["pins_without_steering"] is None
    assert any("errors of lowered layers cancel" in line for line in search_sentences(steered))
    assert not any("cancel" in line for line in search_sentences(plain))
    assert steered.complete and set(steered.pins["verdict_without"]) <= {"fail", "non-finite"}

    reference = run_model(MODEL, INPUTS)[0]
    emulated = run_model(to_emulated(MODEL, PrecisionPlan("fp16", steered.pinned)), INPUTS)[0]
    assert np.abs(emulated - reference).max() <= LIMIT

    def forbidden(*_: object) -> None:
        raise AssertionError("walked again")

    monkeypatch.setattr(Histories, "follow", forbidden)
    again = run(tmp_path / "steered")
    assert again.pinned == steered.pinned and again.new_probes == 0


def test_means_are_not_steered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where the budget does not allow it: the search's own set is the answer."""

    def forbidden(*_: object) -> None:
        raise AssertionError("walked")

    monkeypatch.setattr(Histories, "follow", forbidden)
    monkeypatch.setattr(bisecting, "MANY_PINS", 1)
    assert run(tmp_path / "mean", "rmse<=1e-4").passed
    monkeypatch.setattr("bisect_trt.steering._BUDGET_S", 0.0)
    few = run(tmp_path / "poor")
    assert few.passed and few.search_facts["pins_without_steering"] is None
    assert len(few.pinned) < len(list_layers(MODEL))
