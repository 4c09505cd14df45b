"""The price of a run, said before it starts; no file is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bisect_trt.base.errors import BadInputError
from bisect_trt.base.interrupt import Observer
from bisect_trt.evaluate.evaluator import Evaluator
from bisect_trt.settings import Settings
from bisect_trt.steps.estimate import estimate, expected_sets
from bisect_trt.steps.problem import load
from fixtures.encoders import encoder_decomposed
from fixtures.models import healthy
from tests.networks import parsed

FIXTURE = encoder_decomposed()


def asking(**options: Any) -> Settings:
    options = {"require": FIXTURE.require, "runner": "emulated", **options}
    return Settings(FIXTURE.model, [FIXTURE.inputs], **options)


def test_an_estimate_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fixture = healthy()
    price = estimate(Settings(fixture.model, [fixture.inputs]), Observer())
    assert price.samples == 1 and price.copies == 200 and price.evaluations > 3
    assert 0.0 < price.seconds_per_evaluation < price.seconds and price.memory_bytes > 1e8
    assert f"{price.layers} layers, 1 input, 1 worker: about {price.evaluations} evaluations" in (
        price.sentence
    )
    assert not list(tmp_path.iterdir())


def test_a_fitted_search_is_priced_by_its_pins() -> None:
    assert expected_sets(load(asking(robust=0), Observer())) == 8 * 2


def test_of_many_inputs_one_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    fixture = healthy()
    given = fixture.inputs.items()
    inputs = [{n: np.float32(a * (1 + k / 99)) for n, a in given} for k in range(40)]
    asked = []
    evaluate = Evaluator.evaluate

    def counted(evaluator: Evaluator, plan: Any) -> Any:
        result = evaluate(evaluator, plan)
        asked.append(len(result.on_given and evaluator.done))
        return result

    monkeypatch.setattr(Evaluator, "evaluate", counted)
    price = estimate(Settings(fixture.model, inputs, holdout="none", runner="emulated"), Observer())
    assert price.samples == 40 and asked == [1, 2, 3]


def test_a_budget_bounds_the_time() -> None:
    assert estimate(asking(budget=0.001), Observer()).seconds == pytest.approx(0.06)


def test_what_a_run_refuses_has_no_price() -> None:
    with pytest.raises(BadInputError, match="always true"):
        estimate(asking(require="top99>=0.9"), Observer())
    golden = {name: np.zeros((3, 3), np.float32) for name in ("logits",)}
    with pytest.raises(BadInputError, match=r"'logits' has shape \(3, 3\), the model gives"):
        estimate(asking(golden=golden), Observer())
    model = parsed("[log] y = Log(x)", "float[4] x", "float[4] y")
    nowhere = Settings(model, [{"x": np.float32([-1.0, -2.0, -3.0, -4.0])}], require="max_abs<=1")
    with pytest.raises(BadInputError, match="NaN or infinite everywhere"):
        estimate(nowhere, Observer())
