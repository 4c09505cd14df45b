"""The runner that asks engines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from bisect_trt.base.errors import RunnerFailedError, RunnerUnavailableError
from bisect_trt.base.limits import in_order
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.model.graph import Graph, as_graph
from bisect_trt.model.layers import with_unique_names
from bisect_trt.model.save import file_form
from bisect_trt.model.tensor_values import name_placeholder_dims
from bisect_trt.model.typed import mark_outputs, to_typed
from bisect_trt.model.weak_typing import WITHOUT_LAYER
from bisect_trt.runners.base import UNSUPPORTED, Repeated
from bisect_trt.runners.device import tf32_override
from bisect_trt.runners.process import IsolatedWorker, Remote
from bisect_trt.runners.tensorrt.profile import profile_of, values_of
from bisect_trt.runners.tensorrt.readback import facts_of
from bisect_trt.runners.tensorrt.records import (
    AS_USUAL,
    ENOUGH,
    REPEATS,
    EngineAnswer,
    EngineOptions,
    EngineRequest,
    WeakTyping,
)

ENGINE_WORKER = "bisect_trt.runners.tensorrt.worker:EngineWorker"

_RUNS_OF_ONE_LIMIT = 32
"""Samples beyond which the runs of what is built may take another time-out: many are no hang."""


class TensorRTRunner:
    """Builds and runs a model with TensorRT.

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
    ) -> None:
        self._graph = as_graph(model)
        self._layers = self._graph.layers
        self._names = {layer.name for layer in self._layers}
        self._moved = frozenset(x.name for x in self._layers if x.op in WITHOUT_LAYER)
        self._producers = {tensor: layer.name for layer in self._layers for tensor in layer.outputs}
        self._profile = profile_of(self._graph.proto, samples, profiles)
        self._values = values_of(samples)
        self.timeout_s = timeout_s
        self._weak, self._typed = weak, () if weak else self._layers
        self._options = options
        self._repeats = repeats
        self._facts: dict[PrecisionPlan, Mapping[str, Any]] = {}
        self._last: tuple[object, EngineRequest] | None = None
        arguments = {
            "module": module,
            "caches": str(caches) if caches else None,
        }
        self._hire = partial(hire, ENGINE_WORKER, arguments)
        self._worker = self._hire()
        try:
            described: dict[str, str] = self._worker.call("describe", weak, timeout_s=timeout_s)
        except (RunnerFailedError, RunnerUnavailableError):
            self._worker.close()
            raise
        self.versions: Mapping[str, str] = {
            **described,
            "typing": "weak" if weak else "strong",
            "profile": str(sorted(self._profile.items())),
            "runs": f"{repeats} to {max(repeats, ENOUGH)} in 2 contexts",
            **tf32_override(),
        }

    def outputs(
        self, plan: PrecisionPlan, samples: Sequence[Sample]
    ) -> Iterator[Mapping[str, NDArray[Any]]]:
        try:
            first = samples[:1] if len(samples) > _RUNS_OF_ONE_LIMIT else samples
            answer, written = self._ask(plan, first, measure_latency=True, repeats=self._repeats)
            if len(first) < len(samples):
                answer, _ = self._ask(plan, samples, measure_latency=True, repeats=self._repeats)
        except RunnerFailedError as error:
            if plan.base.is_storage and error.node in self._names - plan.pinned:
                self._facts[plan] = {UNSUPPORTED: [error.node]}
            raise
        self._facts[plan] = facts_of(self._layers, self._typed, plan, answer, written)
        for counted in answer.answers:
            named = [({n: found[n] for n in self._graph.outputs}, c) for found, c in counted]
            runs = sum(count for _, count in named)
            yield Repeated(named[0][0], runs, named[1:])

    def start_afresh(self) -> None:
        """End the child process and start another: the next engine is built and run there."""
        self._worker.close()
        self._worker = self._hire()

    def facts(self, plan: PrecisionPlan) -> Mapping[str, Any]:
        return self._facts.get(plan, {})

    def marked(
        self, plan: PrecisionPlan, samples: Sequence[Sample], tensors: Sequence[str]
    ) -> list[dict[str, NDArray[Any]]]:
        """The outputs and ``tensors`` of each sample, from an engine in which ``tensors`` are
        outputs too. Marks break fusions, so the numbers are not those of the unmarked engine.
        """
        answer, _ = self._ask(plan, samples, tensors, measure_latency=False)
        return [
            {name: _as_float32(array) for name, array in counted[0][0].items()}
            for counted in answer.answers
        ]

    def debugged(
        self, plan: PrecisionPlan, samples: Sequence[Sample], tensors: Sequence[str]
    ) -> list[dict[str, NDArray[Any]]]:
        """The values of ``tensors`` of each sample from TensorRT's debug tensors; empty mappings
        where it never reports them. Arguments as :meth:`marked`.
        """
        answer, _ = self._ask(plan, samples, measure_latency=False, debug=tensors)
        return [
            {name: _as_float32(array) for name, array in values.items()} for values in answer.debug
        ]

    def close(self) -> None:
        """End the child process."""
        self._worker.close()

    def _written(self, plan: PrecisionPlan) -> onnx.ModelProto:
        if not self._weak:
            return to_typed(self._graph, plan)
        model = with_unique_names(self._graph.proto)
        name_placeholder_dims(model.graph)
        return model

    def _ask(
        self,
        plan: PrecisionPlan,
        samples: Sequence[Sample],
        tensors: Sequence[str] = (),
        *,
        measure_latency: bool,
        debug: Sequence[str] = (),
        repeats: int = 1,
    ) -> tuple[EngineAnswer, float]:
        """The engine's answer, and the seconds that writing its model took: none where it is the
        last one again.
        """
        what = (plan, tuple(tensors), tuple(debug))
        arrays = list(in_order(lambda s: dict(s.arrays), samples))  # drawn ones are made again
        limit, call = self.timeout_s, self._worker.call
        last = self._last  # another thread may ask of another plan meanwhile
        if last is not None and last[0] == what:
            longer = None if limit is None else limit * (1 + len(arrays) // _RUNS_OF_ONE_LIMIT)
            again: EngineAnswer | None = call("again", last[1], arrays, repeats, timeout_s=longer)
            if again is not None:
                return again, 0.0
        began = time.perf_counter()
        with self._request(*what, measure_latency) as request:
            written = time.perf_counter() - began
            answer: EngineAnswer = call("evaluate", request, arrays, repeats, timeout_s=limit)
        self._last = what, replace(request, model=b"")
        return answer, written

    @contextmanager
    def _request(
        self,
        plan: PrecisionPlan,
        tensors: Sequence[str],
        debug: Sequence[str],
        measure_latency: bool,
    ) -> Iterator[EngineRequest]:
        """What to build, with the model's file as long as the block lasts."""
        weak = WeakTyping(plan.base.value, plan.pinned, self._moved) if self._weak else None
        model = self._written(plan)
        # A pin means FP32: the engine's TF32 switch stays off unless TF32 itself is asked for.
        tf32 = plan.base is Precision.TF32
        with file_form(mark_outputs(model, tensors) if tensors else model) as form:
            yield EngineRequest(
                form.source,
                self._profile,
                tf32,
                weak,
                tuple(debug),
                measure_latency,
                self._producers,
                self._values,
                self._options,
                form.key,
            )


def _as_float32(array: NDArray[Any]) -> NDArray[Any]:
    """Reduced floats widened, everything else as it is."""
    return (
        array.astype(np.float32)
        if array.dtype.kind in "fV" and array.dtype.itemsize == 2
        else array
    )
