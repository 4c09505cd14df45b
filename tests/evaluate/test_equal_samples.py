"""Equal samples of a search set are run once, whoever is asked first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bisect_trt.base.interrupt import Observer
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.runners.emulator import EmulatedRunner
from bisect_trt.settings import Settings
from bisect_trt.steps.context import open_context
from bisect_trt.steps.problem import load
from fixtures.models import residual

Outputs = Mapping[str, NDArray[Any]]


def largest(references: Sequence[Outputs], candidates: Sequence[Outputs]) -> float:
    """Of all inputs together."""
    return max(
        float(np.abs(r[name] - c[name]).max())
        for r, c in zip(references, candidates, strict=True)
        for name in r
    )


@pytest.mark.parametrize(("size", "runs"), [(1, [["b"], ["a", "c"], []]), (2, [])])
def test_equal_samples_are_run_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, runs: list[list[str]]
) -> None:
    fixture = residual()
    asked: list[list[str]] = []
    outputs = EmulatedRunner.outputs

    def counted(
        self: EmulatedRunner, plan: PrecisionPlan, samples: Sequence[Sample]
    ) -> Iterator[Outputs]:
        asked.append([s.name for s in samples])
        return outputs(self, plan, samples)

    def sample(name: str, scale: float) -> Sample:
        arrays = {n: np.float32(a * scale) for n, a in fixture.inputs.items()}
        return Sample(name, arrays, True)

    a, b, c = sample("a", 1.0), sample("b", 0.7), sample("c", 0.3)
    same = sample("a too", 1.0)
    collective = {"metrics": [f"{__name__}:largest@all"], "require": "largest<=1"}
    settings = Settings(
        fixture.model,
        [fixture.inputs] * size,
        out=tmp_path,
        **(collective if size > 1 else {"require": fixture.require}),  # type: ignore[arg-type]
    )
    problem = load(settings, Observer())
    with open_context(problem, Observer()) as context:
        alone = [context.evaluator.judge(problem.base, [s] * size, size=size) for s in (a, b, c)]
    with open_context(problem, Observer()) as context:
        monkeypatch.setattr(EmulatedRunner, "outputs", counted)
        plan = problem.base.with_pins(problem.names[:1])
        if size == 1:
            context.evaluator.judge(plan, [b])
            found = context.evaluator.judge(plan, [a, b, same, c, a])
            again = context.evaluator.judge(plan, [same, c])
            assert [n for n in asked if n] == [n for n in runs if n]
            scores = [r.score for r in found.results]
            assert scores[0] == scores[2] == scores[4] == again.results[0].score
            assert len({scores[0], scores[1], scores[3]}) == 3
            assert found.names == ("a", "b", "a too", "c", "a")
        else:  # of a set that is known nothing is run, and the order is that of those that are
            context.evaluator.judge(problem.base, [a, b], size=2)
            found = context.evaluator.judge(problem.base, [a, b, c, same], size=2)
            each = [r.results[0].score for r in alone]
            assert [r.score for r in found.results] == [max(each[:2]), max(each[0], each[2])]
            assert asked[-1] == ["c", "a too"]
