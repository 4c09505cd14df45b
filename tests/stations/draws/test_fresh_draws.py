"""A test's copies are made once; those that did worst by one judge are asked of the next first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bisect_trt.base.interrupt import Observer
from bisect_trt.base.outcomes import InputKind, Verdict
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.evaluate.result import SampleResult, SearchSetResult
from bisect_trt.settings import Settings
from bisect_trt.steps import validation_inputs
from bisect_trt.steps.context import open_context
from bisect_trt.steps.problem import Problem, load
from bisect_trt.steps.samples import augmented, perturbs
from bisect_trt.steps.validation import put_to_test
from bisect_trt.steps.validation_inputs import TestCopies, ValidationTest, planned_test
from fixtures.models import healthy

MADE: list[int] = []


def counted(inputs: Mapping[str, Any], generator: np.random.Generator) -> dict[str, Any]:
    """An augmented input; how many were made is counted."""
    MADE.append(1)
    return {n: np.float32(a * generator.uniform(0.9, 1.1)) for n, a in inputs.items()}


def case_of(tmp_path: Path, scales: Sequence[float] = (1.0,), **more: Any) -> Problem:
    fixture = healthy()
    settings = Settings(
        fixture.model,
        [{n: np.float32(a * s) for n, a in fixture.inputs.items()} for s in scales],
        require=more.pop("require", fixture.require),
        augmented=f"{__name__}:counted",
        runner="emulated",
        out=tmp_path,
        **more,
    )
    return load(settings, Observer())


def results(scores: list[float]) -> SearchSetResult:
    found = [SampleResult(Verdict.PASS, s, (s,), {}, 0.0) for s in scores]
    names = tuple(str(i) for i in range(len(scores)))
    return SearchSetResult(PrecisionPlan("fp16"), names, tuple(found))


@pytest.mark.parametrize(("most", "times"), [(2048, 1), (1, 3)])
def test_both_judges_and_the_bounds_are_of_draws_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, times: int
) -> None:
    monkeypatch.setattr(validation_inputs, "_MOST_REMEMBERED", most)
    problem = case_of(tmp_path)
    MADE.clear()
    with open_context(problem, Observer()) as context:
        test = planned_test(problem, 0, 1e-4, last=False)
        judges = [context.evaluator, context.second]
        refused, validation = put_to_test(problem, context, judges, problem.base, test, 1.0)
    assert refused is None and validation is not None
    assert validation.augmented.tested == validation.perturbed.tested == test.enough
    # A few more are in work when the last one that is wanted is there.
    assert times * test.enough <= len(MADE) <= times * (test.enough + 8)


def test_what_did_worst_comes_first_within_each_look(tmp_path: Path) -> None:
    problem = case_of(tmp_path)
    with open_context(problem, Observer()) as context:
        copies = TestCopies(
            problem, context, [context.evaluator, context.second], ValidationTest(1, 0.03, 12, 2, 4)
        )
        assert copies.kinds == [InputKind.AUGMENTED, InputKind.PERTURBED]
        made = {
            kind: list(islice(copies.of(kind), 7))
            for kind in (InputKind.AUGMENTED, InputKind.PERTURBED)
        }
        copies.hear(InputKind.AUGMENTED, results([0.1, 0.4, 0.3, 0.2]))
        copies.hear(InputKind.PERTURBED, results([0.1, 0.2, 0.9, 0.3, 0.5, 0.7]))
        assert copies.kinds == [InputKind.PERTURBED, InputKind.AUGMENTED]
        expected = {
            InputKind.AUGMENTED: [1, 2, 3, 0, 4, 5, 6],
            InputKind.PERTURBED: [2, 3, 1, 0, 5, 4, 6],
        }
        for kind, order in expected.items():
            again = list(copies.of(kind))
            assert again[:7] == [made[kind][i] for i in order]
            assert len(again) == 12 == len({s.digest for s in again})
        assert (copies.seen(InputKind.AUGMENTED), copies.seen(InputKind.PERTURBED)) == (4, 6)


def test_sets_keep_their_order(tmp_path: Path) -> None:
    problem = case_of(tmp_path, (1.0, 0.5), require="max_abs@mean<=1")
    with open_context(problem, Observer()) as context:
        copies = TestCopies(problem, context, [context.evaluator], ValidationTest(1, 0.03, 6, 0, 6))
        made = list(copies.of(InputKind.PERTURBED))
        copies.hear(InputKind.PERTURBED, results([0.1, 0.9]))
        assert list(copies.of(InputKind.PERTURBED)) == made


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
