"""An engine that could not be asked says nothing of its plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from numpy.typing import NDArray

from bisect_trt.core.errors import MachineError, RunnerFailedError
from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.core.sample import Sample
from fixtures.encoders import encoder_decomposed
from tests.engines import Engine, Judged

pytestmark = pytest.mark.usefixtures("few_draws")


def test_memory_that_gave_out_is_no_verdict_and_is_not_remembered(judged: Judged) -> None:
    """It was the plan's: journalled as a crash, so that the same command said so again."""

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
