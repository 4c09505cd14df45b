"""Whose score a plan's is, where some samples may miss."""

from __future__ import annotations

import numpy as np
import pytest

from bisect_trt.base.outcomes import Verdict
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.evaluate.result import Evaluation, SampleResult
from bisect_trt.metrics.errors import tensor_error


@pytest.mark.parametrize(("score", "name"), [(None, "a"), (2.0, "b"), (4.2, "")])
def test_a_spared_sample_is_not_named_and_a_set_has_none(score: float | None, name: str) -> None:
    errors = {"y": tensor_error(np.ones(4), np.ones(4) * 1.1)}
    samples = [SampleResult(Verdict.FAIL, s, (s,), errors, 0.1, "") for s in (9.0, 2.0, 1.5)]
    plan, names = PrecisionPlan("fp16"), ["a", "b", "c"]
    assert Evaluation.over(plan, "r", samples, score=score, names=names).worst_on == name
