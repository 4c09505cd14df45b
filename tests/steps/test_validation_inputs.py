"""A validation's copies are made once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bisect_trt.base.interrupt import Observer
from bisect_trt.settings import Settings
from bisect_trt.steps.context import open_context
from bisect_trt.steps.problem import Problem, load
from bisect_trt.steps.samples import augmented, perturbs
from bisect_trt.steps.validation import put_to_test
from bisect_trt.steps.validation_inputs import planned_test
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


def test_both_judges_and_the_bounds_are_of_copies_made_once(tmp_path: Path) -> None:
    problem = case_of(tmp_path)
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
