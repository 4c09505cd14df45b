"""Equal rows of a batch and the corners of a profile, asked of a real engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from numpy.typing import NDArray

import bisect_trt
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.pipeline import compare
from bisect_trt.runners.doctor import examine
from bisect_trt.runners.tensorrt.runner import TensorRTRunner
from bisect_trt.settings import Settings
from fixtures.encoders import encoder_layernorm
from fixtures.fixture import waves

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SIZES = "tokens:1x6x32/3x12x32/4x20x32"

Asked = list[tuple[str, tuple[int, ...]]]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[bisect_trt.Result, Asked]:
    """The result, and precision and shape of all that its engines were asked."""
    check = next(c for c in examine() if c.name == "runner tensorrt")
    if not check.works:
        pytest.skip(f"no engine can run here: {check.detail}")
    fixture = replace(encoder_layernorm(), inputs={"tokens": waves(2, 3, 12, 32)})
    settings = Settings(
        fixture.model,
        [fixture.inputs],
        require=[fixture.require],
        profiles=(SIZES,),
        runner="tensorrt",
        out=tmp_path_factory.mktemp("checks") / "run",
        robust=0,
    )
    asked: Asked = []
    plain = TensorRTRunner.outputs

    def outputs(
        self: TensorRTRunner, plan: PrecisionPlan, samples: Iterable[Sample]
    ) -> Iterator[Mapping[str, NDArray[Any]]]:
        given = list(samples)
        asked.extend((plan.base.value, s.arrays["tokens"].shape) for s in given)
        return plain(self, plan, given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TensorRTRunner, "outputs", outputs)
        return compare(settings), asked


@pytest.mark.parametrize("kind", ["equal-rows", "profile-corner"])
def test_a_right_engine_gives_no_finding(
    compared: tuple[bisect_trt.Result, Asked], kind: str
) -> None:
    result, _ = compared
    assert [f.message for f in result.findings if f.kind == kind] == []
    assert result.engine is not None, "there was an engine"


@pytest.mark.parametrize("base", ["fp32", "fp16"])
@pytest.mark.parametrize("shape", [(1, 6, 32), (3, 12, 32), (4, 20, 32)])
def test_each_engine_was_asked_at_each_size(
    compared: tuple[bisect_trt.Result, Asked], base: str, shape: tuple[int, ...]
) -> None:
    """The middle one twice: the input, and its equal rows."""
    assert compared[1].count((base, shape)) >= (2 if shape == (3, 12, 32) else 1)
