"""What the process that runs engines is asked: it keeps the last engine for further samples."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.runners.tensorrt.records import EngineAnswer, EngineRequest
from bisect_trt.runners.tensorrt.runner import TensorRTRunner
from fixtures.models import healthy

FIXTURE = healthy()
SAMPLE = Sample("s", FIXTURE.inputs)
FP16, FP32 = PrecisionPlan(Precision.FP16), PrecisionPlan(Precision.FP32)


class Recording:
    """In the place of the process that runs engines, which needs a GPU: keeps what it is asked, and
    the engine last asked for.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[str, EngineRequest | None, int]] = []
        self.kept: Hashable = None

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        if method == "describe":
            return {"tensorrt_rtx": "1"}
        what, samples, _ = arguments
        again = method == "again"
        self.asked.append((method, None if again else what, len(samples)))
        if again and what != self.kept:
            return None
        self.kept = what if again else what.key
        answers = [[({"y": SAMPLE.arrays["x"]}, 1)] for _ in samples]
        return EngineAnswer(answers, {}, 1, 1.0, {}, [], [])

    def close(self) -> None:
        pass


def answered(runner: TensorRTRunner, plan: PrecisionPlan, count: int = 1) -> None:
    assert len(list(runner.outputs(plan, [SAMPLE] * count))) == count


def runner_of(remote: Recording) -> TensorRTRunner:
    def hire(_: str, __: Mapping[str, Any]) -> Recording:
        return remote

    return TensorRTRunner(FIXTURE.model, [SAMPLE], hire=hire)


def test_an_engine_is_kept_for_more_samples() -> None:
    remote = Recording()
    runner = runner_of(remote)
    answered(runner, FP16)
    answered(runner, FP16, 3)
    assert remote.asked[-1][0] == "again"
    answered(runner, FP32)
    assert remote.asked[-1][0] == "evaluate"
    answered(runner, FP16)  # another engine was built since
    assert remote.asked[-1][0] == "evaluate"


def test_an_engine_that_another_process_lost_is_built_again() -> None:
    remote = Recording()
    runner = runner_of(remote)
    answered(runner, FP16)
    remote.kept = None
    answered(runner, FP16, 2)
    assert [method for method, _, _ in remote.asked] == ["evaluate", "again", "evaluate"]


def test_marked_engines_are_others_than_unmarked_ones() -> None:
    remote = Recording()
    runner = runner_of(remote)
    tensor = next(n.output[0] for n in FIXTURE.model.graph.node)
    runner.marked(FP16, [SAMPLE], [tensor])
    answered(runner, FP16)
    marked, plain = (request for _, request, _ in remote.asked)
    assert marked is not None and plain is not None and marked.key != plain.key
    assert not marked.measure_latency and plain.measure_latency
