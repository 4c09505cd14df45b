"""The ``onnxruntime-cuda`` runner: the typed model on ONNX Runtime's CUDA provider."""

from __future__ import annotations

from collections.abc import Mapping

import onnxruntime as ort

from bisect_trt.runners.device import (
    CPU_PROVIDER,
    CUDA_PROVIDER,
    load_cuda_libraries,
    why_no_provider,
)
from bisect_trt.runners.ort_engine import OrtEngineRunner, OrtEngineWorker
from bisect_trt.runners.ort_session import check_provider


class OrtCudaRunner(OrtEngineRunner):
    """Executes a model on the GPU with ONNX Runtime's own kernels.

    Raises:
        RunnerUnavailableError: ONNX Runtime has no CUDA provider.
    """

    name = "onnxruntime-cuda"
    provider = "CUDA provider"
    worker = "bisect_trt.runners.ort_cuda:OrtCudaWorker"

    @staticmethod
    def why_not() -> str | None:
        return why_no_provider()

    def options(self, tf32: bool) -> Mapping[str, str]:
        return {"use_tf32": str(int(tf32))}


class OrtCudaWorker(OrtEngineWorker):
    """The child's side."""

    def __init__(self) -> None:
        load_cuda_libraries()

    def session(
        self, content: bytes, session_options: ort.SessionOptions, options: Mapping[str, str]
    ) -> ort.InferenceSession:
        providers = [(CUDA_PROVIDER, dict(options)), CPU_PROVIDER]
        session = ort.InferenceSession(
            content, session_options, providers=providers, enable_fallback=0
        )
        check_provider(session, CUDA_PROVIDER)
        return session
