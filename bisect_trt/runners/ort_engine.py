"""A typed model in an ONNX Runtime session on the GPU: what ``onnxruntime-cuda`` and
``onnxruntime-rtx`` have in common.
"""

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
from bisect_trt.base.outcomes import Finding, Verdict
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.model.graph import Graph, as_graph
from bisect_trt.model.save import session_form
from bisect_trt.model.typed import to_typed
from bisect_trt.runners.base import UNSUPPORTED
from bisect_trt.runners.device import CPU_PROVIDER, gpu_versions, tf32_override, visible_gpus
from bisect_trt.runners.ort_session import WEIGHTS_FOLDER, session_options
from bisect_trt.runners.process import IsolatedWorker, WorkerPool


class OrtEngineRunner:
    """Executes a model on the GPU, with a session for each plan, in a child process.

    Raises:
        RunnerUnavailableError: the execution provider is not installed.
    """

    name: str
    provider: str
    """What people call the execution provider."""
    worker: str
    """The child's class."""

    def __init__(self, model: onnx.ModelProto | Graph, *, timeout_s: float | None = None) -> None:
        reason = self.why_not()
        if reason is not None:
            raise RunnerUnavailableError(reason)
        self.versions: Mapping[str, str] = {
            "onnxruntime": ort.__version__,
            "onnx": onnx.__version__,
            **self.provider_versions(),
            **gpu_versions(next(iter(visible_gpus()), "0")),
            **tf32_override(),
        }
        self._graph = as_graph(model)
        self._layers = {layer.name for layer in self._graph.layers}
        self.timeout_s = timeout_s
        self._facts: dict[PrecisionPlan, Mapping[str, Any]] = {}
        strict, tf32 = self.environments()
        first = WorkerPool([IsolatedWorker(self.worker, {}, strict)])
        other = WorkerPool([IsolatedWorker(self.worker, {}, tf32)]) if tf32 != strict else first
        self._workers = {False: first, True: other}

    @staticmethod
    def why_not() -> str | None:
        """Says why the execution provider cannot be used; None where it is installed."""
        raise NotImplementedError

    @staticmethod
    def provider_versions() -> Mapping[str, str]:
        """The versions that decide over answers, beside ONNX Runtime's."""
        return {}

    @staticmethod
    def environments() -> tuple[Mapping[str, str], Mapping[str, str]]:
        """The environments of the children: of strict FP32, and of one that may use TF32."""
        return {}, {}

    def takes(self, sample: Sample) -> bool:
        """Whether the execution provider takes the shapes of ``sample``."""
        return True

    def options(self, tf32: bool) -> Mapping[str, str]:
        """The execution provider's options for an engine that may compute in TF32, or not."""
        raise NotImplementedError

    def outputs(
        self, plan: PrecisionPlan, samples: Sequence[Sample]
    ) -> Iterator[Mapping[str, NDArray[Any]]]:
        arrays = [dict(s.arrays) for s in samples]
        tf32 = plan.base is Precision.TF32
        with session_form(to_typed(self._graph, plan), elsewhere=True) as form:
            outputs, on_cpu = self._workers[tf32].call(
                "evaluate",
                form.content,
                form.folder,
                arrays,
                self.options(tf32),
                timeout_s=self.timeout_s,
            )
        fallen_back = set(on_cpu) & self._layers
        # Nodes without a kernel on the GPU run on the CPU provider, whose FP16 is another.
        reduced = sorted(fallen_back - plan.pinned)
        if reduced and plan.base.is_storage:
            self._facts[plan] = {UNSUPPORTED: reduced}
            precision = plan.base.value.upper()
            raise RunnerFailedError(
                f"ONNX Runtime's {self.provider} has no {precision} kernel for "
                f"{some_of(reduced, 4)}: they ran on the CPU provider, where {precision} means "
                "nothing",
                Verdict.UNSURE,
            )
        if fallen_back:
            message = (
                f"{some_of(sorted(fallen_back), 4)} ran on the CPU: ONNX Runtime's "
                f"{self.provider} does not take them"
            )
            finding = Finding("on-cpu", min(fallen_back), message)
            self._facts[plan] = {"findings": [vars(finding)]}
        yield from outputs

    def facts(self, plan: PrecisionPlan) -> Mapping[str, Any]:
        return self._facts.get(plan, {})

    def close(self) -> None:
        """Ends the child processes."""
        for worker in self._workers.values():
            worker.close()


class OrtEngineWorker:
    """The child's side: opens one session for each call."""

    def session(
        self, content: bytes, session_options: ort.SessionOptions, options: Mapping[str, str]
    ) -> ort.InferenceSession:
        """Opens a session with the execution provider, and the CPU's for what it cannot take."""
        raise NotImplementedError

    def evaluate(
        self,
        content: bytes,
        weights: str,
        samples: Sequence[Mapping[str, NDArray[Any]]],
        options: Mapping[str, str],
    ) -> tuple[list[dict[str, NDArray[Any]]], list[str]]:
        """Returns each sample's outputs, and the nodes that ran on the CPU provider."""
        with tempfile.TemporaryDirectory(prefix="bisect-trt-") as folder:
            chosen = session_options()
            # Only a profile shows which provider ran a node.
            chosen.enable_profiling = True
            chosen.profile_file_prefix = str(Path(folder) / "profile")
            if weights:
                chosen.add_session_config_entry(WEIGHTS_FOLDER, weights)
            try:
                session = self.session(content, chosen, options)
                # A failed run would be repeated on the CPU provider, and its outputs believed.
                session.disable_fallback()
            except RunnerUnavailableError:
                raise
            except Exception as error:
                raise _failure(error, Verdict.BUILD_FAILED) from error
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
