"""An answer that was not waited for long enough is no answer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bisect_trt.base.outcomes import Verdict
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.evaluate.cache import Answers, Cache
from bisect_trt.evaluate.result import SampleResult


@pytest.mark.parametrize(
    ("verdict", "asks_again"), [(Verdict.TIMED_OUT, True), (Verdict.CRASHED, False)]
)
def test_who_waits_longer_asks_again(tmp_path: Path, verdict: Verdict, asks_again: bool) -> None:
    plan, sample = PrecisionPlan("fp16"), Sample("s", {"x": np.ones(2, np.float32)})
    cache = Cache(tmp_path)
    first = Answers(cache, "key", 10.0)
    result = SampleResult(verdict, float("inf"), (), {}, 10.0, "no answer in 10 s")
    cache.record([first.row(plan, sample, result)])
    for patience, asked in ((5.0, False), (10.0, False), (900.0, True), (float("inf"), True)):
        found = Answers(cache, "key", patience).of(plan, sample)
        assert (found is None) is (asked and asks_again)
        assert found is None or found.verdict is verdict
    longer = Answers(cache, "key", 900.0)
    cache.record([longer.row(plan, sample, result)])
    assert (longer.of(plan, sample) is None) is False
    cache.close()
