"""The signed errors of an evaluation: read from the cache, not kept with every result."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bisect_trt.base.interrupt import Observer
from bisect_trt.settings import Settings
from bisect_trt.steps.context import open_context
from bisect_trt.steps.problem import load
from fixtures.models import residual


def test_errors_are_those_of_each_given_input_and_are_not_kept(tmp_path: Path) -> None:
    fixture = residual()
    inputs = [{n: np.float32(a * s) for n, a in fixture.inputs.items()} for s in (1.0, 0.5)]
    settings = Settings(fixture.model, inputs, require=fixture.require, robust=0.0, out=tmp_path)
    problem = load(settings, Observer())
    plans = [problem.base.with_pins(problem.names[:count]) for count in (0, 1, 2)]
    with open_context(problem, Observer()) as context:
        context.evaluator.evaluate_many(plans[:2])
        for plan in plans[:2]:
            outputs = context.emulator.outputs(plan, problem.samples)
            expected = [
                context.error_sample(s).errors(o)
                for s, o in zip(problem.samples, outputs, strict=True)
            ]
            found = context.evaluator.vector(plan)
            assert found is not None
            np.testing.assert_array_equal(found, np.concatenate(expected))
            assert np.abs(found).max() > 0
        assert context.evaluator.vector(plans[2]) is None
        kept = [*context.evaluator.done.values(), *context.log]
        assert len(kept) == 4
        assert not [p for p in kept if any(isinstance(v, np.ndarray) for v in vars(p).values())]
