"""What an emulator lets go is opened again where it is asked for, and answers the same."""

from __future__ import annotations

import numpy as np

from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.model.graph import Graph
from bisect_trt.runners.concurrency import Holder
from bisect_trt.runners.emulator import EmulatedRunner
from bisect_trt.runners.second_emulator import WholeModelRunner
from fixtures.models import residual
from tests.conftest import Sessions, alive


def test_released_emulators_answer_as_before(sessions_opened: Sessions) -> None:
    fixture = residual()
    graph = Graph(fixture.model)
    sample = Sample("s", fixture.inputs)
    plan = PrecisionPlan(Precision.FP16)
    emulated = EmulatedRunner(graph)
    whole = WholeModelRunner(graph, emulated.constants.owner)
    for runner in (emulated, whole):
        assert isinstance(runner, Holder)
        (before,) = runner.outputs(plan, [sample])
        traced = [v.accumulated for v in emulated.trace(sample, plan)]
        before_it = alive(sessions_opened)
        runner.release()
        assert alive(sessions_opened) == (0 if runner is emulated else before_it - 1)
        (after,) = runner.outputs(plan, [sample])
        assert all(np.array_equal(before[name], after[name]) for name in before)
        again = [v.accumulated for v in emulated.trace(sample, plan)]
        assert len(again) == len(traced) > 10
        assert all(map(np.array_equal, traced, again))
