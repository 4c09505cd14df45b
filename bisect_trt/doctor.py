"""What is installed, which runners work here, and why the others do not."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import metadata

import onnxruntime as ort

_PACKAGES = ("numpy", "onnx", "onnxruntime", "onnxruntime-gpu", "onnx-graphsurgeon", "pandas", "tensorrt", "tensorrt-rtx-cu13")


@dataclass(frozen=True)
class Check:
    """One line of ``doctor``: ``works`` is None for a mere fact."""

    name: str
    works: bool | None
    detail: str


def examine() -> list[Check]:
    """The checks in the order they are worth reading."""
    checks = [Check("python", None, platform.python_version())]
    for package in _PACKAGES:
        try:
            checks.append(Check(package, None, metadata.version(package)))
        except metadata.PackageNotFoundError:
            checks.append(Check(package, None, "not installed"))
    providers = ort.get_available_providers()
    works = "CPUExecutionProvider" in providers
    checks.append(Check("runner emulated", works, "works without a GPU" if works else "ONNX Runtime has no CPU provider"))
    for runner in ("tensorrt", "onnxruntime-cuda"):
        checks.append(Check(f"runner {runner}", False, "not in this version of bisect-trt; plans are judged by emulation"))
    override = os.environ.get("NVIDIA_TF32_OVERRIDE")
    if override is not None:
        checks.append(
            Check("NVIDIA_TF32_OVERRIDE", False, f"set to {override!r}: it changes what FP32 means in every CUDA library; unset it")
        )
    return checks
