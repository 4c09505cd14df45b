"""The runners that execute models with TensorRT, or only build them, in a child process."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from bisect_trt.base.errors import RunnerFailedError, RunnerUnavailableError
from bisect_trt.base.limits import thread_count
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.model.graph import Graph, as_graph
from bisect_trt.model.inputs import name_placeholder_dims
from bisect_trt.model.layers import with_unique_names
from bisect_trt.model.outputs import mark_outputs
from bisect_trt.model.save import file_form
from bisect_trt.model.typed import to_typed
from bisect_trt.model.weak_typing import WITHOUT_LAYER
from bisect_trt.runners.base import UNSUPPORTED, Repeated
from bisect_trt.runners.concurrency import side_by_side
from bisect_trt.runners.device import tf32_override
from bisect_trt.runners.process import IsolatedWorker, Remote
from bisect_trt.runners.tensorrt.execute import ENOUGH, REPEATS
from bisect_trt.runners.tensorrt.profile import profile_of, takes, values_of
from bisect_trt.runners.tensorrt.readback import facts_of, producers_of
from bisect_trt.runners.tensorrt.records import (
    AS_USUAL,
    EngineAnswer,
    EngineOptions,
    EngineRequest,
    WeakTyping,
)

ENGINE_WORKER = "bisect_trt.runners.tensorrt.worker:EngineWorker"
BUILD_WORKER = "bisect_trt.runners.tensorrt.worker:BuildWorker"

SAMPLES_PER_TIMEOUT = 32
"""Samples that may run within one time-out; more samples get more time."""


class TensorRTRunner:
    """Builds and executes a model with TensorRT.

    Raises:
        RunnerUnavailableError: TensorRT, cuda-python or a GPU is missing.
    """

    name = "tensorrt"

    def __init__(
        self,
        model: onnx.ModelProto | Graph,
        samples: Sequence[Sample],
        module: str | None = None,
        *,
        profiles: Sequence[str] = (),
        caches: Path | None = None,
        timeout_s: float | None = None,
        weak: bool = False,
        options: EngineOptions = AS_USUAL,
        repeats: int = REPEATS,
        hire: Callable[[str, Mapping[str, Any]], Remote] = IsolatedWorker,
        threads: int | None = None,
    ) -> None:
        self._threads = threads
        self._graph = as_graph(model)
        self._layers = self._graph.layers
        self._names = {layer.name for layer in self._layers}
        self._without_layer = frozenset(x.name for x in self._layers if x.op in WITHOUT_LAYER)
        self._profile = profile_of(self._graph.proto, samples, profiles)
        self._values = values_of(samples)
        self.timeout_s = timeout_s
        self._weak, self._typed = weak, () if weak else self._layers
        self._options = options
        self._repeats = repeats
        self._facts: dict[PrecisionPlan, Mapping[str, Any]] = {}
        self._last: Hashable = None
        arguments = {"module": module, "caches": str(caches) if caches else None}
        self._hire = partial(hire, ENGINE_WORKER, arguments)
        self._worker = self._hire()
        self.versions: Mapping[str, str] = {
            **_described(self._worker, weak, timeout_s=timeout_s),
            "typing": "weak" if weak else "strong",
            "profile": str(sorted(self._profile.items())),
            "runs": f"{repeats} to {max(repeats, ENOUGH)} in 2 contexts",
            **tf32_override(),
        }

    def takes(self, sample: Sample) -> bool:
        """Whether the engines take the shapes of ``sample``."""
        return takes(self._profile, sample)

    def outputs(
        self, plan: PrecisionPlan, samples: Sequence[Sample]
    ) -> Iterator[Mapping[str, NDArray[Any]]]:
        try:
            answer, written = self._evaluated(plan, samples, repeats=self._repeats)
        except RunnerFailedError as error:
            if plan.base.is_storage and error.node in self._names - plan.pinned:
                self._facts[plan] = {UNSUPPORTED: [error.node]}
            raise
        self._facts[plan] = facts_of(self._layers, self._typed, plan, answer, written)
        for counted in answer.answers:
            answers = [({n: arrays[n] for n in self._graph.outputs}, c) for arrays, c in counted]
            runs = sum(count for _, count in answers)
            yield Repeated(answers[0][0], runs, answers[1:])

    def start_afresh(self) -> None:
        """Ends the child process; the next engine is built and run in a new one."""
        self._worker.close()
        self._worker = self._hire()

    def facts(self, plan: PrecisionPlan) -> Mapping[str, Any]:
        return self._facts.get(plan, {})

    def marked(
        self, plan: PrecisionPlan, samples: Sequence[Sample], tensors: Sequence[str]
    ) -> list[dict[str, NDArray[Any]]]:
        """Returns each sample's outputs and ``tensors``, from an engine in which both are outputs.

        Marks break fusions, so the numbers are not those of the unmarked engine.
        """
        answer, _ = self._evaluated(plan, samples, tensors)
        return [
            {name: _as_float32(array) for name, array in counted[0][0].items()}
            for counted in answer.answers
        ]

    def close(self) -> None:
        """Ends the child process."""
        self._worker.close()

    def _evaluated(
        self,
        plan: PrecisionPlan,
        samples: Sequence[Sample],
        tensors: Sequence[str] = (),
        *,
        repeats: int = 1,
    ) -> tuple[EngineAnswer, float]:
        """The engine's answer, and the seconds to write its model; 0 if the engine was kept."""
        key, limit, call = (plan, tuple(tensors)), self.timeout_s, self._worker.call
        if limit is not None:
            limit *= 1 + len(samples) // SAMPLES_PER_TIMEOUT
        # In threads, because perturbed samples are computed here.
        threads = thread_count(self._threads)
        arrays = list(side_by_side(lambda s: dict(s.arrays), samples, lambda _: threads))
        if self._last == key:
            again: EngineAnswer | None = call("again", key, arrays, repeats, timeout_s=limit)
            if again is not None:
                return again, 0.0
        began = time.perf_counter()
        with self._request(plan, tensors) as request:
            written = time.perf_counter() - began
            answer: EngineAnswer = call("evaluate", request, arrays, repeats, timeout_s=limit)
        self._last = key
        return answer, written

    @contextmanager
    def _request(self, plan: PrecisionPlan, tensors: Sequence[str]) -> Iterator[EngineRequest]:
        """What to build; the model's file exists inside the block."""
        model = self._written(plan)
        weak = WeakTyping(plan.base.value, plan.pinned, self._without_layer)
        with file_form(mark_outputs(model, tensors) if tensors else model) as source:
            yield EngineRequest(
                source,
                self._profile,
                # Pinned means FP32: TF32 is off unless it is the base.
                tf32=plan.base is Precision.TF32,
                weak=weak if self._weak else None,
                measure_latency=not tensors,
                producers=producers_of(self._graph, model),
                values=self._values,
                options=self._options,
                key=(plan, tuple(tensors)),
            )

    def _written(self, plan: PrecisionPlan) -> onnx.ModelProto:
        if not self._weak:
            return to_typed(self._graph, plan)
        model = with_unique_names(self._graph.proto)
        name_placeholder_dims(model.graph)
        return model


class BuildOnlyRunner:
    """Builds a model in a child process, without outputs.

    Raises:
        RunnerUnavailableError: TensorRT is missing.
    """

    name = "tensorrt-build"

    def __init__(
        self,
        graph: Graph,
        samples: Sequence[Sample],
        module: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._graph = graph
        self._profile = profile_of(graph.proto, samples, ())
        self._values = values_of(samples)
        self._timeout_s = timeout_s
        self._worker = IsolatedWorker(BUILD_WORKER, {"module": module})
        self.versions: Mapping[str, str] = _described(self._worker, timeout_s=timeout_s)

    def outputs(
        self, plan: PrecisionPlan, samples: Sequence[Sample]
    ) -> Iterator[Mapping[str, NDArray[Any]]]:
        """Builds the engine; returns no outputs."""
        tf32 = plan.base is Precision.TF32
        with file_form(to_typed(self._graph, plan)) as source:
            request = EngineRequest(source, self._profile, tf32, values=self._values)
            self._worker.call("build", request, timeout_s=self._timeout_s)
        return iter(())

    def facts(self, plan: PrecisionPlan) -> Mapping[str, Any]:
        """Returns none."""
        return {}

    def close(self) -> None:
        """Ends the child process."""
        self._worker.close()


def _described(worker: Remote, *arguments: Any, timeout_s: float | None) -> dict[str, str]:
    """Returns the worker's versions; closes the worker if it fails."""
    try:
        described: dict[str, str] = worker.call("describe", *arguments, timeout_s=timeout_s)
    except (RunnerFailedError, RunnerUnavailableError):
        worker.close()
        raise
    return described


def _as_float32(array: NDArray[Any]) -> NDArray[Any]:
    """Widens FP16 and BF16; other types stay."""
    reduced = array.dtype.kind in "fV" and array.dtype.itemsize == 2
    return array.astype(np.float32) if reduced else array
