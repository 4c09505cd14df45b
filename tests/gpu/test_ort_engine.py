"""ONNX Runtime's providers for a GPU as runners, where they are installed and a GPU answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import bisect_trt
from bisect_trt.base.errors import RunnerUnavailableError
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.runners.emulator import EmulatedRunner
from bisect_trt.runners.ort_cuda import OrtCudaRunner
from bisect_trt.runners.ort_engine import OrtEngineRunner
from bisect_trt.runners.ort_rtx import OrtRtxRunner
from fixtures.encoders import encoder_decomposed
from fixtures.fixture import Fixture
from fixtures.models import residual, tf32_victim

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

KINDS = (OrtCudaRunner, OrtRtxRunner)
runners = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def opened(kind: type[OrtEngineRunner], fixture: Fixture) -> OrtEngineRunner:
    if (reason := kind.why_not()) is not None:
        pytest.skip(reason)
    sample = Sample("s", fixture.inputs)
    cuda = kind is OrtCudaRunner
    made = OrtCudaRunner(fixture.model) if cuda else OrtRtxRunner(fixture.model, [sample])
    try:
        next(made.outputs(PrecisionPlan("fp32"), [sample]))
    except RunnerUnavailableError as error:
        made.close()
        pytest.skip(str(error))
    return made


@runners
def test_tf32_is_a_switch_of_its_own(kind: type[OrtEngineRunner]) -> None:
    fixture = tf32_victim()
    emulator, engine = EmulatedRunner(fixture.model), opened(kind, fixture)
    (name, exact), *_ = next(
        emulator.outputs(PrecisionPlan("fp32"), [Sample("s", fixture.inputs)])
    ).items()
    emulated = np.abs(
        next(emulator.outputs(PrecisionPlan("tf32"), [Sample("s", fixture.inputs)]))[name] - exact
    ).max()
    strict, tf32 = (
        np.abs(
            next(engine.outputs(PrecisionPlan(p), [Sample("s", fixture.inputs)]))[name] - exact
        ).max()
        for p in ("fp32", "tf32")
    )
    engine.close()
    print(kind.name, emulated, strict, tf32)
    assert strict < emulated / 10.0
    assert emulated / 4.0 < tf32 < emulated * 4.0


@runners
@pytest.mark.parametrize("make", [encoder_decomposed, residual], ids=lambda f: f.__name__)
def test_run(kind: type[OrtEngineRunner], make: object, tmp_path: Path) -> None:
    fixture = make()  # type: ignore[operator]
    opened(kind, fixture).close()
    result = bisect_trt.bisect(
        fixture.model,
        fixture.inputs,
        require=fixture.require,
        runner=kind.name,
        out=tmp_path / "run",
        robust=0,
    )
    print(fixture.name, result.pinned, result.engine, [f.message for f in result.findings])
    assert result.runner == kind.name and result.passed and result.engine.fp32_is == "strict"
