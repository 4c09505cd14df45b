"""An engine that could not be asked says nothing of its plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from numpy.typing import NDArray

import bisect_trt
from bisect_trt.base.errors import MachineError, RunnerFailedError, RunnerUnavailableError
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.base.sample import Sample
from fixtures.encoders import encoder_decomposed
from tests.engines import Engine, Judged

pytestmark = pytest.mark.usefixtures("few_draws")


def test_memory_that_gave_out_is_no_verdict_and_is_not_remembered(judged: Judged) -> None:
    """It was the plan's: cached as a crash, so that the same command said so again."""

    class Scarce(Engine):
        scarce = True

        def outputs(
            self, plan: PrecisionPlan, samples: Sequence[Sample]
        ) -> Iterator[Mapping[str, NDArray[Any]]]:
            if self.scarce and plan.pinned:
                raise RunnerFailedError("the GPU's memory does not suffice", machine=True)
            return super().outputs(plan, samples)

    fixture = encoder_decomposed()
    engine = Scarce(fixture)
    with pytest.raises(MachineError, match=r"does not suffice; nothing is concluded") as caught:
        judged(fixture, engine)
    assert caught.value.exit_code == 4
    engine.scarce = False
    result, _ = judged(fixture, engine)
    assert result.passed and result.exit_code == 0


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RunnerFailedError("the GPU's memory does not suffice", machine=True), MachineError),
        (RunnerFailedError("the process crashed"), RunnerUnavailableError),
    ],
)
def test_a_full_gpu_is_no_gpu_that_is_missing(
    error: Exception,
    expected: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def opened(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("bisect_trt.steps.open_runners.TensorRTRunner", opened)
    fixture = encoder_decomposed()
    with pytest.raises(expected, match=str(error)):
        bisect_trt.bisect(
            fixture.model, fixture.inputs, runner="tensorrt", out=tmp_path, require="max_abs<=1"
        )
