"""ONNX Runtime's CUDA provider as a runner, where it is installed and a GPU answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import bisect_trt
from bisect_trt.base.errors import RunnerUnavailableError
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.runners.device import why_no_provider
from bisect_trt.runners.emulator import EmulatedRunner
from bisect_trt.runners.ort_cuda import OrtCudaRunner
from fixtures.encoders import encoder_decomposed
from fixtures.models import residual, tf32_victim

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(why_no_provider() is not None, reason=str(why_no_provider())),
]


def runner(fixture: object) -> OrtCudaRunner:
    made = OrtCudaRunner(fixture.model)  # type: ignore[attr-defined]
    try:
        next(made.outputs(PrecisionPlan("fp32"), [Sample("s", fixture.inputs)]))
    except RunnerUnavailableError as error:
        made.close()
        pytest.skip(str(error))
    return made


def test_tf32_is_a_switch_of_its_own() -> None:
    fixture = tf32_victim()
    emulator, cuda = EmulatedRunner(fixture.model), runner(fixture)
    (name, exact), *_ = next(
        emulator.outputs(PrecisionPlan("fp32"), [Sample("s", fixture.inputs)])
    ).items()
    emulated = np.abs(
        next(emulator.outputs(PrecisionPlan("tf32"), [Sample("s", fixture.inputs)]))[name] - exact
    ).max()
    strict, tf32 = (
        np.abs(
            next(cuda.outputs(PrecisionPlan(p), [Sample("s", fixture.inputs)]))[name] - exact
        ).max()
        for p in ("fp32", "tf32")
    )
    cuda.close()
    assert strict < emulated / 10.0
    assert emulated / 4.0 < tf32 < emulated * 4.0


@pytest.mark.parametrize("make", [encoder_decomposed, residual], ids=lambda f: f.__name__)
def test_run(make: object, tmp_path: Path) -> None:
    fixture = make()  # type: ignore[operator]
    runner(fixture).close()
    result = bisect_trt.bisect(
        fixture.model,
        fixture.inputs,
        require=fixture.require,
        runner="onnxruntime-cuda",
        out=tmp_path / "run",
        robust=0,
    )
    assert (
        result.runner == "onnxruntime-cuda" and result.passed and result.engine.fp32_is == "strict"
    )
    print(fixture.name, result.pinned, result.engine, [f.message for f in result.findings])
