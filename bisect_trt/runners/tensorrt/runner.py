"""The runner that asks engines."""

from __future__ import annotations

import tempfile
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from bisect_trt.base.atomic_files import scratch
from bisect_trt.base.errors import RunnerFailedError, RunnerUnavailableError
from bisect_trt.base.limits import in_order
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.model.graph import Graph, as_graph
from bisect_trt.model.inputs import name_placeholder_dims
from bisect_trt.model.layers import with_unique_names
from bisect_trt.model.save import file_form
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
    Built,
    EngineAnswer,
    EngineOptions,
    EngineRequest,
    Prebuilt,
    WeakTyping,
    cache_file,
)
from bisect_trt.runners.tensorrt.worker import BUILD_WORKER

TIMES_NOTHING = "tensorrt_rtx"
"""The module whose builder times nothing."""

_AGAIN_S = 0.1


class EnginesAhead:
    """Builds what will be asked for soon, a few engines at a time."""

    def __init__(
        self,
        module: str,
        timeout_s: float | None,
        most: int,
        kernels: Callable[[EngineRequest], Path | None] = lambda _: None,
    ) -> None:
        self._timeout_s, self._kernels = timeout_s, kernels
        self._workers = [IsolatedWorker(BUILD_WORKER, {"module": module}) for _ in range(most)]
        self._free: SimpleQueue[IsolatedWorker] = SimpleQueue()
        for worker in self._workers:
            self._free.put(worker)
        self._pool = ThreadPoolExecutor(most)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._begun: dict[Hashable, deque[Future[EngineRequest]]] = {}
        self._all: list[Future[EngineRequest]] = []
        self._closed = False

    def begin(
        self,
        what: Hashable,
        asked: Callable[[], AbstractContextManager[EngineRequest]],
        copies: int = 1,
        *,
        spare: bool = False,
    ) -> None:
        """Build an engine as soon as a process is free."""
        if self._folder is None:  # not before there is a run's folder to make it in
            self._folder = scratch("engines")
        begun = self._begun.setdefault(what, deque())
        while len(begun) < copies:
            path = Path(self._folder.name) / f"{len(self._all)}.engine"
            begun.append(self._pool.submit(self._build, asked, path, spare or bool(begun)))
            self._all.append(begun[-1])

    def take(self, what: Hashable) -> EngineRequest | None:
        """The request for ``what``, with the engine; waits for it. None where none was begun, or
        it failed: whoever builds it then will say why. Each is given once.
        """
        begun = self._begun.get(what)
        if not begun:
            return None
        try:
            return begun.popleft().result()
        except (Exception, CancelledError):
            return None

    def give_up(self, but: Hashable) -> None:
        """Drop what was begun and not taken, ``but`` one; a build in work goes on to its end."""
        for what, futures in self._begun.items():
            if what == but:
                continue
            for future in futures:
                if not future.cancel():
                    future.add_done_callback(_removed)
            futures.clear()

    def close(self) -> None:
        """End the processes, and remove what nobody took."""
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        while not all(future.done() for future in self._all):
            for worker in self._workers:  # one may have been started after the last time
                worker.kill()
            wait(self._all, timeout=_AGAIN_S)
        self._pool.shutdown()
        for worker in self._workers:
            worker.close()
        if self._folder is not None:
            self._folder.cleanup()

    def _build(
        self, asked: Callable[[], AbstractContextManager[EngineRequest]], path: Path, spare: bool
    ) -> EngineRequest:
        """``spare`` if it will be asked for after another one, or not at all."""
        worker = self._free.get()
        try:
            if spare:
                worker.call("give_way", timeout_s=self._timeout_s)
            with asked() as request:
                if self._closed:
                    raise CancelledError
                built: Built = worker.call(
                    "build_into", request, str(path), timeout_s=self._timeout_s
                )
            request = replace(request, model=b"")
            kernels = self._compiled(worker, request, path)
            return replace(request, prebuilt=Prebuilt(str(path), built, kernels))
        finally:
            worker.close()  # with the memory of the GPU that it keeps
            self._free.put(worker)

    def _compiled(self, worker: IsolatedWorker, request: EngineRequest, path: Path) -> str:
        """The file of the engine's kernels; "" where they could not be compiled: whoever runs the
        engine does it then, or says why it cannot.
        """
        known = self._kernels(request)
        before, beside = str(known) if known else None, len(self._workers)
        arguments = str(path), request.options, before, beside
        if self._closed:
            raise CancelledError
        try:
            found: str = worker.call("compile", *arguments, timeout_s=self._timeout_s)
        except (RunnerFailedError, RunnerUnavailableError):
            return ""
        return found


def _removed(done: Future[EngineRequest]) -> None:
    """Remove the engine of a build that nobody waits for."""
    if done.exception() is None and (ahead := done.result().prebuilt) is not None:
        ahead.remove()


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
        builders: int = 0,
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
        self._ahead: EnginesAhead | None = None
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
        if builders and TIMES_NOTHING in described and not weak:
            version = described[TIMES_NOTHING]
            kernels = partial(cache_file, caches, TIMES_NOTHING, version, kind="kernels")
            self._ahead = EnginesAhead(TIMES_NOTHING, timeout_s, builders, kernels)

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

    def build_ahead(
        self,
        plan: PrecisionPlan,
        tensors: Sequence[str] = (),
        copies: int = 1,
        *,
        spare: bool = False,
    ) -> None:
        """As :meth:`Anticipating.build_ahead`; ``tensors`` as for :meth:`marked`."""
        if self._ahead is not None:
            asked = partial(self._request, plan, tuple(tensors), (), not tensors)
            self._ahead.begin((plan, tuple(tensors)), asked, copies, spare=spare)

    @property
    def builds_ahead(self) -> bool:
        """Whether :meth:`build_ahead` does anything."""
        return self._ahead is not None

    def give_up(self, but: PrecisionPlan) -> None:
        """Build no further what was begun and is not in use, ``but`` one plan's engines."""
        if self._ahead is not None:
            self._ahead.give_up((but, ()))

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
        """End the child processes."""
        self._worker.close()  # first: who waits for an engine built ahead would build it there
        if self._ahead is not None:
            self._ahead.close()

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
        last one again, or was built ahead.
        """
        what = (plan, tuple(tensors), tuple(debug))
        arrays = list(in_order(lambda s: dict(s.arrays), samples))  # drawn ones are made again
        limit, call = self.timeout_s, self._worker.call
        ask = partial(call, timeout_s=limit)
        last = self._last  # another thread may ask of another plan meanwhile
        if last is not None and last[0] == what:
            longer = None if limit is None else limit * (1 + len(arrays) // _RUNS_OF_ONE_LIMIT)
            again: EngineAnswer | None = call("again", last[1], arrays, repeats, timeout_s=longer)
            if again is not None:
                return again, 0.0
        ahead = None
        if self._ahead is not None and not debug:
            ahead = self._ahead.take(what[:2])
        answer: EngineAnswer
        if ahead is not None and ahead.prebuilt is not None:
            request, written = ahead, 0.0
            try:
                answer = ask("evaluate", ahead, arrays, repeats)
            finally:
                ahead.prebuilt.remove()
        else:
            began = time.perf_counter()
            with self._request(*what, measure_latency) as request:
                written = time.perf_counter() - began
                answer = ask("evaluate", request, arrays, repeats)
        self._last = what, replace(request, model=b"", prebuilt=None)
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
