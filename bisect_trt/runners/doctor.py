"""The command ``doctor``: what is installed, which runners work here, and why others do not."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import metadata

import onnxruntime as ort

from bisect_trt.base.errors import BisectError, one_line
from bisect_trt.runners import ort_rtx
from bisect_trt.runners.device import TF32_OVERRIDE, gpu_facts, visible_gpus, why_no_provider
from bisect_trt.runners.device_check import why_not_on_cuda
from bisect_trt.runners.process import IsolatedWorker
from bisect_trt.runners.tensorrt.runner import ENGINE_WORKER

_PACKAGES = (
    "numpy",
    "onnx",
    "onnxruntime",
    "onnxruntime-gpu",
    "pandas",
    "tensorrt",
    "tensorrt-rtx-cu13",
    "cuda-bindings",
    ort_rtx.PACKAGE,
)


@dataclass(frozen=True)
class Check:
    """One line of ``doctor``: name, whether it works (None for a mere fact), detail."""

    name: str
    works: bool | None
    detail: str


def examine() -> list[Check]:
    """Lists what is installed, then the runners; GPUs are examined in child processes."""
    checks = [Check("python", None, platform.python_version())]
    checks += [Check(package, None, _version(package)) for package in _PACKAGES]
    works = "CPUExecutionProvider" in ort.get_available_providers()
    detail = "works without a GPU" if works else "ONNX Runtime has no CPU provider"
    missing = why_no_provider()
    checks += [
        Check("runner emulated", works, detail),
        _emulator_on_cuda(),
        _tensorrt(),
        Check("runner onnxruntime-cuda", missing is None, missing or "the CUDA provider is there"),
        _ort_rtx(),
    ]
    override = os.environ.get(TF32_OVERRIDE)
    if override is not None:
        changes = "it decides over TF32 in CUDA's libraries; set it in production too, or unset it"
        detail = f"set to {override!r}: {changes}"
        checks.append(Check(TF32_OVERRIDE, None if override == "0" else False, detail))
    return checks


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _emulator_on_cuda() -> Check:
    reason = why_not_on_cuda()
    name = gpu_facts((visible_gpus() or ["0"])[0])[0]
    detail = reason or f"works on {name}: strict FP32, every rounding bit for bit"
    return Check("emulator on cuda", reason is None, detail)


def _tensorrt() -> Check:
    with IsolatedWorker(ENGINE_WORKER, {"module": None}) as worker:
        try:
            described: dict[str, str] = worker.call("describe", timeout_s=120.0)
        except BisectError as error:
            return Check("runner tensorrt", False, one_line(error))
    detail = ", ".join(f"{name} {value}" for name, value in described.items())
    return Check("runner tensorrt", True, detail)


def _ort_rtx() -> Check:
    name = ort_rtx.OrtRtxRunner.name
    reason = ort_rtx.OrtRtxRunner.why_not()
    if reason is not None:
        return Check(f"runner {name}", False, reason)
    with IsolatedWorker(ort_rtx.OrtRtxRunner.worker, {}) as worker:
        try:
            device: str = worker.call("describe", timeout_s=120.0)
        except BisectError as error:
            return Check(f"runner {name}", False, one_line(error))
    return Check(f"runner {name}", True, f"the plugin loads and sees a device of {device}")
