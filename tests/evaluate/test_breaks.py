"""What breaks a runner on one sample says nothing of the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bisect_trt.base.errors import RunnerFailedError
from bisect_trt.base.outcomes import Verdict
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.evaluate.evaluator import Criteria, Execution
from bisect_trt.metrics.parser import parse_requirements

OUTPUTS = {"y": np.zeros(2, np.float32)}
COUNT = 20


class References:
    def make_ready(self, *_: object) -> None:
        pass

    def of(self, sample: Sample) -> Mapping[str, NDArray[Any]]:
        return OUTPUTS


class Runner:
    """Breaks on the samples named ``bad``: while it answers one by one, or before any answer."""

    name = "runner"
    versions: Mapping[str, str] = {}

    def __init__(self, bad: Sequence[int], *, streams: bool, verdict: Verdict) -> None:
        self._bad, self._streams, self._verdict = {str(n) for n in bad}, streams, verdict
        self.calls: list[int] = []

    def outputs(
        self, plan: PrecisionPlan, samples: Sequence[Sample]
    ) -> Iterator[Mapping[str, NDArray[Any]]]:
        self.calls.append(len(samples))
        for asked in ([s] for s in samples) if self._streams else [samples]:
            if any(sample.name in self._bad for sample in asked):
                raise RunnerFailedError("it broke", self._verdict)
            yield from (OUTPUTS for _ in asked)

    def facts(self, plan: PrecisionPlan) -> Mapping[str, Any]:
        return {}


def run(runner: Runner) -> str:
    """A point for each sample that was answered, a cross for each that was not."""
    asked = parse_requirements(["max_abs<=1"], ["y"], {}, {})
    execution = Execution(runner, Criteria(References(), asked))  # type: ignore[arg-type]
    samples = [Sample(str(number), {}) for number in range(COUNT)]
    found = execution.run(PrecisionPlan("fp16"), samples)
    return "".join("." if result.errors else "X" for result in found)


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("bad", [[], [0], [5], [5, 9], [19]])
def test_the_others_keep_their_answers(bad: list[int], streams: bool) -> None:
    runner = Runner(bad, streams=streams, verdict=Verdict.CRASHED)
    expected = "".join("X" if number in bad else "." for number in range(COUNT))
    assert run(runner) == expected
    if streams and 0 not in bad:
        assert len(runner.calls) <= 1 + len(bad), "who answers one by one is asked together"


@pytest.mark.parametrize("streams", [True, False])
def test_what_breaks_again_and_again_is_given_up(streams: bool) -> None:
    runner = Runner([5, 9, 13], streams=streams, verdict=Verdict.CRASHED)
    assert run(runner) == ".....X...X...XXXXXXX"


@pytest.mark.parametrize("verdict", [Verdict.BUILD_FAILED, Verdict.TIMED_OUT])
def test_what_is_not_built_or_hangs_is_not_asked_one_by_one(verdict: Verdict) -> None:
    runner = Runner([5], streams=False, verdict=verdict)
    assert run(runner) == "X" * COUNT and len(runner.calls) <= 3
