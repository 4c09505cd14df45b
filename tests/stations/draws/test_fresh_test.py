"""The tests that a run makes, one after the other, are together wrong as rarely as they say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bisect_trt.base.interrupt import Observer
from bisect_trt.base.outcomes import Validation
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.metrics.statistics import lower_bound
from bisect_trt.settings import Settings
from bisect_trt.steps import answer, validation_inputs
from bisect_trt.steps.context import open_context
from bisect_trt.steps.problem import Problem, load
from bisect_trt.steps.search_set import Refusal
from bisect_trt.steps.validation import first_refusal, validate
from bisect_trt.steps.validation_inputs import (
    MAX_TESTS,
    TestCopies,
    ValidationTest,
    fitted,
    out_of_reach,
    planned_test,
    shortened,
    wanted_of_unseen,
)
from fixtures.fixture import Fixture
from fixtures.models import healthy


def case_of(tmp_path: Path, share: float, require: str = "max_abs<=1") -> Problem:
    fixture = healthy()
    inputs = [{n: np.float32(a * by) for n, a in fixture.inputs.items()} for by in (1.0, 0.9, 0.8)]
    settings = Settings(fixture.model, inputs, robust=share, require=require, out=tmp_path)
    return load(settings, Observer())


@pytest.mark.parametrize(
    ("options", "require", "wanted"),
    [
        ({}, "max_abs<=1", 0.95),
        ({"allow_misses": 0.1}, "max_abs<=1", 0.9),
        ({"allow_misses": 0.01}, "max_abs<=1", 0.95),
        ({"allow_misses": 0.1}, "max_abs@mean<=1", 0.95),  # of a set none is let miss
        ({"allow_misses": 0.1, "robust": 0.97}, "max_abs<=1", 0.97),
        ({"allow_misses": 0.1, "robust": 0.0}, "max_abs<=1", 0.9),
        ({"pick": 0.5}, "max_abs<=1", 0.5),
        ({"pick": 0.99}, "max_abs<=1", 0.95),
    ],
)
def test_no_more_of_unseen_inputs_are_asked_to_hold_than_of_the_given_ones(
    options: dict[str, float], require: str, wanted: float
) -> None:
    settings = Settings(model="m", inputs=[], **options)
    asked = SimpleNamespace(of_sets="@" in require)
    problem: Any = SimpleNamespace(samples=[0] * 3, settings=settings, requirements=asked)
    assert wanted_of_unseen(problem) == wanted


def exactly(copies: int, misses: int, share: float) -> float:
    """That ``misses`` of the copies fail, where ``share`` of all such copies pass."""
    return math.comb(copies, misses) * (1.0 - share) ** misses * share ** (copies - misses)


def chance(copies: int, misses: int, share: float) -> float:
    """That at most so many fail."""
    return math.fsum(exactly(copies, k, share) for k in range(misses + 1))


def passing(test: ValidationTest, share: float) -> float:
    """The chance that a plan which holds on ``share`` of such copies passes either look."""
    later = test.copies - test.enough
    return chance(test.enough, 0, share) + math.fsum(
        exactly(test.enough, k, share) * chance(later, test.misses - k, share)
        for k in range(1, test.misses + 1)
    )


@pytest.mark.parametrize("share", [0.8, 0.95, 0.99])
@pytest.mark.parametrize("seconds", [1e-3, 0.01, 0.1, 0.6])
def test_a_plan_below_the_share_is_called_robust_in_five_of_a_hundred_runs_at_most(
    tmp_path: Path, share: float, seconds: float
) -> None:
    problem = case_of(tmp_path, share)
    # One more is of the answer that a refused search ends with.
    tests = [planned_test(problem, number, seconds, last=False) for number in range(MAX_TESTS + 1)]
    assert len({test.stream for test in tests}) == len(tests), "no two tests share their copies"
    assert math.fsum(test.risk for test in tests) <= 0.05
    bounding = [t for t in tests if chance(t.enough, 0, share) < 1.0 - t.confidence + 1e-9]
    # A slow model's test is made of fewer copies than bound the share: it is never called
    # validated.
    assert math.fsum(passing(t, share) for t in bounding) <= 0.05
    for test in bounding:  # what is printed of either look is no more than that look shows
        for copies, misses in ((test.enough, 0), (test.copies, test.misses)):
            assert chance(copies, misses, share) <= 1.0 - test.confidence + 1e-9
    if seconds <= 0.01:
        assert bounding == tests
    if seconds == 1e-3:
        first = tests[0]
        assert first.risk == max(test.risk for test in tests) == pytest.approx(0.05 * 2.0 / 3.0)
        assert first.misses > 0 and first.copies > 1.5 * first.enough
        # A plan with some room passes; asked for no miss at all it would be refused here.
        room = 1.0 - (1.0 - share) / 5.0
        assert passing(first, room) > 1.25 * chance(first.enough, 0, room)


def first_test_of(problem: Problem) -> tuple[ValidationTest, Refusal | None, Validation]:
    """The first test of everything reduced, of a fast model, and what it ends with."""
    with open_context(problem, Observer()) as context:
        test = planned_test(problem, 0, 1e-4, last=False)
        judges = [context.evaluator, context.second]
        copies = TestCopies(problem, context, judges, test)
        refused = first_refusal(problem, context, judges, problem.base, copies, 1.0)
        return test, refused, validate(problem, context, judges, problem.base, test)


def varied_case(
    fixture: Fixture, inputs: list[dict[str, Any]], kinds: list[str], tmp_path: Path
) -> Problem:
    """``fixture`` with augmented inputs by functions of this module."""
    settings = Settings(
        fixture.model,
        inputs,
        require=fixture.require,
        augmented=",".join(f"{__name__}:{kind}" for kind in kinds),
        holdout="none",
        runner="emulated",
        out=tmp_path,
    )
    return load(settings, Observer())


def seldom_too_large(inputs: Mapping[str, Any], generator: np.random.Generator) -> dict[str, Any]:
    """An augmented input that overflows FP16 twice in a hundred times: where, so that some of those
    which are looked at first do."""
    scale = 1e9 if 0.5 < generator.random() < 0.52 else 1.0 + 1e-4 * generator.random()
    return {name: np.float32(array * scale) for name, array in inputs.items()}


@pytest.mark.parametrize(("seconds", "word"), [(40.0, "validated"), (0.0, None)])
def test_a_test_goes_on_where_a_few_of_the_first_draws_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, word: str | None
) -> None:
    """Perturbed copies all pass, and are as few as tell; of the augmented inputs a few miss."""
    monkeypatch.setattr(validation_inputs, "_FURTHER", seconds)
    fixture = healthy()
    # Of 59 inputs: of fewer, of which a copy misses by far, nothing is said of others.
    shares = np.linspace(0.9, 1.0, 59)
    inputs = [{n: np.float32(a * by) for n, a in fixture.inputs.items()} for by in shares]
    problem = varied_case(fixture, inputs, ["seldom_too_large"], tmp_path)
    test, refused, validation = first_test_of(problem)
    assert validation.perturbed.passed == validation.perturbed.tested == test.enough
    assert validation.augmented.tested == test.copies and 0.95 < validation.augmented.share < 1.0
    assert (refused is None) == (validation.word is not None and validation.word.value == word)
    if refused is not None:
        assert refused.kind == "augmented" and len(refused.samples) == 1


def too_large_where_negative(
    inputs: Mapping[str, Any], generator: np.random.Generator
) -> dict[str, Any]:
    """An augmented input that overflows FP16 where the input's first value is negative."""
    louder = 1.01 + 1e-3 * generator.random()
    return {n: np.float32(a * (1e9 if a.flat[0] < 0 else 1) * louder) for n, a in inputs.items()}


def as_it_is(inputs: Mapping[str, Any], generator: np.random.Generator) -> dict[str, Any]:
    """No augmented input at all."""
    return dict(inputs)


@pytest.mark.parametrize(
    ("kinds", "negative"),
    [(["too_large_where_negative"], 10), (["as_it_is", "too_large_where_negative"], 100)],
)
def test_inputs_and_kinds_that_are_sorted_are_not_judged_by_the_first(
    tmp_path: Path, kinds: list[str], negative: int
) -> None:
    """Of 100 inputs the last few fail, or all by the second kind; 80 copies are looked at first."""
    fixture = healthy()
    inputs = [{n: np.abs(a) for n, a in fixture.inputs.items()}] * (100 - negative)
    inputs += [{n: -np.abs(a) for n, a in fixture.inputs.items()}] * negative
    # Equal inputs are one sample: each a little different.
    inputs = [
        {n: np.float32(a * (1 + i / 1e3)) for n, a in x.items()} for i, x in enumerate(inputs)
    ]
    problem = varied_case(fixture, inputs, kinds, tmp_path)
    _, refused, validation = first_test_of(problem)
    assert validation.given.passed == validation.given.tested == 100
    assert refused is not None and refused.kind == "augmented"
    assert (
        validation.augmented.passed < validation.augmented.tested
        and validation.word.value != "validated"
    )


@pytest.mark.parametrize("negative", [0, 100])
def test_what_the_first_judge_refuses_the_second_is_not_asked(
    tmp_path: Path, negative: int
) -> None:
    """Its session takes eighteen seconds to open where there are 60,000 nodes."""
    fixture = healthy()
    sign = -1.0 if negative else 1.0
    inputs = [{n: np.float32(sign * np.abs(a)) for n, a in fixture.inputs.items()}]
    problem = varied_case(fixture, inputs, ["too_large_where_negative"], tmp_path)
    with open_context(problem, Observer()) as context:
        test = planned_test(problem, 0, 1e-4, last=False)
        judges = [context.evaluator, context.second]
        copies = TestCopies(problem, context, judges, test)
        refused = first_refusal(problem, context, judges, problem.base, copies, 1.0)
        assert (refused is not None) == (negative > 0) == (not context.second.plans)
        missed = len(refused.samples) if refused is not None else 0
        assert missed == (test.may_miss_first + 1 if negative else 0)


@pytest.mark.parametrize(("bad", "refuses"), [(0, False), (1, True)])
@pytest.mark.parametrize("count", [40, 100])
def test_what_ends_before_its_look_does_has_no_miss_to_spare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, bad: int, refuses: bool
) -> None:
    problem = case_of(tmp_path, 0.95, "max_abs<=1e-2")
    arrays = problem.samples[0].arrays
    few = [
        Sample(str(i), {n: np.float32(a * (1 + i / 1e3)) for n, a in arrays.items()}, True)
        for i in range(count - bad)
    ]
    few[3:3] = [Sample("bad", {n: np.float32(a * 1e9) for n, a in arrays.items()}, True)] * bad
    monkeypatch.setattr("bisect_trt.steps.validation_inputs.augmented", lambda *_: iter(few))
    test, refused, validation = first_test_of(problem)
    assert (refused is not None) == refuses and validation.augmented.tested in (count, test.enough)


@pytest.mark.parametrize("copies", [8, 59, 65, 71, 72, 73, 200])
def test_a_test_of_one_look_has_all_of_the_risk(tmp_path: Path, copies: int) -> None:
    """A budget that leaves 59 copies leaves enough to say 95 %."""
    problem = case_of(tmp_path, 0.95)
    test = planned_test(problem, 0, 1e-4, last=True)
    assert (test.enough, test.confidence) == (72, pytest.approx(0.975))
    left = copies * 3e-4 / 0.6  # six inferences a draw, two at a time, in three fifths of the time
    less = fitted(test, problem, 1e-4, left * 1.0001)
    assert less.copies == copies
    looks = 1 if copies <= 72 else 2
    assert less.confidence == pytest.approx(1.0 - 0.05 / looks)
    assert less.enough == min(72, copies) and (less.misses > 0) == (looks == 2)
    if copies >= 59:
        assert lower_bound(less.enough, less.enough, less.confidence) >= 0.95


def test_sets_are_drawn_as_sets(tmp_path: Path) -> None:
    alone = planned_test(case_of(tmp_path, 0.95), 0, 0.02, last=True)
    sets = planned_test(case_of(tmp_path, 0.95, "max_abs@mean<=1"), 0, 0.02, last=True)
    assert sets.copies < alone.copies and sets.copies >= 59


def test_a_plan_that_was_refused_is_told_of_in_fewer_draws(tmp_path: Path) -> None:
    problem = case_of(tmp_path, 0.95)
    for seconds, copies in ((1e-3, None), (0.05, 83), (0.1, 41), (10.0, 32)):
        test = planned_test(problem, MAX_TESTS, seconds, last=False)
        less = shortened(test, problem, seconds)
        assert less.copies == (test.copies if copies is None else min(copies, test.copies))
        looks = 2 if less.copies > less.enough else 1
        assert less.stream == test.stream
        assert less.confidence == pytest.approx(1.0 - test.risk / looks, abs=1e-12)


def test_a_test_that_no_plan_passes_is_short_where_draws_are_slow(tmp_path: Path) -> None:
    problem = case_of(tmp_path, 0.95)
    for seconds, copies in ((1e-3, None), (0.05, 83), (0.2, 20), (2.0, 8)):
        test = planned_test(problem, 0, seconds, last=False)
        less = out_of_reach(test, problem, seconds, 4)
        assert less.copies == (test.copies if copies is None else min(copies, test.copies))
        assert out_of_reach(test, problem, seconds, 1000) == test, "what was seen counts"
        assert (less.stream, less.risk) == (test.stream, test.risk)


@pytest.mark.parametrize(("made", "risk"), [(0, 0.05), (1, 0.05 / 6.0), (3, 0.05 / 24.0)])
def test_risk_that_was_spent_is_not_spent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: int, risk: float
) -> None:
    """The FP32 plan that a run with TF32 ends with is tested too, after everything reduced was."""
    used: list[ValidationTest] = []
    monkeypatch.setattr(answer, "plan_of_answer", lambda *_: PrecisionPlan("fp32"))
    whole = SimpleNamespace(tested=10_000)
    validation = SimpleNamespace(perturbed=whole, augmented=whole, wanted_of_augmented=0.95)
    monkeypatch.setattr(answer, "validate", lambda *asked: used.append(asked[-1]) or validation)
    problem = case_of(tmp_path, 0.95)
    known: Any = SimpleNamespace(
        not_reproducible=None,
        validation=None,
        judgement=None,
        bisection=None,
        out_of_time=False,
        problem=problem,
        baselines=SimpleNamespace(evaluation_seconds=lambda _: 1e-4),
    )
    context: Any = SimpleNamespace(
        observer=Observer(),
        tests=made,
        pace=SimpleNamespace(usual_seconds=1e-4),
        time=SimpleNamespace(left_s=math.inf, endings=0),
        judges=(),
    )
    answer.validation_of_answer(known, context)
    assert [test.risk for test in used] == [pytest.approx(risk)]
