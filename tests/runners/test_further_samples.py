"""What the process that runs engines is asked: it keeps the last engine for further samples."""

from __future__ import annotations

from collections.abc import Mapping
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
        self.asked: list[tuple[str, EngineRequest, int]] = []
        self.kept = ""

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        if method == "describe":
            return {"tensorrt_rtx": "1"}
        request, samples, _ = arguments
        self.asked.append((method, request, len(samples)))
        if method == "again" and request.key != self.kept:
            return None
        self.kept = request.key
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
    assert remote.asked[-1][0] == "again" and remote.asked[-1][1].model == b""
    answered(runner, FP32)
    assert remote.asked[-1][0] == "evaluate" and remote.asked[-1][1].model
    answered(runner, FP16)  # another engine was built since
    assert remote.asked[-1][0] == "evaluate" and remote.asked[-1][1].model


def test_an_engine_that_another_process_lost_is_built_again() -> None:
    remote = Recording()
    runner = runner_of(remote)
    answered(runner, FP16)
    remote.kept = ""
    answered(runner, FP16, 2)
    assert [method for method, _, _ in remote.asked] == ["evaluate", "again", "evaluate"]


def test_marked_engines_are_others_than_unmarked_ones() -> None:
    remote = Recording()
    runner = runner_of(remote)
    tensor = next(n.output[0] for n in FIXTURE.model.graph.node)
    runner.marked(FP16, [SAMPLE], [tensor])
    answered(runner, FP16)
    marked, plain = (request for _, request, _ in remote.asked)
    assert marked.key != plain.key
    assert not marked.measure_latency and plain.measure_latency
