"""Steps that stop when their time is over say how far they came, and go no further later."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

import bisect_trt
from bisect_trt import pipeline
from bisect_trt.base.interrupt import Observer
from bisect_trt.settings import Settings
from bisect_trt.steps.context import open_context
from bisect_trt.steps.problem import load
from bisect_trt.steps.sensitivity import (
    PASS_EVALUATIONS,
    Sensitivity,
    affordable,
    measure_sensitivity,
    passes_affordable,
)
from fixtures.cases.nafnet import nafnet
from fixtures.encoders import encoder_decomposed
from fixtures.fixture import Fixture
from fixtures.models import residual
from tests.command import run_of
from tests.conftest import forbid_inferences
from tests.copies import EIGHT, FEW


def measured(
    folder: Path,
    suspicion: dict[str, float],
    count: int,
    passes: int = 0,
    fixture: Fixture | None = None,
) -> tuple[Sensitivity, list[str]]:
    """What the step gives, and what it says."""
    fixture = fixture or residual()
    settings = Settings(fixture.model, [fixture.inputs], require=[fixture.require], out=folder)
    problem = load(settings, Observer())
    with open_context(problem, Observer()) as context:
        samples = list(problem.samples)
        found = measure_sensitivity(
            problem, context, suspicion, samples, problem.base, count, passes
        )
        return found, [f.message for f in context.run_statistics().findings if f.kind == "measured"]


def test_the_most_suspicious_layers_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [x.name for x in bisect_trt.graph.list_layers(residual().model)]
    suspicion = {name: float((7 * i) % 31) for i, name in enumerate(names)}
    order = sorted(names, key=lambda n: -suspicion[n])
    whole, said = measured(tmp_path / "whole", suspicion, 1000)
    assert set(whole.scores) == set(names) and said == []
    part, said = measured(tmp_path / "part", suspicion, 20)
    assert set(part.scores) == set(order[:20]) and part.runs == 20
    assert said and said[0].startswith(f"20 of {len(names)} layers were measured alone")
    assert part.scores == {n: whole.scores[n] for n in part.scores}
    assert part.strength == {n: whole.strength[n] for n in part.strength}
    forbid_inferences(monkeypatch)
    again, said_again = measured(tmp_path / "part", suspicion, 20)
    assert again.scores == part.scores and again.runs == 0 and said_again == said


def rank_correlation(first: Mapping[str, float], second: Mapping[str, float]) -> float:
    """Over the layers that both have."""
    table = pd.DataFrame({"first": pd.Series(first), "second": pd.Series(second)}).dropna()
    return float(table.rank().corr().loc["first", "second"])


@pytest.mark.parametrize("make", [residual, encoder_decomposed, nafnet])
def test_a_reverse_pass_ranks_what_was_not_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], Fixture]
) -> None:
    names = [x.name for x in bisect_trt.graph.list_layers(make().model)]
    # By their names: worse than no order at all would be luck.
    suspicion = {name: float((7 * i) % 31) for i, name in enumerate(names)}
    whole, _ = measured(tmp_path / "whole", suspicion, 1000, fixture=make())
    part, said = measured(tmp_path / "part", suspicion, 16, 1, make())
    # Overflowing layers have no estimate, and are all run.
    assert 16 <= len(part.scores) < len(names)
    assert part.strength.keys() == set(names)
    others = {n: s for n, s in part.strength.items() if n not in part.scores}
    assert rank_correlation(others, whole.strength) > 0.9
    assert "all are ranked by reverse passes (rank correlation" in said[0]
    forbid_inferences(monkeypatch)
    again, said_again = measured(tmp_path / "part", suspicion, 16, 1, make())
    assert again.strength == part.strength and said_again == said


def test_a_reverse_pass_that_ranks_worse_is_not_used(tmp_path: Path) -> None:
    names = [x.name for x in bisect_trt.graph.list_layers(residual().model)]
    whole, _ = measured(tmp_path / "whole", {}, 1000)
    # The right order is the layers' own error's: no estimate ranks better.
    order = sorted(names, key=lambda n: -whole.strength[n])
    suspicion = {name: -float(place) for place, name in enumerate(order)}
    part, said = measured(tmp_path / "part", suspicion, 30, 1)
    assert len(part.strength) == len(part.scores) == 30
    assert "the others are not ranked by reverse passes" in said[0]


def test_a_pass_takes_the_time_that_there_is() -> None:
    one = PASS_EVALUATIONS * 0.1
    assert passes_affordable(4, 0.1, 100.0 * one, math.inf) == 4
    assert passes_affordable(4, 0.1, 2.5 * one, math.inf) == 2
    assert passes_affordable(4, 0.1, 0.1 * one, math.inf) == 1
    assert passes_affordable(4, 0.1, 0.1 * one, 0.9 * one) == 0
    assert passes_affordable(4, 0.1, 0.0, math.inf) == 0


def test_a_search_by_a_reverse_pass_ends_near_that_by_every_layer_alone(tmp_path: Path) -> None:
    pins = {}
    for name, times in {
        "every layer alone": {},
        "reverse passes": {"sensitivity_time_s": 0.02},
        "own errors": {"sensitivity_time_s": 0.02, "ranking_time_s": 0.0},
    }.items():
        limits = replace(EIGHT, **times)
        result = run_of(residual(), tmp_path / name, limits=limits)
        assert result.passed
        pins[name] = len(result.pinned)
    assert pins["reverse passes"] <= 1.1 * pins["every layer alone"] < 0.9 * pins["own errors"]


def test_as_many_layers_are_measured_as_there_is_time_for() -> None:
    assert affordable(100, 0.1, 20.0) == 100
    assert affordable(1000, 0.1, 5.0) == 100 and affordable(1000, 0.1, 20.0) == 400
    assert affordable(1000, 0.1, -1.0) == 0


def test_a_run_without_any_time_to_measure_still_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = replace(FEW, sensitivity_time_s=-1.0, ranking_time_s=0.0, tradeoff_time_s=1e-9)
    result = run_of(residual(), tmp_path, limits=limits)
    assert result.passed and result.pinned
    said = " ".join(f.message for f in result.findings)
    assert f"0 of {result.layer_count} layers were measured alone" in said
    assert "tradeoff.csv has 1 of" in said
    table = pd.read_csv(tmp_path / "tradeoff.csv")
    assert list(table["set"]) == ["answer"]
    forbid_inferences(monkeypatch)
    again = run_of(residual(), tmp_path, limits=limits)
    assert again.pinned == result.pinned
    assert len(pd.read_csv(tmp_path / "tradeoff.csv")) == 1


class Heard(Observer):
    """What each step told of its progress."""

    def __init__(self) -> None:
        self.told: dict[str, list[tuple[int, int]]] = {}

    def step(self, name: str) -> None:
        self._of = self.told.setdefault(name, [])

    def progress(self, done: int, expected: int, note: str) -> None:
        self._of.append((done, expected))


@pytest.mark.parametrize("robust", [0.0, 0.95])
def test_a_search_and_what_follows_tell_how_much_is_left(tmp_path: Path, robust: float) -> None:
    fixture, heard = residual(), Heard()
    asked = {
        "require": [fixture.require],
        "robust": robust,
        "weights": "nearest",  # another graph's steps count anew
        "out": tmp_path / "run",
        "limits": EIGHT,
    }
    result = pipeline.run(Settings(fixture.model, [fixture.inputs], **asked), heard)
    counted = [done for done, _ in heard.told["bisect"]]
    assert counted and counted == sorted(counted)
    if robust:
        assert len(result.tradeoff) in {most for _, most in heard.told["tradeoff"]}
        made = [most for _, most in heard.told["unseen inputs"]]
        assert made and all(made)
