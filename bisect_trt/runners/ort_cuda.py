"""The ``onnxruntime-cuda`` runner: the typed model on ONNX Runtime's CUDA provider."""

from __future__ import annotations

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


class OrtCudaWorker(OrtEngineWorker):
    """The child's side."""

    def __init__(self) -> None:
        load_cuda_libraries()

    def session(
        self, content: bytes, options: ort.SessionOptions, tf32: bool
    ) -> ort.InferenceSession:
        providers = [(CUDA_PROVIDER, {"use_tf32": int(tf32)}), CPU_PROVIDER]
        session = ort.InferenceSession(content, options, providers=providers)
        check_provider(session, CUDA_PROVIDER)
        return session
