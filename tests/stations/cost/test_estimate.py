"""The price of a run: counted by the search's own figures, and no file is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

import bisect_trt
from bisect_trt.base.errors import BadInputError
from bisect_trt.base.interrupt import Observer
from bisect_trt.evaluate.evaluator import Evaluator
from bisect_trt.settings import Settings
from bisect_trt.steps.estimate import Work, estimate, expected_work
from bisect_trt.steps.problem import Problem, load
from fixtures.encoders import encoder_decomposed
from fixtures.models import healthy

FIXTURE = encoder_decomposed()


def case_of(**options: object) -> Problem:
    made = Settings(FIXTURE.model, [FIXTURE.inputs], require=FIXTURE.require, **options)
    return load(made, Observer())


def work_of(problem: Problem, *, passes: bool, seconds: float = 1e-3) -> Work:
    given = {"passes": passes, "hopeless": False}
    return expected_work(problem, evaluation_seconds=seconds, usual_seconds=seconds, **given)


def test_what_passes_is_hardly_searched() -> None:
    fails, passes = (work_of(case_of(), passes=p) for p in (False, True))
    assert passes.rows == 0 and passes.emulations < 10 and passes.evaluations == 3
    assert fails.rows >= 2 * len(case_of().names) and fails.emulations > 200
    assert passes.copied >= 20 + 12 + 59 and passes.second_asked < passes.copied


def test_a_slow_model_is_tested_on_fewer_draws() -> None:
    quick, slow = (work_of(case_of(), passes=True, seconds=s) for s in (1e-3, 3.0))
    assert slow.copied < quick.copied and slow.second_asked >= 8


def test_a_fitted_search_is_priced_by_its_pins() -> None:
    work = work_of(case_of(robust=0), passes=False)
    assert work.rows == len(case_of().names) and work.evaluations == 6 + 8 * 2


def test_the_counts_are_those_of_the_run(tmp_path: Path) -> None:
    """Within a factor of two, for what is drawn and for the layers alone."""
    result = bisect_trt.bisect(
        FIXTURE.model, FIXTURE.inputs, require=FIXTURE.require, runner="emulated", out=tmp_path
    )
    work = work_of(case_of(), passes=False)
    assert 0.5 <= work.rows / result.sensitivity_runs <= 2.0
    assert result.validation is not None
    copied = 20 + 12 + result.validation.perturbed.tested + result.validation.augmented.tested
    assert 0.5 <= work.copied / copied <= 2.0


@pytest.mark.usefixtures("few_draws")
def test_an_estimate_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fixture = healthy()
    price = estimate(Settings(fixture.model, [fixture.inputs], budget=1e-3), Observer())
    assert (
        price.seconds == pytest.approx(0.06) and price.copies > 50 and price.sensitivity_runs == 0
    )
    assert f"{price.copies} copies in" in price.sentence
    assert not list(tmp_path.iterdir())


def test_of_many_inputs_a_few_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    fixture = healthy()
    given = fixture.inputs.items()
    inputs = [{n: np.float32(a * (1 + k / 99)) for n, a in given} for k in range(40)]
    asked: list[int] = []
    judge = Evaluator.judge

    def counted(evaluator: Evaluator, plan: Any, search_set: Any, **more: Any) -> Any:
        asked.append(len(samples := list(search_set)))
        return judge(evaluator, plan, samples, **more)

    monkeypatch.setattr(Evaluator, "judge", counted)
    estimate(Settings(fixture.model, inputs, holdout="none", runner="emulated"), Observer())
    assert max(asked) <= 8


def test_where_fp32_misses_nothing_is_searched() -> None:
    asked = Settings(FIXTURE.model, [FIXTURE.inputs], runner="emulated", require="max_abs<=1e-12")
    found = estimate(asked, Observer())
    assert (found.copies, found.sensitivity_runs) == (0, 0) and found.evaluations < found.fewest


def test_a_budget_is_told_beside_what_it_would_take_without_one() -> None:
    asked = Settings(FIXTURE.model, [FIXTURE.inputs], budget=0.001, runner="emulated")
    found = estimate(asked, Observer())
    assert found.seconds == pytest.approx(0.06) and found.unbounded_seconds > 0.06
    assert "(the budget ends it after 0 s, with what it has)" in found.sentence


def test_what_a_run_refuses_has_no_price() -> None:
    asked = Settings(FIXTURE.model, [FIXTURE.inputs], require="top99>=0.9")
    with pytest.raises(BadInputError, match="always true"):
        estimate(asked, Observer())
    golden = {name: np.zeros((3, 3), np.float32) for name in ("logits",)}
    asked = Settings(FIXTURE.model, [FIXTURE.inputs], golden=golden)
    with pytest.raises(BadInputError, match=r"'logits' has shape \(3, 3\), the model gives"):
        estimate(asked, Observer())
    log = helper.make_node("Log", ["x"], ["y"], name="log")
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [4]) for n in "xy")
    model = helper.make_model(
        helper.make_graph([log], "g", [x], [y]),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=9,
    )
    nowhere = Settings(model, [{"x": np.float32([-1.0, -2.0, -3.0, -4.0])}], require="max_abs<=1")
    with pytest.raises(BadInputError, match="NaN or infinite everywhere"):
        estimate(nowhere, Observer())
