"""The validations that a run makes are together wrong as rarely as they say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bisect_trt.base.interrupt import Observer
from bisect_trt.base.limits import Limits
from bisect_trt.base.outcomes import Validation
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.metrics.statistics import copies_needed
from bisect_trt.settings import Settings
from bisect_trt.steps import answer
from bisect_trt.steps.context import open_context
from bisect_trt.steps.problem import Problem, load
from bisect_trt.steps.samples import augmented, perturbs
from bisect_trt.steps.search_set import Refusal
from bisect_trt.steps.validation import first_refusal, put_to_test, validate
from bisect_trt.steps.validation_inputs import (
    MAX_TESTS,
    ValidationCopies,
    ValidationTest,
    planned_test,
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
    ],
)
def test_no_more_of_unseen_inputs_are_asked_to_hold_than_of_the_given_ones(
    options: dict[str, float], require: str, wanted: float
) -> None:
    settings = Settings(model="m", inputs=[], **options)
    asked = SimpleNamespace(of_sets="@" in require)
    problem: Any = SimpleNamespace(samples=[0] * 3, settings=settings, requirements=asked)
    assert wanted_of_unseen(problem) == wanted


def chance(copies: int, misses: int, share: float) -> float:
    """That at most ``misses`` of the copies fail, where ``share`` of all such copies pass."""
    return math.fsum(
        math.comb(copies, k) * (1.0 - share) ** k * share ** (copies - k) for k in range(misses + 1)
    )


@pytest.mark.parametrize("share", [0.8, 0.95, 0.99])
@pytest.mark.parametrize("seconds", [1e-3, 0.1, 0.6])
def test_a_plan_below_the_share_is_validated_in_five_of_a_hundred_runs_at_most(
    tmp_path: Path, share: float, seconds: float
) -> None:
    problem = case_of(tmp_path, share)
    # One more is of the answer that a refused search ends with.
    tests = [planned_test(problem, number, seconds, last=False) for number in range(MAX_TESTS + 1)]
    assert len({test.stream for test in tests}) == len(tests), "no two tests share their copies"
    assert math.fsum(test.risk for test in tests) <= 0.05
    # A slow model's test is made of fewer copies than bound the share: it is never validated.
    bounding = [t for t in tests if chance(t.copies, t.misses, share) <= t.risk + 1e-9]
    assert all(
        t in bounding or t.copies < copies_needed(share, t.confidence, t.misses) for t in tests
    )
    assert math.fsum(chance(t.copies, t.misses, share) for t in bounding) <= 0.05
    if seconds == 1e-3:
        assert bounding == tests
        first = tests[0]
        assert first.risk == max(test.risk for test in tests) == pytest.approx(0.05 * 2.0 / 3.0)
        # A plan with some room passes; asked for no miss at all it would be refused here.
        room = 1.0 - (1.0 - share) / 5.0
        without = chance(copies_needed(share, first.confidence), 0, room)
        assert (
            first.misses >= Limits().max_misses
            and chance(first.copies, first.misses, room) > 1.5 * without
        )


def test_of_plans_that_hold_on_less_than_was_asked_few_are_validated(tmp_path: Path) -> None:
    """A run that never stops trying plans which hold on 94.9 %, simulated 4,000 times."""
    problem = case_of(tmp_path, 0.95)
    tests = [planned_test(problem, number, 1e-3, last=False) for number in range(MAX_TESTS + 1)]
    random = np.random.default_rng(0)
    passed = [random.binomial(test.copies, 0.051, 4000) <= test.misses for test in tests]
    assert np.any(passed, axis=0).mean() <= 0.05


def first_test_of(problem: Problem) -> tuple[ValidationTest, Refusal | None, Validation]:
    """The first test of everything reduced, of a fast model, and what it ends with."""
    with open_context(problem, Observer()) as context:
        test = planned_test(problem, 0, 1e-4, last=False)
        judges = [context.evaluator, context.second]
        copies = ValidationCopies(problem, context, judges, test)
        refused = first_refusal(problem, context, judges, problem.base, copies, 1.0)
        return test, refused, validate(problem, context, judges, problem.base, test)


def varied_case(
    fixture: Fixture,
    inputs: list[dict[str, Any]],
    kinds: list[str],
    tmp_path: Path,
    limits: Limits = Limits(),
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
        limits=limits,
    )
    return load(settings, Observer())


def seldom_too_large(inputs: Mapping[str, Any], generator: np.random.Generator) -> dict[str, Any]:
    """An augmented input that overflows FP16 twice in a hundred times: where, so that some of those
    which are looked at first do."""
    scale = 1e9 if 0.5 < generator.random() < 0.52 else 1.0 + 1e-4 * generator.random()
    return {name: np.float32(array * scale) for name, array in inputs.items()}


@pytest.mark.parametrize(("most", "word"), [(3, "validated"), (0, None)])
def test_a_few_misses_are_let_pass_where_there_is_time_for_the_copies(
    tmp_path: Path, most: int, word: str | None
) -> None:
    """Perturbed copies all pass; of the augmented inputs a few miss."""
    fixture = healthy()
    # Of 59 inputs: of fewer, of which a copy misses by far, nothing is said of others.
    shares = np.linspace(0.9, 1.0, 59)
    inputs = [{n: np.float32(a * by) for n, a in fixture.inputs.items()} for by in shares]
    limits = Limits(max_misses=most)
    problem = varied_case(fixture, inputs, ["seldom_too_large"], tmp_path, limits)
    test, refused, validation = first_test_of(problem)
    assert validation.perturbed.passed == validation.perturbed.tested == test.copies
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
        copies = ValidationCopies(problem, context, judges, test)
        refused = first_refusal(problem, context, judges, problem.base, copies, 1.0)
        assert (refused is not None) == (negative > 0) == (not context.second.plans)
        missed = len(refused.samples) if refused is not None else 0
        assert missed == (test.misses + 1 if negative else 0)


@pytest.mark.parametrize(
    ("count", "bad", "refuses"),
    [(40, 0, False), (100, 1, True), (110, 1, False)],
)
def test_with_fewer_inputs_than_wanted_fewer_may_miss(
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
    assert (refused is not None) == refuses and validation.augmented.tested == count < test.copies


@pytest.mark.parametrize("copies", [8, 59, 72, 152, 200])
def test_a_validation_within_a_time_is_shorter_and_has_no_miss_to_spare(
    tmp_path: Path, copies: int
) -> None:
    problem = case_of(tmp_path, 0.95)
    test = planned_test(problem, 0, 1e-4, last=True)
    assert (test.copies, test.misses, test.confidence) == (153, 3, pytest.approx(0.95))
    less = test.within(problem, 1e-4, copies * 6e-4 * 1.0001)  # six inferences a copy
    assert (less.stream, less.risk) == (test.stream, test.risk)
    assert less.copies == min(copies, 153) and less.misses == (3 if copies > 153 else 0)
    assert test.within(problem, 10.0, 1.0).copies == 8
    assert test.within(problem, 10.0, 1.0, 1000) == test, "what was seen counts"
    assert test.within(problem, 0.1, Limits().refused_time_s).copies == 41


def test_sets_are_drawn_as_sets(tmp_path: Path) -> None:
    alone = planned_test(case_of(tmp_path, 0.95), 0, 0.02, last=True)
    sets = planned_test(case_of(tmp_path, 0.95, "max_abs@mean<=1"), 0, 0.02, last=True)
    assert sets.copies < alone.copies and sets.copies >= 59


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
        time=SimpleNamespace(left_s=math.inf),
        judges=(),
    )
    answer.validation_of_answer(known, context)
    assert [test.risk for test in used] == [pytest.approx(risk)]


MADE: list[int] = []


def counted(inputs: Mapping[str, Any], generator: np.random.Generator) -> dict[str, Any]:
    """An augmented input, which is counted."""
    MADE.append(1)
    return {n: np.float32(a * generator.uniform(0.9, 1.1)) for n, a in inputs.items()}


def test_both_judges_and_the_bounds_are_of_copies_made_once(tmp_path: Path) -> None:
    problem = varied_case(healthy(), [healthy().inputs], ["counted"], tmp_path)
    MADE.clear()
    with open_context(problem, Observer()) as context:
        test = planned_test(problem, 0, 1e-4, last=False)
        judges = [context.evaluator, context.second]
        refused, validation = put_to_test(problem, context, judges, problem.base, test, 1.0)
    assert refused is None and validation is not None
    assert validation.augmented.tested == validation.perturbed.tested == test.copies
    # A few more are in work when the last one that is wanted is there.
    assert test.copies <= len(MADE) <= test.copies + 8


@pytest.mark.parametrize("kind", [perturbs, augmented])
def test_a_set_is_one_of_each_input_also_where_one_cannot_be_moved(
    tmp_path: Path, kind: Any
) -> None:
    """A blank page in a mean over three stood in no set, and another in it twice."""
    fixture = healthy()
    (name,) = fixture.inputs
    given = [{name: fixture.inputs[name] * np.float32(scale)} for scale in (1.0, 0.0, 0.5)]
    settings = Settings(
        fixture.model, given, require=("max_abs@mean<=1",), runner="emulated", out=tmp_path
    )
    problem = load(settings, Observer())
    with open_context(problem, Observer()) as context:
        more = {"emulated": True} if kind is perturbs else {}
        made = list(kind(problem, context, 1, 9, **more))
    names = [sample.name.partition(",")[0] for sample in made]
    assert names == [sample.name for sample in problem.samples] * 3
    assert made[1].digest == problem.samples[1].digest != made[0].digest
