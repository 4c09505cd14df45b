"""The ``onnxruntime-rtx`` runner: the typed model on NVIDIA's plugin for ONNX Runtime.

The plugin brings its own TensorRT for RTX. Version 0.4.0 has TensorRT for RTX 1.6.1.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import onnx
import onnxruntime as ort

from bisect_trt.base.errors import RunnerUnavailableError, one_line
from bisect_trt.base.sample import Sample
from bisect_trt.model.graph import Graph
from bisect_trt.runners.device import TF32_OVERRIDE
from bisect_trt.runners.ort_engine import OrtEngineRunner, OrtEngineWorker
from bisect_trt.runners.tensorrt.profile import profile_of, takes

PACKAGE = "onnxruntime-ep-nv-tensorrt-rtx-cu13"
STRICT = {TF32_OVERRIDE: "0"}
"""The environment in which its FP32 is no TF32."""
_MODULE = "onnxruntime_ep_nv_tensorrt_rtx"


class OrtRtxRunner(OrtEngineRunner):
    """Executes a model on the GPU with TensorRT for RTX, by way of ONNX Runtime.

    Raises:
        RunnerUnavailableError: the plugin is not installed.
    """

    name = "onnxruntime-rtx"
    provider = "TensorRT RTX provider"
    worker = "bisect_trt.runners.ort_rtx:OrtRtxWorker"

    def __init__(
        self,
        model: onnx.ModelProto | Graph,
        samples: Sequence[Sample],
        *,
        profiles: Sequence[str] = (),
        timeout_s: float | None = None,
    ) -> None:
        super().__init__(model, timeout_s=timeout_s)
        self._profile = profile_of(self._graph.proto, samples, profiles)

    @staticmethod
    def why_not() -> str | None:
        if find_spec(_MODULE) is not None:
            return None
        return f"{PACKAGE} is not installed: pip install {PACKAGE} (the extra [ort-rtx])"

    @staticmethod
    def provider_versions() -> Mapping[str, str]:
        try:
            version = metadata.version(PACKAGE)
        except metadata.PackageNotFoundError:  # a build of one's own
            version = "unknown"
        return {PACKAGE: version, **STRICT}

    @staticmethod
    def environments() -> tuple[Mapping[str, str], Mapping[str, str]]:
        # The plugin has no option for TF32. TensorRT for RTX 1.6.1 heeds this variable (measured:
        # benchmarks/results/strict-fp32.md); it is read once in a process.
        return STRICT, {}

    def takes(self, sample: Sample) -> bool:
        return takes(self._profile, sample)

    def options(self, tf32: bool) -> Mapping[str, str]:
        # Without a profile the plugin builds for any shape, which kernels may not take.
        return {
            f"nv_profile_{word}_shapes": ",".join(
                f"{name}:{'x'.join(map(str, shapes[place]))}"
                for name, shapes in self._profile.items()
            )
            for place, word in enumerate(("min", "opt", "max"))
        }


class OrtRtxWorker(OrtEngineWorker):
    """The child's side.

    Raises:
        RunnerUnavailableError: the plugin does not load, or no GPU is one of its devices.
    """

    def __init__(self) -> None:
        try:
            plugin: Any = importlib.import_module(_MODULE)
            name = plugin.get_ep_name()
            ort.register_execution_provider_library(name, plugin.get_library_path())
            self._devices = [d for d in ort.get_ep_devices() if d.ep_name == name][:1]
        except Exception as error:  # a missing library is another exception at each place
            raise RunnerUnavailableError(
                f"{PACKAGE} does not load ({one_line(error)}): it needs NVIDIA's driver for CUDA 13"
            ) from error
        if not self._devices:
            raise RunnerUnavailableError(f"{PACKAGE} sees no GPU that it can use")

    def describe(self) -> str:
        """The device that sessions use."""
        return str(self._devices[0].ep_vendor)

    def session(
        self, content: bytes, session_options: ort.SessionOptions, options: Mapping[str, str]
    ) -> ort.InferenceSession:
        session_options.add_provider_for_devices(self._devices, dict(options))
        return ort.InferenceSession(content, session_options, enable_fallback=0)
