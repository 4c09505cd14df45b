"""One run of an engine is no observation: engines that answer differently from run to run, or from
process to process, get a cause of their own and never a plan.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bisect_trt.base.errors import RunnerFailedError
from bisect_trt.base.outcomes import Verdict
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.runners.base import Repeated
from fixtures.fixture import Fixture
from fixtures.models import encoder_decomposed, healthy, residual
from tests.engines import Engine, EngineRun, Judged, Unsteady


def only(base: Precision, bad: int, process: int | None = None) -> Any:
    """Bad runs of one precision, in one process or in all."""

    def told(plan: PrecisionPlan, number: int) -> int:
        return bad if plan.base is base and process in (None, number) else 0

    return told


@pytest.mark.parametrize("bad", [1, 5])
def test_fp32_that_differs_from_run_to_run_is_unsteady(judged: Judged, bad: int) -> None:
    fixture = healthy()
    result, engine = judged(fixture, Unsteady(fixture, only(Precision.FP32, bad)))
    assert result.cause.value == "not-reproducible" and not result.passed and result.exit_code == 1
    assert f"{bad} of 6 runs" in result.sentence and "reduce" in result.sentence
    assert not result.pinned and len(engine.built) <= 3, "nothing is searched on such an engine"
    seen = result.engine.reproducibility
    assert (seen.runs, seen.passed) == (6, 6 - bad) and seen.worst > 1.0 >= seen.best
    assert seen.differing == min(bad, 6 - bad)
    written = json.loads((Path(result.folder) / "run.json").read_text())
    assert written["engine"]["reproducibility"]["passed"] == 6 - bad
    assert not [f for f in result.findings if f.kind == "not-reproducible"], (
        "the first line says it"
    )


@pytest.mark.slow
def test_a_reduced_engine_that_differs_is_unsteady_too(judged: Judged) -> None:
    """Where its best runs pass nothing is searched; where all miss the answer's is looked at."""
    for require, what in (("rel_range<=1e-1", "FP16 engine"), ("rel_range<=2e-4", "answer's")):
        fixture = replace(residual(), require=require)
        result, _ = judged(fixture, Unsteady(fixture, only(Precision.FP16, 2)))
        assert result.cause.value == "not-reproducible" and what in result.sentence
        assert not result.passed and result.validation is None


def test_fp32_that_is_wrong_in_this_process_and_right_in_the_next(judged: Judged) -> None:
    fixture = healthy()
    result, engine = judged(fixture, Unsteady(fixture, only(Precision.FP32, 6, process=1)))
    assert result.cause.value == "not-reproducible" and "12 runs in 2 processes" in result.sentence
    assert engine.process == 2, "one that is right is enough to know"


def test_fp32_that_is_wrong_in_all_processes_is_not_precision(judged: Judged) -> None:
    fixture = healthy()
    result, engine = judged(fixture, Unsteady(fixture, only(Precision.FP32, 6)))
    assert result.cause.value == "not-precision" and engine.process == 3
    assert (
        result.engine.reproducibility.processes == 3 and result.engine.reproducibility.passed == 0
    )


def test_a_reproducible_answer_is_run_in_three_processes(reproducible: EngineRun) -> None:
    """Its copies run in the first."""
    result, engine = reproducible
    seen = result.engine.reproducibility
    assert result.passed and (seen.runs, seen.passed, seen.processes) == (18, 18, 3)
    assert engine.drawn_in == {1} and engine.process == 3 and result.validation is not None
    page = (Path(result.folder) / "report.md").read_text()
    assert "18 of 18 runs in 3 processes met the requirement; in each process" in page
    # Three observations, not eighteen: an engine may be right in one process and never in another.
    assert "in 3 of the 3 processes, so in at least 37 % of all" in page


@pytest.mark.parametrize(("process", "bad", "runs"), [(2, 2, 12), (3, 1, 18)])
def test_an_answer_that_fails_in_a_further_process_is_taken_back(
    judged: Judged, process: int, bad: int, runs: int
) -> None:
    fixture = residual()

    def failing(plan: PrecisionPlan, number: int) -> int:
        return bad if plan.base is Precision.FP16 and plan.pinned and number == process else 0

    result, engine = judged(fixture, Unsteady(fixture, failing))
    assert engine.drawn_in == {1} and engine.process == process
    assert result.cause.value == "not-reproducible" and not result.passed and result.exit_code == 1
    assert f"{bad} of {runs} runs in {process} processes" in result.sentence
    assert result.validation is None, "nothing is claimed of a plan that is none"


def test_sums_in_another_order_decide_nothing(judged: Judged) -> None:
    """Answers that differ by less than matters are told and judged by the worst."""
    fixture = healthy()
    result, _ = judged(fixture, Unsteady(fixture, lambda *_: 2, off=1e-7))
    assert result.passed and result.cause.value != "not-reproducible"
    told = [f.message for f in result.findings if f.kind == "not-reproducible"]
    assert told and "2 of 6 runs" in told[0] and "nothing hangs on it" in told[0]


def test_a_repeated_command_asks_no_engine_again(
    judged: Judged, reproducible: EngineRun, tmp_path: Path
) -> None:
    fixture, (first, _) = residual(), reproducible
    shutil.copytree(first.folder, tmp_path / "run")
    again, engine = judged(fixture, Unsteady(fixture, lambda *_: 0))
    assert again.new_evaluations == 0 and not engine.built and engine.process == 1
    assert again.engine.reproducibility == first.engine.reproducibility


def test_an_engine_without_a_process_of_its_own_is_run_once(on_engine: EngineRun) -> None:
    result, _ = on_engine
    assert result.passed and result.engine.reproducibility.processes == 1


def test_an_engine_that_does_not_build_is_a_cause_of_its_own(judged: Judged) -> None:
    fixture = healthy()
    result, engine = judged(fixture, Engine(fixture, breaks=lambda plan: True))
    assert result.cause.value == "engine-failed" and result.exit_code == 1
    assert "no tactic" in result.sentence and "reduce" in result.sentence
    assert not result.pinned and len(engine.built) <= 3


class ByProcess(Engine):
    """Reproducible in each process, and a little worse in all but the first."""

    process = 1

    def start_afresh(self) -> None:
        self.process += 1

    def outputs(self, plan: PrecisionPlan, samples: Sequence[Sample]) -> Any:
        self._gain = 1.1 if self.process > 1 and plan.base is Precision.FP16 else 1.0
        for outputs in super().outputs(plan, samples):
            yield Repeated(outputs, 6, ())


def test_an_answer_that_just_misses_in_a_further_process_is_taken_back(judged: Judged) -> None:
    """By less than a tenth: no engine that cannot make up its mind, and yet no plan to ship."""
    fixture = replace(residual(), require="rel_range<=1.075e-3")
    result, engine = judged(fixture, ByProcess(fixture))
    assert not result.passed and result.exit_code == 1 and not result.pinned
    assert "6 of 12 runs in 2 processes miss" in result.sentence
    assert "no room for it" in result.sentence and "No pin" not in result.sentence
    assert result.engine.reproducibility.right == 1 and engine.process == 2


class OneSample(Unsteady):
    """Of the sample whose name ends in 3 one run of six is off by 0.2."""

    def outputs(self, plan: PrecisionPlan, samples: Sequence[Sample]) -> Any:
        for sample, outputs in zip(samples, Engine.outputs(self, plan, samples), strict=True):
            off = sample.name.endswith("3") and plan.base is Precision.FP16
            other = {n: (a + self._off).astype(np.float32) for n, a in outputs.items()}
            yield Repeated(outputs, 6, [(other, 1)] if off else ())


def eight(fixture: Fixture) -> list[Any]:
    return [{n: a + np.float32(0.01 * i) for n, a in fixture.inputs.items()} for i in range(8)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("require", "more"), [("max_abs@mean<=0.1", {}), ("max_abs<=0.1", {"allow_misses": 0.2})]
)
def test_what_is_asked_of_all_inputs_is_not_decided_by_the_runs_of_one(
    judged: Judged, require: str, more: dict[str, Any]
) -> None:
    fixture = replace(residual(), require=require)
    fixture = replace(fixture, inputs=eight(fixture))
    result, _ = judged(fixture, OneSample(fixture, lambda *_: 0, off=0.2), **more)
    assert result.passed and result.cause.value == "none"
    seen = result.engine.reproducibility
    assert seen.differing == 3 and seen.passed == seen.runs and seen.worst <= 1.0
    engine = OneSample(fixture, lambda *_: 0, off=20.0)
    engine.versions = {"engine": "2"}
    other, _ = judged(fixture, engine, **more)
    assert other.passed is bool(more), "one of eight is spared; a mean sees it"
    if not more:
        assert other.cause.value == "not-reproducible" and "1 of 48 runs miss" in other.sentence
        assert other.engine.reproducibility.best <= 1.0 < other.engine.reproducibility.worst


def test_a_metric_of_all_inputs_sees_the_worst_runs(judged: Judged, tmp_path: Path) -> None:
    """Each run scores 0 alone there, so the largest error counts."""
    (tmp_path / "met.py").write_text(
        "def offset(wanted, found):\n"
        "    return float(max(abs(f['y'] - w['y']).max() for w, f in zip(wanted, found)))\n"
    )
    fixture = replace(residual(), require="offset<=0.1")
    fixture = replace(fixture, inputs=eight(fixture)[:2])
    metrics = [f"{tmp_path}/met.py:offset@all"]
    engine = Unsteady(fixture, only(Precision.FP16, 2))
    result, _ = judged(fixture, engine, metric=metrics)
    assert result.cause.value == "not-reproducible" and "4 of 12 runs miss" in result.sentence
    assert result.engine.reproducibility.best <= 1.0 < result.engine.reproducibility.worst
    again, _ = judged(fixture, Unsteady(fixture, only(Precision.FP16, 2)), metric=metrics)
    assert again.sentence == result.sentence and again.new_evaluations == 0


def test_reduced_runs_that_all_miss_need_pins_first(judged: Judged, on_engine: EngineRun) -> None:
    fixture = encoder_decomposed()

    def bad(plan: PrecisionPlan, _: int) -> int:
        return 2 if plan.base is Precision.FP16 and not plan.pinned else 0

    result, _ = judged(fixture, Unsteady(fixture, bad, off=0.5))
    assert result.passed and result.pinned == on_engine[0].pinned
    told = [f.message for f in result.findings if f.kind == "not-reproducible"]
    assert told and "2 of 6 runs of the FP16 engine" in told[0] and "none of them" in told[0]


class Breaking(Unsteady):
    """Gives no answer in its second process."""

    def outputs(self, plan: PrecisionPlan, samples: Sequence[Sample]) -> Any:
        if self.process == 2 and plan.base is Precision.FP16:
            raise RunnerFailedError("no answer in 9 s", Verdict.TIMED_OUT)
        yield from super().outputs(plan, samples)


def test_a_process_without_an_answer_counts_as_a_run_that_misses(judged: Judged) -> None:
    fixture = healthy()
    result, _ = judged(fixture, Breaking(fixture, lambda *_: 0))
    assert (
        result.cause.value == "not-reproducible"
        and "1 of 7 runs in 2 processes miss" in result.sentence
    )
    assert "to no answer: one process ended timed-out" in result.sentence
    seen = result.engine.reproducibility
    assert (seen.right, seen.broken) == (1, "timed-out")
