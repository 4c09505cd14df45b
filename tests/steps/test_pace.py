"""How much is tested follows the model; a clock is heard only where the count is far off."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bisect_trt
from bisect_trt.base.interrupt import Observer
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.evaluate.evaluator import Evaluator
from bisect_trt.evaluate.result import Evaluation
from bisect_trt.model.graph import Graph
from bisect_trt.settings import Settings
from bisect_trt.steps.context import open_context
from bisect_trt.steps.memory_need import usual_seconds
from bisect_trt.steps.open_runners import Pace
from bisect_trt.steps.problem import load
from bisect_trt.steps.validation import WorstOf
from fixtures.encoders import encoder_decomposed
from fixtures.models import healthy
from tests.command import run_of
from tests.conftest import forbid_inferences
from tests.copies import FEW

FIXTURE = encoder_decomposed()


def test_a_slow_machine_changes_nothing_but_a_wrong_count_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pace, "timed_again", lambda _: np.inf)
    settings = Settings(FIXTURE.model, [FIXTURE.inputs], require=FIXTURE.require, out=tmp_path)
    problem = load(settings, Observer())
    with open_context(problem, Observer()) as context:
        assert context.pace.usual_seconds == problem.usual_seconds < 1e-3
        for seconds in (1e-6, 15.0 * problem.usual_seconds, 0.04):
            context.pace.took(seconds)
            assert context.pace.usual_seconds == problem.usual_seconds
        found = []
        for seconds in (0.5, 1.0, 3.0, 5.0):
            context.pace.took(seconds)
            found.append(context.pace.usual_seconds)
        assert found == [1.0, 1.0, 1.0, 16.0]


def test_a_busy_moment_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small network's first evaluations took a thousand times as long as it does: they are no
    measure of it, now or when the cache tells them again.
    """
    settings = Settings(FIXTURE.model, [FIXTURE.inputs], require=FIXTURE.require, out=tmp_path)
    problem = load(settings, Observer())
    kept = []
    for _ in range(2):
        with open_context(problem, Observer()) as context:
            context.pace.took(0.5)
            assert context.pace.usual_seconds == problem.usual_seconds
            kept.append(context.pace.timed_again())
            forbid_inferences(monkeypatch)
    assert kept[0] == kept[1]


def test_inputs_of_several_sizes_stand_for_all() -> None:
    graph = Graph(healthy().model)
    ((name, array),) = healthy().inputs.items()
    small, large = (Sample(str(n), {name: np.concatenate([array] * n)}) for n in (1, 1000))
    one, other = usual_seconds(graph, [small]), usual_seconds(graph, [large])
    assert one < other
    assert usual_seconds(graph, [small, large, large, large]) == pytest.approx(
        (one + 3.0 * other) / 4.0
    )


def test_augmented_inputs_are_asked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    judge = WorstOf.judge

    def told(self: WorstOf, samples: Iterable[Sample], **options: Any) -> object:
        samples = list(samples)
        if samples and samples[0].copied and "limit" in options:
            asked.append("perturbed" if "perturbed" in samples[0].name else "augmented")
        return judge(self, samples, **options)

    monkeypatch.setattr(WorstOf, "judge", told)
    result = run_of(FIXTURE, tmp_path, limits=FEW)
    assert result.passed and not [f for f in result.findings if f.kind == "measured"]
    assert asked[0] == "augmented" and "perturbed" in asked


def test_verify_does_not_time_the_opening_of_its_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first evaluation opens one: that the machine is slow at it must not decide how many
    copies are made, and so what is said of the plan.
    """
    fixture = healthy()
    plan = {"base": "fp16", "pin_precision": "fp32", "pinned": [], "requirements": ["max_abs<=1"]}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    probe, heard, asked = Evaluator.evaluate, [], []

    def slow_at_first(evaluator: Evaluator, plan: PrecisionPlan) -> Evaluation:
        asked.append(plan)
        seconds = 9.0 if len(set(asked)) == 1 else 0.001
        return replace(probe(evaluator, plan), seconds=seconds)

    monkeypatch.setattr(Evaluator, "evaluate", slow_at_first)
    monkeypatch.setattr(Pace, "took", lambda _, seconds: heard.append(seconds))
    found = bisect_trt.verify(
        fixture.model, fixture.inputs, tmp_path / "plan.json", out=tmp_path / "out", limits=FEW
    )
    assert found.passed and heard == [0.001]
