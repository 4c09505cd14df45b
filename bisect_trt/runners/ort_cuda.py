"""The ``onnxruntime-cuda`` runner: the typed model on ONNX Runtime's CUDA provider."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from bisect_trt.base.display import some_of
from bisect_trt.base.errors import (
    RunnerFailedError,
    RunnerUnavailableError,
    is_gpu_failure,
    is_out_of_memory,
    one_line,
)
from bisect_trt.base.outcomes import Verdict
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.model.graph import Graph, as_graph
from bisect_trt.model.save import session_form
from bisect_trt.model.typed import to_typed
from bisect_trt.runners.base import UNSUPPORTED
from bisect_trt.runners.device import (
    CPU_PROVIDER,
    CUDA_PROVIDER,
    gpu_versions,
    load_cuda_libraries,
    tf32_override,
    visible_gpus,
    why_no_provider,
)
from bisect_trt.runners.ort_session import WEIGHTS_FOLDER, check_provider, session_options
from bisect_trt.runners.process import IsolatedWorker, WorkerPool

WORKER = "bisect_trt.runners.ort_cuda:OrtCudaWorker"


class OrtCudaRunner:
    """Executes a model on the GPU, with a session for each plan, in a child process.

    Raises:
        RunnerUnavailableError: ONNX Runtime has no CUDA provider.
    """

    name = "onnxruntime-cuda"

    def __init__(self, model: onnx.ModelProto | Graph, *, timeout_s: float | None = None) -> None:
        reason = why_no_provider()
        if reason is not None:
            raise RunnerUnavailableError(reason)
        self.versions: Mapping[str, str] = {
            "onnxruntime": ort.__version__,
            "onnx": onnx.__version__,
            **gpu_versions(next(iter(visible_gpus()), "0")),
            **tf32_override(),
        }
        self._graph = as_graph(model)
        self._layers = {layer.name for layer in self._graph.layers}
        self.timeout_s = timeout_s
        self._facts: dict[PrecisionPlan, Mapping[str, Any]] = {}
        self._worker = WorkerPool([IsolatedWorker(WORKER, {})])

    def outputs(
        self, plan: PrecisionPlan, samples: Sequence[Sample]
    ) -> Iterator[Mapping[str, NDArray[Any]]]:
        arrays = [dict(s.arrays) for s in samples]
        with session_form(to_typed(self._graph, plan), elsewhere=True) as form:
            outputs, fallen_back = self._worker.call(
                "evaluate",
                form.content,
                form.folder,
                arrays,
                plan.base is Precision.TF32,
                timeout_s=self.timeout_s,
            )
        # Nodes without a CUDA kernel run on the CPU provider, whose FP16 is computed otherwise.
        reduced = sorted((set(fallen_back) & self._layers) - plan.pinned)
        if reduced and plan.base.is_storage:
            self._facts[plan] = {UNSUPPORTED: reduced}
            precision = plan.base.value.upper()
            raise RunnerFailedError(
                f"ONNX Runtime's CUDA provider has no {precision} kernel for "
                f"{some_of(reduced, 4)}: it ran on the CPU provider, where {precision} means "
                "nothing",
                Verdict.UNSURE,
            )
        yield from outputs

    def facts(self, plan: PrecisionPlan) -> Mapping[str, Any]:
        return self._facts.get(plan, {})

    def close(self) -> None:
        """Ends the child process."""
        self._worker.close()


class OrtCudaWorker:
    """The child's side: opens one session for each call."""

    def __init__(self) -> None:
        load_cuda_libraries()

    def evaluate(
        self,
        content: bytes,
        weights: str,
        samples: Sequence[Mapping[str, NDArray[Any]]],
        tf32: bool,
    ) -> tuple[list[dict[str, NDArray[Any]]], list[str]]:
        """Returns each sample's outputs, and the nodes that ran on the CPU provider."""
        with tempfile.TemporaryDirectory(prefix="bisect-trt-") as folder:
            options = session_options()
            # Only a profile shows which provider ran a node.
            options.enable_profiling = True
            options.profile_file_prefix = str(Path(folder) / "profile")
            if weights:
                options.add_session_config_entry(WEIGHTS_FOLDER, weights)
            providers = [(CUDA_PROVIDER, {"use_tf32": int(tf32)}), CPU_PROVIDER]
            try:
                session = ort.InferenceSession(content, options, providers=providers)
            except Exception as error:
                raise _failure(error, Verdict.BUILD_FAILED) from error
            check_provider(session, CUDA_PROVIDER)
            names = [o.name for o in session.get_outputs()]
            try:
                outputs = [
                    dict(zip(names, session.run(names, dict(sample)), strict=True))
                    for sample in samples
                ]
            except Exception as error:
                raise _failure(error, Verdict.CRASHED) from error
            fallen_back = cpu_nodes(session)
        return outputs, fallen_back


def cpu_nodes(session: ort.InferenceSession) -> list[str]:
    """Ends the session's profiling and returns the nodes that ran on the CPU provider, in order."""
    path = Path(session.end_profiling())
    try:
        events = json.loads(path.read_text(encoding="utf-8"))
    finally:
        path.unlink(missing_ok=True)
    nodes = {
        str(event["name"]).removesuffix("_kernel_time"): None
        for event in events
        if str(event.get("name", "")).endswith("_kernel_time")
        and event.get("args", {}).get("provider") == CPU_PROVIDER
    }
    return list(nodes)


def _failure(error: Exception, verdict: Verdict) -> RunnerFailedError:
    """Translates an error of ONNX Runtime; ``lost`` means that this process has lost its GPU."""
    what = "load" if verdict is Verdict.BUILD_FAILED else "run"
    lost, scarce = is_gpu_failure(error), is_out_of_memory(error)
    return RunnerFailedError(
        f"ONNX Runtime cannot {what} the typed model ({one_line(error)})",
        Verdict.CRASHED if lost or scarce else verdict,
        lost=lost,
        machine=scarce,
    )
