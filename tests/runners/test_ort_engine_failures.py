"""What ONNX Runtime's runners conclude where a GPU gives out, or a layer has no kernel there; the
session is not a real one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bisect_trt.base.errors import RunnerFailedError
from bisect_trt.base.outcomes import Verdict
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.runners import ort_cuda, ort_engine
from bisect_trt.runners.base import UNSUPPORTED
from bisect_trt.runners.ort_cuda import OrtCudaWorker
from bisect_trt.runners.ort_engine import OrtEngineRunner
from bisect_trt.runners.process import failure_of, must_end
from bisect_trt.steps.open_runners import BY_ONNXRUNTIME
from fixtures.encoders import encoder_decomposed

ILLEGAL = "CUDA failure 700: an illegal memory access was encountered ; GPU=0 ; expr=cudaStream"
ARENA = "bfc_arena.cc:376 Failed to allocate memory for requested buffer of size 4194304"


@pytest.mark.parametrize("where", ["load", "run"])
@pytest.mark.parametrize(
    ("said", "lost", "machine"),
    [
        (ILLEGAL, True, False),
        ("CUDNN failure 4000: CUDNN_STATUS_INTERNAL_ERROR", True, False),
        ("CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED", True, True),
        ("CUDA failure 2: out of memory ; GPU=0 ; expr=cudaMalloc((void**)&p, size);", True, True),
        (ARENA, True, True),
        ("Could not find an implementation for Foo(1) node", False, False),
    ],
)
def test_a_gpu_that_gave_out_is_no_fault_of_the_plan(
    where: str, said: str, lost: bool, machine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Session:
        def __init__(self, *_: object, **__: object) -> None:
            if where == "load":
                raise RuntimeError(said)

        def get_providers(self) -> list[str]:
            return [ort_cuda.CUDA_PROVIDER]

        def get_outputs(self) -> list[Any]:
            return []

        def disable_fallback(self) -> None:
            pass

        def run(self, *_: object) -> None:
            raise RuntimeError(said)

    monkeypatch.setattr(ort_cuda, "load_cuda_libraries", lambda: None)
    monkeypatch.setattr(ort_cuda.ort, "InferenceSession", Session)
    with pytest.raises(RunnerFailedError) as caught:
        OrtCudaWorker().evaluate(b"", "", [{}], {})
    error = caught.value
    assert (error.lost, error.machine) == (lost, machine)
    assert must_end(failure_of(error)) is lost, "it would fail every plan that comes after it"
    whose = Verdict.BUILD_FAILED if where == "load" and not lost else Verdict.CRASHED
    assert error.verdict is whose


def opened(kind: type[OrtEngineRunner], monkeypatch: pytest.MonkeyPatch) -> OrtEngineRunner:
    monkeypatch.setattr(kind, "why_not", staticmethod(lambda: None))
    monkeypatch.setattr(kind, "provider_versions", staticmethod(dict))
    monkeypatch.setattr(ort_engine, "gpu_versions", lambda _: {})
    outputs = {"logits": np.zeros(3, np.float32)}
    answer = [outputs], ["/head/Pow", "shape"]
    monkeypatch.setattr(ort_engine.WorkerPool, "call", lambda *_, **__: answer)
    return kind(encoder_decomposed().model, [Sample("s", encoder_decomposed().inputs)])


@pytest.mark.parametrize("kind", BY_ONNXRUNTIME.values(), ids=list(BY_ONNXRUNTIME))
def test_reduced_layers_without_a_kernel_on_the_gpu_make_the_result_unsure(
    kind: type[OrtEngineRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU provider FP16 means nothing: such a plan had passed."""
    runner, samples = opened(kind, monkeypatch), [Sample("s", encoder_decomposed().inputs)]
    reduced = PrecisionPlan(Precision.FP16)
    with pytest.raises(RunnerFailedError, match="no FP16 kernel for /head/Pow") as caught:
        list(runner.outputs(reduced, samples))
    assert caught.value.verdict is Verdict.UNSURE
    assert runner.facts(reduced)[UNSUPPORTED] == ["/head/Pow"]


@pytest.mark.parametrize("kind", BY_ONNXRUNTIME.values(), ids=list(BY_ONNXRUNTIME))
@pytest.mark.parametrize(
    "plan", [PrecisionPlan(Precision.FP16, ["/head/Pow"]), PrecisionPlan(Precision.TF32)], ids=str
)
def test_a_layer_that_ran_on_the_cpu_is_named(
    kind: type[OrtEngineRunner], plan: PrecisionPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, samples = opened(kind, monkeypatch), [Sample("s", encoder_decomposed().inputs)]
    assert [found["logits"].size for found in runner.outputs(plan, samples)] == [3]
    (finding,) = runner.facts(plan)["findings"]
    assert (finding["kind"], finding["where"]) == ("on-cpu", "/head/Pow")
    assert finding["message"].startswith("/head/Pow ran on the CPU: ONNX Runtime's")
