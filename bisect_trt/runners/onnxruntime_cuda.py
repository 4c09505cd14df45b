"""The ``onnxruntime-cuda`` runner: the typed model on ONNX Runtime's CUDA provider, a second
opinion without TensorRT.

What the CUDA provider has no kernel for falls back to the CPU provider, where FP16 is not FP16
(kernels convert to FP32 and back): such layers are named, and lowered ones among them make the
result unsure.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from bisect_trt.core.errors import RunnerFailedError, RunnerUnavailableError, one_line
from bisect_trt.core.finding import Finding
from bisect_trt.core.precision import Precision, PrecisionPlan
from bisect_trt.core.sample import Sample
from bisect_trt.core.verdict import Verdict
from bisect_trt.graph.graph import Graph, as_graph
from bisect_trt.graph.passes.typed import to_typed
from bisect_trt.graph.runtime_forms import session_form
from bisect_trt.runners.ort_weights import WEIGHTS_FOLDER
from bisect_trt.runners.workers.crew import Crew
from bisect_trt.runners.workers.process import IsolatedWorker

CUDA = "CUDAExecutionProvider"
WORKER = "bisect_trt.runners.onnxruntime_cuda:OrtCudaWorker"


def why_unavailable() -> str | None:
    """Why this ONNX Runtime cannot use CUDA; None if it can."""
    if CUDA in ort.get_available_providers():
        return None
    return (
        "this ONNX Runtime has no CUDA provider: "
        "pip install onnxruntime-gpu in place of onnxruntime"
    )


class OrtCudaRunner:
    """Executes a model on the GPU, a session for each plan, in a child process.

    Raises :class:`RunnerUnavailableError` if ONNX Runtime has no CUDA provider or no GPU answers.
    """

    name = "onnxruntime-cuda"

    def __init__(self, model: onnx.ModelProto | Graph, *, timeout_s: float | None = None) -> None:
        reason = why_unavailable()
        if reason is not None:
            raise RunnerUnavailableError(reason)
        self.versions: Mapping[str, str] = {
            "onnxruntime": ort.__version__,
            "onnx": onnx.__version__,
        }
        self._graph = as_graph(model)
        self._layers = {layer.name for layer in self._graph.layers}
        self._timeout_s = timeout_s
        self._facts: dict[PrecisionPlan, Mapping[str, Any]] = {}
        self._worker = Crew([IsolatedWorker(WORKER, {})], ends=(Verdict.CRASHED,))

    def outputs(
        self, plan: PrecisionPlan, samples: Sequence[Sample]
    ) -> Iterator[Mapping[str, NDArray[Any]]]:
        arrays = [dict(s.arrays) for s in samples]
        with session_form(to_typed(self._graph, plan), elsewhere=True) as form:
            answer = self._worker.call(
                "probe",
                form.content,
                form.folder,
                arrays,
                plan.base is Precision.TF32,
                timeout_s=self._timeout_s,
            )
        outputs, fallen_back = answer
        lowered = (
            sorted((set(fallen_back) & self._layers) - plan.pinned) if plan.base.is_storage else []
        )
        findings = [
            Finding(
                "cpu-fallback",
                name,
                f"layer {name!r} ran on ONNX Runtime's CPU provider, where {plan.base.value} means "
                "nothing",
            )
            for name in lowered
        ]
        self._facts[plan] = {"findings": [vars(f) for f in findings]}
        yield from outputs

    def facts(self, plan: PrecisionPlan) -> Mapping[str, Any]:
        return self._facts.get(plan, {})

    def close(self) -> None:
        """End the child process."""
        self._worker.close()


class OrtCudaWorker:
    """The child's side: one session a call."""

    def __init__(self) -> None:
        # Finds CUDA's libraries in NVIDIA's own packages, where the system has none.
        if hasattr(ort, "preload_dlls"):
            ort.preload_dlls()

    def probe(
        self,
        content: bytes,
        weights: str,
        samples: Sequence[Mapping[str, NDArray[Any]]],
        tf32: bool,
    ) -> tuple[list[dict[str, NDArray[Any]]], list[str]]:
        """Each sample's outputs, and the nodes that ran on the CPU provider.

        Args:
            content: the serialised model.
            weights: the folder that its values' places are below; empty where it holds them all.
            samples: inputs by name.
            tf32: whether products may be rounded to TF32.
        """
        with tempfile.TemporaryDirectory(prefix="bisect-trt-") as folder:
            options = ort.SessionOptions()
            options.log_severity_level = 4
            options.enable_profiling = True
            options.profile_file_prefix = str(Path(folder) / "profile")
            if weights:
                options.add_session_config_entry(WEIGHTS_FOLDER, weights)
            providers = [(CUDA, {"use_tf32": int(tf32)}), "CPUExecutionProvider"]
            try:
                session = ort.InferenceSession(content, options, providers=providers)
            except Exception as error:
                raise RunnerFailedError(
                    f"ONNX Runtime cannot load the typed model ({one_line(error)})",
                    Verdict.BUILD_FAILED,
                ) from error
            if CUDA not in session.get_providers():
                raise RunnerUnavailableError(
                    "ONNX Runtime's CUDA provider does not start here: no usable GPU, or CUDA "
                    "libraries are missing"
                )
            names = [o.name for o in session.get_outputs()]
            outputs = [
                dict(zip(names, session.run(names, dict(sample)), strict=True))
                for sample in samples
            ]
            profile = session.end_profiling()
            fallen_back = cpu_nodes(json.loads(Path(profile).read_text(encoding="utf-8")))
            os.unlink(profile)
        return outputs, fallen_back


def cpu_nodes(profile: Sequence[Mapping[str, Any]]) -> list[str]:
    """The nodes that ONNX Runtime's profile says ran on the CPU provider, in order."""
    suffix = "_kernel_time"
    found = {
        str(event["name"]).removesuffix(suffix): None
        for event in profile
        if str(event.get("name", "")).endswith(suffix)
        and event.get("args", {}).get("provider") == "CPUExecutionProvider"
    }
    return list(found)
