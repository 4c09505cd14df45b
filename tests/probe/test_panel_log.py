"""A run's log of plans on search sets."""

from __future__ import annotations

import numpy as np

from bisect_trt.base.outcomes import Verdict
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.evaluate.result import Evaluation, SampleResult, SearchSetLog, SearchSetResult
from bisect_trt.metrics.errors import tensor_error


def answer(*scores: float) -> SearchSetResult:
    errors = {"y": tensor_error(np.ones(4), np.ones(4) * 1.1)}
    verdicts = [Verdict.PASS if s <= 1.0 else Verdict.FAIL for s in scores]
    results = [SampleResult(v, s, (s,), errors, 0.1) for v, s in zip(verdicts, scores, strict=True)]
    names = tuple(f"x{k}" for k in range(len(scores)))
    return SearchSetResult(PrecisionPlan("fp16"), names, tuple(results))


def test_what_is_asked_again_is_no_other_probe() -> None:
    log: list[Evaluation] = []
    told: list[Evaluation] = []
    panels = SearchSetLog(log, "emulated", told.append)
    first = panels.entry(answer(0.5, 2.0, 3.0))
    assert panels.entry(answer(0.5, 2.0, 3.0)) is first and log == told == [first]
    assert panels.entry(answer(0.5)) is not first and len(log) == 2  # it ended sooner
    assert panels.entry(answer()) is None and len(log) == 2


def test_the_note_counts_misses_as_the_columns_say() -> None:
    entry = SearchSetLog([], "emulated", lambda _: None).entry(answer(0.5, 2.0, 3.0))
    assert entry is not None and entry.note == "2 of 3 samples miss; worst x2"
