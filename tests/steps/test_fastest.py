"""The fastest plan that is right: candidates that an engine's clock decides between."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bisect_trt
from bisect_trt.base.errors import BadInputError, RunnerUnavailableError
from bisect_trt.base.outcomes import Candidate
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.report.first_lines import answer_lines
from bisect_trt.report.record import read_run
from bisect_trt.runners.device import GpuCondition
from bisect_trt.runners.tensorrt.timing import RoundTimes
from bisect_trt.steps.timing import Build, PlanTime, Timing
from fixtures.encoders import encoder_decomposed
from fixtures.fixture import Fixture
from fixtures.models import residual
from tests.copies import EIGHT, FEW
from tests.engines import Engine, run_on

Clock = Callable[[PrecisionPlan], float]

FP32_MS = 3.0


class Timer:
    """Times plans by ``clock``; remembers what it was given."""

    def __init__(self, clock: Clock, spread: float = 0.0) -> None:
        self._clock, self._spread = clock, spread
        self.samples: list[Sample] = []
        self.timed: list[list[str]] = []

    def __call__(self, builds: Mapping[str, Build], sample: Sample) -> Timing:
        self.samples.append(sample)
        self.timed.append(list(builds))
        return Timing({name: self._time(v.plan) for name, v in builds.items()}, {})

    def _time(self, plan: PrecisionPlan) -> PlanTime:
        ms = self._clock(plan)
        # Rounds that differ from plan to plan, as those of engines do.
        noise = np.random.default_rng(len(plan.pinned)).normal(scale=self._spread, size=9)
        rounds = tuple((ms + noise).tolist())
        return PlanTime(RoundTimes(rounds, rounds))


def dear_matrices(plan: PrecisionPlan) -> float:
    """Matrix products take time in FP32, everything else none."""
    if plan.base is Precision.FP32:
        return FP32_MS
    return 1.0 + sum(0.03 for name in plan.pinned if "MatMul" in name)


def dear_layers(plan: PrecisionPlan) -> float:
    """Every layer takes the same time in FP32."""
    return FP32_MS if plan.base is Precision.FP32 else 1.0 + 0.015 * len(plan.pinned)


def timed_run(
    timer: Callable[..., Timing],
    out: Path,
    kind: type[Engine] = Engine,
    fixture: Fixture | None = None,
    **options: Any,
) -> bisect_trt.Result:
    fixture = fixture or residual()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bisect_trt.steps.context.timer_of", lambda *_, **__: timer)
        settings = {"robust": 0.95, "limits": EIGHT, **options}
        return run_on(kind(fixture), fixture, out, **settings)[0]


def by_name(result: bisect_trt.Result) -> dict[str, Candidate]:
    assert result.engine is not None
    return {one.name: one for one in result.engine.candidates}


def test_the_answer_is_the_fastest_of_the_candidates_that_are_right(tmp_path: Path) -> None:
    """Clocks that differ choose different plans."""
    many, few = (
        timed_run(Timer(clock), tmp_path / clock.__name__) for clock in (dear_matrices, dear_layers)
    )
    check_fastest(many, dear_matrices)
    check_fastest(few, dear_layers)
    assert len(few.pinned) < len(many.pinned)
    assert matrices(many) < matrices(few)


def matrices(result: bisect_trt.Result) -> int:
    return sum("MatMul" in name for name in result.pinned)


def check_fastest(result: bisect_trt.Result, clock: Clock) -> None:
    found = by_name(result)
    right = [one for one in found.values() if one.passed]
    assert len(right) >= 3
    assert all(one.latency_ms == pytest.approx(clock(plan_of(one))) for one in right)
    (chosen,) = [one for one in found.values() if one.chosen]
    assert chosen.latency_ms == min(one.latency_ms for one in right if one.latency_ms)
    assert set(result.pinned) == set(chosen.layers)
    assert result.passed and result.validation is not None
    row = next(choice for choice in result.choice_rows if choice.recommended)
    assert row.latency_ms == pytest.approx(chosen.latency_ms) and not row.is_estimated
    assert read_run(result.folder).engine == result.engine


def plan_of(candidate: Candidate) -> PrecisionPlan:
    return PrecisionPlan(Precision.FP16, frozenset(candidate.layers))


def test_of_plans_that_take_the_same_time_the_search_s_own_stays(tmp_path: Path) -> None:
    def clock(plan: PrecisionPlan) -> float:
        return FP32_MS if plan.base is Precision.FP32 else 1.0 + (0.2 if plan.pinned else 0.0)

    found = by_name(timed_run(Timer(clock, spread=0.01), tmp_path))
    assert found["as searched"].chosen


class Picky(Engine):
    """An engine that errs more with many layers in FP32 beside many products in FP16."""

    def outputs(self, plan: PrecisionPlan, samples: Any) -> Any:
        products = sum("MatMul" in name for name in plan.pinned)
        self._gain = 50.0 if len(plan.pinned) >= 80 and products < 35 else 1.0
        yield from super().outputs(plan, samples)


def test_a_candidate_that_the_engine_fails_is_not_the_answer(tmp_path: Path) -> None:
    result = timed_run(Timer(dear_matrices), tmp_path, Picky, limits=FEW)
    wrong = [one for one in by_name(result).values() if not one.passed]
    assert wrong and all(one.latency_ms is None and not one.chosen for one in wrong)
    assert result.passed and set(result.pinned) not in [set(one.layers) for one in wrong]


def test_where_fp32_is_as_fast_it_is_the_answer(tmp_path: Path) -> None:
    result = timed_run(Timer(lambda plan: 2.0 + 0.0001 * len(plan.pinned)), tmp_path)
    assert len(result.pinned) == result.layer_count == 120
    assert "buys nothing" in result.sentence and answer_lines(result)[0].endswith(" in FP32")
    assert [c.name for c in result.choice_rows if c.recommended] == ["FP32"]
    assert {"plan", "as it is"} <= {c.name for c in result.choice_rows}
    assert result.exit_code == 0
    again = read_run(tmp_path)
    assert again.plan == result.plan and again.sentence == result.sentence


def test_fp16_that_is_right_and_no_faster_is_not_worth_it(tmp_path: Path) -> None:
    timer = Timer(lambda _: 2.0)
    result = timed_run(timer, tmp_path, fixture=replace(residual(), require="rel_range<=5e-2"))
    assert timer.timed == [["as it is", "FP32"]]
    assert len(result.pinned) == result.layer_count
    assert [c.name for c in result.choice_rows if c.recommended] == ["FP32"]


def test_fp16_that_is_right_and_faster_stays(tmp_path: Path) -> None:
    result = timed_run(
        Timer(dear_layers), tmp_path, fixture=replace(residual(), require="rel_range<=5e-2")
    )
    assert result.plan.base is Precision.FP16 and not result.pinned


class Coarse(Engine):
    """An engine whose products err much in FP16."""

    def outputs(self, plan: PrecisionPlan, samples: Any) -> Any:
        reduced = 60 - sum("MatMul" in name for name in plan.pinned)
        self._gain = 3.0 * reduced if plan.base is Precision.FP16 else 1.0
        yield from super().outputs(plan, samples)


def test_bf16_that_is_right_and_faster_is_the_answer(tmp_path: Path) -> None:
    result = timed_run(
        Timer(dear_layers), tmp_path, Coarse, fixture=replace(residual(), require="rel_range<=3e-2")
    )
    (row,) = [c for c in result.choice_rows if c.recommended]
    assert row.name == "BF16" and result.plan == PrecisionPlan(Precision.BF16)
    assert result.passed and result.validation is not None and result.engine is not None
    assert {"BF16", "FP32", "plan"} <= {one.name for one in result.engine.times}
    assert result.precision is Precision.FP16 and answer_lines(result)[0].endswith(" in BF16")
    assert read_run(tmp_path).plan == result.plan


def test_a_gpu_that_cannot_time_leaves_the_search_s_answer(tmp_path: Path) -> None:
    def broken(*_: Any) -> Timing:
        raise RunnerUnavailableError("no GPU is left")

    result = timed_run(broken, tmp_path)
    assert result.passed and not by_name(result)
    assert any("no GPU is left" in finding.message for finding in result.findings)


def test_a_repeated_command_times_nothing_and_answers_the_same(tmp_path: Path) -> None:
    first = timed_run(Timer(dear_matrices, spread=0.01), tmp_path)
    other = Timer(dear_layers)
    again = timed_run(other, tmp_path)
    assert first.engine is not None and again.engine is not None
    assert other.timed == [] and again.pinned == first.pinned
    assert again.engine.times == first.engine.times != ()
    fresh = timed_run(other, tmp_path, fresh=True)
    assert other.timed != [] and fresh.pinned != first.pinned


def test_times_that_something_disturbed_are_measured_again(tmp_path: Path) -> None:
    class Slowed(Timer):
        def __call__(self, builds: Mapping[str, Build], sample: Sample) -> Timing:
            return replace(super().__call__(builds, sample), condition=GpuCondition(300, 1980, 1))

    timed_run(Slowed(dear_matrices), tmp_path)
    other = Timer(dear_matrices)
    timed_run(other, tmp_path)
    assert other.timed != []


def test_times_are_read_as_they_were_written() -> None:
    rounds = RoundTimes((math.nan, 1.0), (2.0, 3.0)), RoundTimes(failure="out of memory")
    plans = {str(n): PlanTime(one) for n, one in enumerate(rounds)}
    timing = Timing(plans, {"tensorrt": "11"}, GpuCondition(1200, 1980, None), own_processes=3)
    assert repr(Timing.from_data(json.loads(json.dumps(timing.as_data())))) == repr(timing)


def test_engines_are_timed_at_the_shape_asked_for(tmp_path: Path) -> None:
    timer = Timer(dear_layers)
    timed_run(timer, tmp_path, time_shape=("x:4x48",))
    assert {sample.shapes["x"] for sample in timer.samples} == {(4, 48)}


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("x:8x48", "fixed at 4"),
        ("x:8", "2 axes, not 1"),
        ("z:8x48", "no input 'z'"),
        ("8x48", "write INPUT:SHAPE"),
        ("x:8x0", "write INPUT:SHAPE"),
        ("x:8xb", "write INPUT:SHAPE"),
    ],
)
def test_a_wrong_shape_is_refused_before_the_run(text: str, word: str, tmp_path: Path) -> None:
    fixture: Fixture = residual()
    with pytest.raises(BadInputError, match=word) as caught:
        bisect_trt.bisect(fixture.model, fixture.inputs, time_shape=(text,), out=tmp_path / "run")
    assert "time_shape=" in str(caught.value) and not (tmp_path / "run").exists()


def test_all_but_matrix_layers_may_be_faster_than_one_layer(tmp_path: Path) -> None:
    """As on an H200, where kernels of other layers read and write FP32 faster than they cast."""

    def clock(plan: PrecisionPlan) -> float:
        if plan.base is Precision.FP32:
            return FP32_MS
        return 1.0 - 0.001 * len(plan.pinned)

    found = by_name(timed_run(Timer(clock), tmp_path, fixture=encoder_decomposed()))
    assert found.keys() == {"as searched", "all but matrix layers"}
    assert found["all but matrix layers"].chosen


def test_fp32_that_new_inputs_refute_is_not_the_answer(tmp_path: Path) -> None:
    class Wrong(Engine):
        """An engine whose FP32 is wrong on copies."""

        def outputs(self, plan: PrecisionPlan, samples: Any) -> Any:
            for sample in samples:
                wrong = sample.copied and plan.base is Precision.FP32
                for outputs in super().outputs(plan, [sample]):
                    yield {n: a + (1.0 if wrong else 0.0) for n, a in outputs.items()}

    result = timed_run(Timer(lambda _: 2.0), tmp_path, Wrong)
    assert [c.name for c in result.choice_rows if c.recommended] == ["plan"]


def test_layers_that_must_stay_reduced_are_not_in_an_fp32_answer(tmp_path: Path) -> None:
    kept = ("blocks.29/MatMul",)
    result = timed_run(Timer(lambda _: 2.0), tmp_path, keep_reduced=kept)
    assert not any(kept[0] in name for name in result.pinned)


def test_bf16_is_not_the_answer_where_no_clock_says_so(tmp_path: Path) -> None:
    def timer(builds: Mapping[str, Build], sample: Sample) -> Timing:
        found = Timer(dear_layers)(builds, sample)
        failed = PlanTime(RoundTimes(failure="out of memory"))
        return replace(found, plans={**found.plans, "BF16": failed})

    fixture = replace(residual(), require="rel_range<=3e-2")
    result = timed_run(timer, tmp_path, Coarse, fixture=fixture)
    assert [c.name for c in result.choice_rows if c.recommended] == ["plan"]


def test_a_budget_that_ends_while_engines_are_timed_leaves_the_answer(tmp_path: Path) -> None:
    def slow(builds: Mapping[str, Build], sample: Sample) -> Timing:
        time.sleep(40.0)
        return Timer(dear_layers)(builds, sample)

    result = timed_run(slow, tmp_path, budget=0.5)
    assert result.passed and read_run(tmp_path).passed
