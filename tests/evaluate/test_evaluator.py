"""A search set is one entry of the log, however often it is asked about."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.evaluate.cache import Cache
from bisect_trt.evaluate.evaluator import Criteria, Evaluator
from bisect_trt.evaluate.references import References
from bisect_trt.evaluate.result import Evaluation
from bisect_trt.metrics.parser import parse_requirements
from bisect_trt.model.graph import Graph
from bisect_trt.runners.reference import Reference

MODEL = """<ir_version: 8, opset_import: ["": 17]>
g (float[4] x) => (float[4] y) { [relu] y = Relu (x) }"""
PLAN = PrecisionPlan("fp16")


class Runner:
    """Off by what the sample holds."""

    name = "emulated"
    versions: Mapping[str, str] = {}

    def facts(self, plan: PrecisionPlan) -> Mapping[str, Any]:
        return {}

    def outputs(self, plan: PrecisionPlan, samples: Sequence[Sample]) -> Iterator[Any]:
        return ({"y": 2 * sample.arrays["x"]} for sample in samples)


def samples(*errors: float) -> list[Sample]:
    return [Sample(f"x{k}", {"x": np.full(4, e, np.float32)}) for k, e in enumerate(errors)]


@pytest.fixture
def evaluator(tmp_path: Path) -> Evaluator:
    references = References(Reference(Graph(onnx.parser.parse_model(MODEL)), "m"), tmp_path / "r")
    criteria = Criteria(references, parse_requirements(["max_abs<=1"], ["y"], {}, {}))
    return Evaluator(Runner(), [], criteria, Cache(tmp_path), "run")


def test_what_is_asked_again_is_no_other_evaluation(evaluator: Evaluator) -> None:
    told: list[Evaluation] = []
    evaluator.on_evaluation = told.append
    first = evaluator.judge(PLAN, samples(0.5, 2.0, 3.0)).logged
    assert evaluator.judge(PLAN, samples(0.5, 2.0, 3.0)).logged is first
    assert evaluator.log == told == [first]
    assert evaluator.judge(PLAN, samples(0.5)).logged is not first  # it ended sooner
    assert len(evaluator.log) == 2
    assert evaluator.judge(PLAN, []).logged is None and len(evaluator.log) == 2


def test_the_note_counts_misses_as_the_columns_say(evaluator: Evaluator) -> None:
    entry = evaluator.judge(PLAN, samples(0.5, 2.0, 3.0)).logged
    assert entry is not None and entry.note == "2 of 3 samples miss; worst x2"
