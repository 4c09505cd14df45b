"""What ONNX Runtime's runners conclude where a GPU gives out, or a layer has no kernel there; the
session is not a real one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bisect_trt.base.errors import BadInputError, RunnerFailedError
from bisect_trt.base.outcomes import Verdict
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.runners import ort_cuda, ort_engine, ort_rtx
from bisect_trt.runners.base import UNSUPPORTED
from bisect_trt.runners.ort_cuda import OrtCudaRunner, OrtCudaWorker
from bisect_trt.runners.ort_engine import OrtEngineRunner
from bisect_trt.runners.ort_rtx import OrtRtxRunner
from bisect_trt.runners.process import failure_of, must_end
from fixtures.encoders import encoder_decomposed

ILLEGAL = "CUDA failure 700: an illegal memory access was encountered ; GPU=0 ; expr=cudaStream"
KINDS = (OrtCudaRunner, OrtRtxRunner)
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
    repeats_on_cpu = True

    class Session:
        def __init__(self, *_: object, **__: object) -> None:
            if where == "load":
                raise RuntimeError(said)

        def get_providers(self) -> list[str]:
            return [ort_cuda.CUDA_PROVIDER]

        def get_outputs(self) -> list[Any]:
            return []

        def disable_fallback(self) -> None:
            nonlocal repeats_on_cpu
            repeats_on_cpu = False

        def run(self, *_: object) -> None:
            assert not repeats_on_cpu, "the outputs would be the CPU's"
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
    fixture = encoder_decomposed()
    if kind is OrtCudaRunner:
        return OrtCudaRunner(fixture.model)
    return OrtRtxRunner(fixture.model, [Sample("s", fixture.inputs)])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
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


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
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


def test_tf32_is_an_option_of_one_and_a_variable_of_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda, rtx = (opened(kind, monkeypatch) for kind in KINDS)
    assert [cuda.options(tf32) for tf32 in (False, True)] == [{"use_tf32": "0"}, {"use_tf32": "1"}]
    assert cuda.environments() == ({}, {})
    assert rtx.environments() == ({"NVIDIA_TF32_OVERRIDE": "0"}, {})
    assert rtx.options(False) == rtx.options(True)


def test_the_plugin_gets_the_shapes_of_all_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OrtRtxRunner, "why_not", staticmethod(lambda: None))
    fixture = encoder_decomposed()
    (name, array), *_ = fixture.inputs.items()
    samples = [Sample("one", {name: array}), Sample("two", {name: np.concatenate([array] * 2)})]
    assert array.shape == (1, 12, 32)
    runner = OrtRtxRunner(fixture.model, samples)
    assert runner.options(tf32=False) == {
        "nv_profile_min_shapes": f"{name}:1x12x32",
        "nv_profile_opt_shapes": f"{name}:1x12x32",
        "nv_profile_max_shapes": f"{name}:2x12x32",
    }
    assert runner.versions[ort_rtx.PACKAGE] == "unknown" or OrtRtxRunner.why_not() is None
    assert runner.takes(samples[1]) and not runner.takes(
        Sample("three", {name: np.concatenate([array] * 3)})
    )
    flat = Sample("flat", {name: array[0]})
    with pytest.raises(BadInputError, match="flat: input 'tokens' has 2 axes and in one 3"):
        OrtRtxRunner(fixture.model, [samples[0], flat])
