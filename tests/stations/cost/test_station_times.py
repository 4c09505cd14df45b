"""Steps that stop when their time is over say how far they came, and go no further later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import bisect_trt
from bisect_trt import Result, pipeline
from bisect_trt.base.interrupt import Observer
from bisect_trt.settings import Settings
from bisect_trt.steps import sensitivity, tradeoff
from bisect_trt.steps.context import open_context
from bisect_trt.steps.problem import load
from bisect_trt.steps.sensitivity import Sensitivity, measure_sensitivity
from fixtures.build import GraphBuilder
from fixtures.fixture import Fixture, waves
from fixtures.models import residual
from tests.conftest import forbid_inferences

BUDGET_S = 30.0


class Ticking:
    """A clock on which every look takes a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1.0
        return self.now


def measured(
    folder: Path,
    suspicion: dict[str, float],
    fixture: Fixture | None = None,
    budget_s: float = BUDGET_S,
) -> tuple[Sensitivity, list[str]]:
    """What the step gives, and what it says."""
    fixture = fixture or residual()
    settings = Settings(fixture.model, [fixture.inputs], require=[fixture.require], out=folder)
    problem = load(settings, Observer())
    with open_context(problem, Observer()) as context:
        samples = list(problem.samples)
        found = measure_sensitivity(
            problem, context, suspicion, samples, problem.base, budget_s, 0.1
        )
        return found, [f.message for f in context.run_statistics().findings if f.kind == "measured"]


def test_the_most_suspicious_layers_are_measured_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [x.name for x in bisect_trt.graph.list_layers(residual().model)]
    suspicion = {name: float((7 * i) % 31) for i, name in enumerate(names)}
    order = sorted(names, key=lambda n: -suspicion[n])
    whole, said = measured(tmp_path / "whole", suspicion)
    assert set(whole.scores) == set(names) and said == []
    monkeypatch.setattr(sensitivity, "time", Ticking())
    part, said = measured(tmp_path / "part", suspicion)
    count = len(part.scores)
    assert 0 < count < len(names) and part.runs <= BUDGET_S
    # Within a round the layers go in network order, and the last round may be cut.
    assert set(order[: count // 2]) <= set(part.scores) <= set(order[: 2 * count])
    assert said and said[0].startswith(f"{count} of {len(names)} layers were measured alone")
    assert part.scores == {n: whole.scores[n] for n in part.scores}
    assert part.strength == {n: whole.strength[n] for n in part.strength}
    monkeypatch.undo()
    forbid_inferences(monkeypatch)
    again, said_again = measured(tmp_path / "part", suspicion)
    assert again.scores == part.scores and again.runs == 0 and said_again == said


def sums(layers: int, step: float) -> Fixture:
    """So many layers that add a little each; two in the middle go up and down by ``step``, so that
    the three tensors between them are rounded more coarsely.
    """
    b, x = GraphBuilder(5), "x"
    steps = {layers // 2: step, layers // 2 + 3: -step}
    for number in range(layers):
        b.scope = f"/steps.{number}"
        added = np.full((1, 16), steps.get(number, 0.0), np.float32)
        x = b.op("Add", x, b.weight(added) if number in steps else b.normal(1, 16, scale=0.02))
    b.rename_output(x, "y")
    model = b.model({"x": [1, 16]}, {"y": [1, 16]})
    inputs = {"x": waves(4, 1, 16)}
    return Fixture("sums", model, inputs, "fp16", "max_abs<=1e-1", "accumulation", 0, None, 60)


@pytest.mark.parametrize(("step", "goes_on"), [(0.0, False), (500.0, True)])
def test_time_that_would_tell_nothing_is_not_spent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: float, goes_on: bool
) -> None:
    """Of 4,000 layers the time is enough for 150; two rounds show whether some stand out, which are
    among the most suspicious.
    """
    fixture = sums(4000, step)
    suspicion = {layer.name: 0.0 for layer in bisect_trt.graph.list_layers(fixture.model)}
    names = list(suspicion)
    suspicion |= dict.fromkeys(names[1998:2006], 1.0)
    monkeypatch.setattr(sensitivity, "time", Ticking())
    found, said = measured(tmp_path, suspicion, fixture, 5.0 * BUDGET_S)
    assert (len(found.scores) > 96) is goes_on and len(found.scores) >= 96
    assert ("as many as there is time for" in said[0]) is goes_on


def run(folder: Path, **options: Any) -> Result:
    fixture = residual()
    options |= {"require": fixture.require, "runner": "emulated", "out": folder}
    return bisect_trt.bisect(fixture.model, fixture.inputs, **options)


def test_a_run_without_any_time_to_measure_still_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sensitivity, "TIME_BUDGET_S", -1.0)
    monkeypatch.setattr(tradeoff, "TIME_BUDGET_S", 1e-9)
    result = run(tmp_path)
    assert result.passed and result.pinned
    said = " ".join(f.message for f in result.findings)
    assert f"0 of {result.layer_count} layers were measured alone" in said
    assert "tradeoff.csv has 1 of" in said
    table = pd.read_csv(tmp_path / "tradeoff.csv")
    assert list(table["set"]) == ["answer"]
    forbid_inferences(monkeypatch)
    again = run(tmp_path)
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
def test_a_search_and_what_follows_tell_how_much_is_left(
    tmp_path: Path, eight_draws: None, robust: float
) -> None:
    fixture, heard = residual(), Heard()
    asked = {"require": [fixture.require], "robust": robust, "out": tmp_path / "run"}
    result = pipeline.run(Settings(fixture.model, [fixture.inputs], **asked), heard)
    counted = [(done, most) for done, most in heard.told["bisect"] if most]
    assert counted and all(0 <= done < most for done, most in counted)
    assert counted == sorted(counted) and len({most for _, most in counted}) == 1
    if robust:
        assert {most for _, most in heard.told["tradeoff"]} == {len(result.tradeoff)}
        made = [most for _, most in heard.told["unseen inputs"]]
        assert made and all(made)
