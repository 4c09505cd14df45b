"""Runs of samples that a metric sees together: some that break, and are waited for longer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from bisect_trt.base.errors import RunnerFailedError
from bisect_trt.base.outcomes import Verdict
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.evaluate.cache import Cache
from bisect_trt.evaluate.evaluator import Criteria, Evaluator
from bisect_trt.evaluate.references import References
from bisect_trt.metrics.parser import parse_requirements
from bisect_trt.model.graph import Graph
from bisect_trt.runners.base import Repeated
from bisect_trt.runners.reference import Reference

MODEL = """<ir_version: 8, opset_import: ["": 17]>
g (float[4] x) => (float[4] y) { [relu] y = Relu (x) }"""
SAMPLES = [Sample(n, {"x": np.full(4, i + 1, np.float32)}) for i, n in enumerate("AB")]
PLAN = PrecisionPlan("fp16")


def farthest(wanted: Sequence[Any], found: Sequence[Any]) -> float:
    return max(float(abs(f["y"] - w["y"]).max()) for w, f in zip(wanted, found, strict=True))


class Runner:
    """Off by 0.1 in four runs of six and by 0.2 in two; ``B`` may give no answer."""

    name = "engine"
    versions: Mapping[str, str] = {}

    def __init__(self, *, breaks: bool, timeout_s: float = 1.0) -> None:
        self._breaks, self.timeout_s = breaks, timeout_s

    def facts(self, plan: PrecisionPlan) -> Mapping[str, Any]:
        return {}

    def outputs(self, plan: PrecisionPlan, samples: Sequence[Sample]) -> Iterator[Any]:
        for sample in samples:
            if sample.name == "B" and self._breaks:
                raise RunnerFailedError("no answer", Verdict.TIMED_OUT)
            off = {by: sample.arrays["x"] + np.float32(by) for by in (0.1, 0.2)}
            yield Repeated({"y": off[0.1]}, 6, [({"y": off[0.2]}, 2)])


@pytest.fixture
def evaluator(tmp_path: Path) -> Callable[[Runner], Evaluator]:
    graph, cache = Graph(onnx.parser.parse_model(MODEL)), Cache(tmp_path)
    asked = parse_requirements(["far<=1"], ["y"], {}, {"far": farthest})

    def made(runner: Runner) -> Evaluator:
        references = References(Reference(graph, "m"), tmp_path / "references")
        return Evaluator(runner, SAMPLES, Criteria(references, asked), cache, "run")

    return made


def test_a_sample_that_breaks_beside_one_whose_runs_differ(
    evaluator: Callable[[Runner], Evaluator],
) -> None:
    result = evaluator(Runner(breaks=True)).evaluate(PLAN)
    assert result.verdict is Verdict.TIMED_OUT and math.isinf(result.score)


def test_a_set_is_judged_again_where_one_of_it_is_waited_for_longer(
    evaluator: Callable[[Runner], Evaluator],
) -> None:
    (impatient,) = evaluator(Runner(breaks=True)).judge(PLAN, SAMPLES, size=2).results
    assert math.isinf(impatient.score)
    (patient,) = evaluator(Runner(breaks=False, timeout_s=9.0)).judge(PLAN, SAMPLES, size=2).results
    assert patient.verdict is Verdict.PASS and patient.score == pytest.approx(0.2)


def test_the_worst_and_the_best_runs_of_all_are_judged(
    evaluator: Callable[[Runner], Evaluator],
) -> None:
    for _ in range(2):  # made, and recalled
        result = evaluator(Runner(breaks=False)).evaluate(PLAN)
        assert result.score == pytest.approx(0.2) and result.best_score == pytest.approx(0.1)
        assert result.reproducibility is not None and result.reproducibility.passed == 12
