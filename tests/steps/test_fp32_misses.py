"""What FP32 as a whole misses too is no evidence against pins."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

import bisect_trt
from bisect_trt.base.interrupt import Observer
from bisect_trt.base.outcomes import InputKind, Verdict
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.evaluate.result import SampleResult, SearchSetResult
from bisect_trt.settings import Settings
from bisect_trt.steps.context import open_context
from bisect_trt.steps.open_runners import Pace
from bisect_trt.steps.problem import load
from bisect_trt.steps.search_set import (
    SearchSet,
    all_in_fp32,
    decided_by_pins,
)
from bisect_trt.steps.validation import put_to_test
from bisect_trt.steps.validation_inputs import planned_test
from fixtures.build import GraphBuilder
from fixtures.fixture import waves

LOW = PrecisionPlan("fp16")
EVERY = LOW.with_pins(("a", "b"))
SAMPLES = [Sample(f"s{k}", {"x": np.float32([k])}) for k in range(6)]


class Judge:
    """Misses the samples of these numbers, by plan; of a set of them together if any."""

    def __init__(self, reduced: set[int], every: set[int]) -> None:
        self.misses = {LOW: reduced, EVERY: every}
        self.asked: list[tuple[int, int]] = []

    def judge(self, plan: PrecisionPlan, samples: Any, size: int = 1, **_: Any) -> SearchSetResult:
        numbers = [int(s.arrays["x"][0]) for s in samples]
        self.asked += [(len(plan.pinned), n) for n in numbers]
        results = []
        for first in range(0, len(numbers), size):
            missed = self.misses[plan] & set(numbers[first : first + size])
            verdict, score = (Verdict.FAIL, 2.0) if missed else (Verdict.PASS, 0.5)
            results.append(SampleResult(verdict, score, (score,), {}, 0.0))
        return SearchSetResult(plan, tuple(s.name for s in samples), tuple(results))


def bench_of(first: Judge, second: Judge) -> Any:
    noted: list[str] = []
    return SimpleNamespace(
        evaluator=first, second=second, noted=noted, note=lambda f: noted.append(f.kind)
    )


def case_of(size: int = 1) -> Any:
    return SimpleNamespace(
        requirements=SimpleNamespace(of_sets=size > 1),
        samples=[0] * size,
        settings=SimpleNamespace(),
        kept_reduced=frozenset(),
        names=("a", "b"),
    )


def test_sets_are_judged_together() -> None:
    first = Judge(set(), {2})
    context = bench_of(first, Judge(set(), set()))
    left = decided_by_pins(case_of(2), context, [first], EVERY, SAMPLES[:4])
    assert left == SAMPLES[:2] and context.noted == ["fp32-misses"]


def test_what_is_held_low_or_runs_in_tf32_is_no_fp32() -> None:
    problem = case_of()
    assert all_in_fp32(problem, LOW) == EVERY
    assert all_in_fp32(problem, LOW.with_pins_in(Precision.TF32)) is None
    problem.kept_reduced = frozenset({"a"})
    assert all_in_fp32(problem, LOW) is None


def test_a_panel_sets_such_draws_aside_and_keeps_the_given_inputs() -> None:
    first, second = Judge(set(), {0, 3}), Judge(set(), {4})
    context = bench_of(first, second)
    context.engine = None
    problem = case_of()
    given, copied = tuple(SAMPLES[:2]), tuple(SAMPLES[2:])
    search_set = SearchSet(
        problem, context, LOW, {InputKind.GIVEN: given, InputKind.PERTURBED: copied}
    )
    assert search_set.set_aside() and not search_set.set_aside()
    kept = {kind: [s.name for s in samples] for kind, samples in search_set._samples.items()}
    assert kept == {InputKind.GIVEN: ["s0", "s1"], InputKind.PERTURBED: ["s2", "s5"]}
    assert (2, 3) not in second.asked, "what one judge misses the next is not asked"
    assert decided_by_pins(problem, context, [first], EVERY, SAMPLES[:2]) == SAMPLES[1:2]
    assert decided_by_pins(problem, context, [first], None, SAMPLES[:2]) == SAMPLES[:2]


def rounded() -> tuple[onnx.ModelProto, list[dict[str, np.ndarray]]]:
    """A Round of what lies a hair below a half for a given input, beside layers that FP16 spoils:
    on copies FP32's own sums fall to either side.
    """
    build = GraphBuilder(3)
    tie = build.op("MatMul", "x", build.normal(256, 32, scale=400.0))
    steps = build.op("Round", tie)
    fine = build.op("Mul", build.op("Tanh", "x"), build.weight(3.0))
    return build.model({"x": [1, 256]}, {steps: [1, 32], fine: [1, 256]}), [
        {"x": waves(seed, 1, 256)} for seed in range(8)
    ]


@pytest.mark.slow
def test_a_search_that_meets_such_draws_ends_with_a_plan(tmp_path: Path) -> None:
    """It said that there was none while ``verify`` of all pins held."""
    model, given = rounded()
    result = bisect_trt.bisect(
        model, given, require="max_abs<=0.5", runner="emulated", out=tmp_path / "run"
    )
    fp32 = bisect_trt.PrecisionPlan("fp16", [x.name for x in bisect_trt.graph.list_layers(model)])
    held = bisect_trt.verify(model, given, fp32, require="max_abs<=0.5", out=tmp_path / "verify")
    assert held.validation is not None and held.validation.given.passed == 8
    assert result.passed and result.pinned == ["/MatMul", "/Round"]
    assert [f.where for f in result.findings if f.kind == "fp32-misses"] == [""]


@pytest.mark.parametrize(("seconds", "fewest", "most"), [(1e-3, 40, 300), (0.5, 8, 30)])
def test_a_slow_models_test_that_no_pins_pass_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, fewest: int, most: int
) -> None:
    """RT-DETR on two cores: 250 s of copies for a word that the first of them had said."""
    monkeypatch.setattr(Pace, "usual_seconds", property(lambda _: seconds))
    model, given = rounded()
    settings = Settings(model, given, require="max_abs<=0.5", runner="emulated", out=tmp_path)
    problem = load(settings, Observer())
    with open_context(problem, Observer()) as context:
        judges, plan = (
            [context.evaluator, context.second],
            problem.base.with_pins(("/MatMul", "/Round")),
        )
        test = planned_test(problem, 0, seconds, last=False)
        refused, validation = put_to_test(problem, context, judges, plan, test, 1.0)
    assert refused is None and validation is not None
    assert fewest <= validation.perturbed.tested <= most
    assert validation.perturbed.passed < validation.perturbed.tested, (
        "what FP32 misses too is counted"
    )
