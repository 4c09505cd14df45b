"""The ``tensorrt`` runner: a plan becomes typed ONNX, an engine, and the engine's outputs.

Everything of TensorRT happens in a child process (see ``isolation``); here are the models, the
profile and the read-back.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from bisect_trt.core.errors import BadInputError, RunnerFailedError
from bisect_trt.core.precision import Precision, PrecisionPlan
from bisect_trt.graph.layers import list_layers, with_unique_names
from bisect_trt.graph.load import loadable
from bisect_trt.graph.passes.marked import mark_outputs
from bisect_trt.graph.passes.typed import to_typed
from bisect_trt.runners.base import Sample
from bisect_trt.runners.tensorrt.readback import (
    dishonoured_after_parsing,
    dishonoured_in_engine,
    warnings_as_findings,
)
from bisect_trt.runners.tensorrt.records import (
    EngineAnswer,
    EngineRequest,
    Profile,
    Shape,
    WeakTyping,
)
from bisect_trt.runners.workers.process import IsolatedWorker
from bisect_trt.runners.workers.remote import Remote
from bisect_trt.stations.samples import input_specs

_MOST_SHAPE_VALUES = 64
WORKER = "bisect_trt.runners.tensorrt.worker:EngineWorker"


class TensorRTRunner:
    """Builds and runs ``model`` on ``samples`` with TensorRT ``module`` (None: whichever imports).

    ``profiles`` are the ``--profile`` texts; without one for an input, its smallest, first and
    largest sample make the profile. ``timeout_s`` bounds one build and run. ``weak`` asks for weak
    typing (TensorRT 8.6 to 10.x). ``hire`` makes what serves the engines from the worker's name and
    arguments: a child process, or a crew of them. Raises :class:`RunnerUnavailableError` if
    TensorRT, cuda-python or a GPU is missing.
    """

    name = "tensorrt"

    def __init__(
        self,
        model: onnx.ModelProto,
        samples: Sequence[Sample],
        module: str | None = None,
        *,
        profiles: Sequence[str] = (),
        caches: Path | None = None,
        timeout_s: float | None = None,
        weak: bool = False,
        hire: Callable[[str, Mapping[str, Any]], Remote] = IsolatedWorker,
    ) -> None:
        self._model = model
        self._layers = list_layers(model)
        self._producers = {tensor: layer.name for layer in self._layers for tensor in layer.outputs}
        self._outputs = [o.name for o in model.graph.output]
        self._profile = profile_of(model, samples, profiles)
        self._values = values_of(samples)
        self._timeout_s = timeout_s
        self._weak = weak
        self._facts: dict[PrecisionPlan, Mapping[str, Any]] = {}
        arguments = {
            "module": module,
            "samples": [dict(s.arrays) for s in samples],
            "caches": str(caches) if caches else None,
        }
        self._worker = hire(WORKER, arguments)
        try:
            described: dict[str, str] = self._worker.call("describe", timeout_s=timeout_s)
        except RunnerFailedError:
            self._worker.close()
            raise
        self.versions: Mapping[str, str] = {
            **described,
            "typing": "weak" if weak else "strong",
            "profile": str(sorted(self._profile.items())),
        }

    def outputs(self, plan: PrecisionPlan) -> Iterator[Mapping[str, NDArray[Any]]]:
        began = time.perf_counter()
        model = self._written(plan)
        written = time.perf_counter() - began
        answer = self._ask(model, plan, measure_latency=True)
        self._facts[plan] = self._summary(plan, answer, written)
        for outputs in answer.outputs:
            yield {name: outputs[name] for name in self._outputs}

    def facts(self, plan: PrecisionPlan) -> Mapping[str, Any]:
        return self._facts.get(plan, {})

    def marked(self, plan: PrecisionPlan, tensors: Sequence[str]) -> list[dict[str, NDArray[Any]]]:
        """The outputs and ``tensors`` of each sample, from an engine in which ``tensors`` are
        outputs too.

        Marks break fusions, so the numbers are not those of the unmarked engine.
        """
        answer = self._ask(mark_outputs(self._written(plan), tensors), plan, measure_latency=False)
        return [
            {name: _as_float32(array) for name, array in outputs.items()}
            for outputs in answer.outputs
        ]

    def debugged(
        self, plan: PrecisionPlan, tensors: Sequence[str]
    ) -> list[dict[str, NDArray[Any]]]:
        """The values of ``tensors`` of each sample from TensorRT's debug tensors; empty mappings
        where it never reports them.
        """
        answer = self._ask(self._written(plan), plan, measure_latency=False, debug=tensors)
        return [
            {name: _as_float32(array) for name, array in values.items()} for values in answer.debug
        ]

    def close(self) -> None:
        """End the child process."""
        self._worker.close()

    def _written(self, plan: PrecisionPlan) -> onnx.ModelProto:
        return with_unique_names(self._model) if self._weak else to_typed(self._model, plan)

    def _ask(
        self,
        model: onnx.ModelProto,
        plan: PrecisionPlan,
        *,
        measure_latency: bool,
        debug: Sequence[str] = (),
    ) -> EngineAnswer:
        weak = WeakTyping(plan.base.value, plan.pinned) if self._weak else None
        # A pin means FP32: the engine's TF32 switch stays off unless TF32 itself is asked for.
        tf32 = plan.base is Precision.TF32
        with loadable(model) as source:
            request = EngineRequest(
                source,
                self._profile,
                tf32,
                weak,
                tuple(debug),
                measure_latency,
                self._producers,
                self._values,
            )
            answer: EngineAnswer = self._worker.call("probe", request, timeout_s=self._timeout_s)
        return answer

    def _summary(self, plan: PrecisionPlan, answer: EngineAnswer, written: float) -> dict[str, Any]:
        findings = [
            *(
                dishonoured_after_parsing(self._layers, plan, answer.types)
                if not self._weak
                else ()
            ),
            *dishonoured_in_engine(plan, answer.layers),
            *warnings_as_findings(answer.messages, [layer.name for layer in self._layers]),
        ]
        return {
            "seconds": {"write": written, **answer.seconds},
            "engine_bytes": answer.engine_bytes,
            "latency_ms": answer.latency_ms,
            "engine_layers": len(answer.layers),
            "read_back": sum(layer.name in answer.types for layer in self._layers),
            "findings": [vars(f) for f in findings],
        }


def profile_of(model: onnx.ModelProto, samples: Sequence[Sample], texts: Sequence[str]) -> Profile:
    """(min, opt, max) shapes of every input: from ``texts``
    (``input:1x3x32x32/1x3x64x64/1x3x128x128``), else the samples.

    Raises :class:`BadInputError` for a text that cannot be read, an unknown input, or a sample
    outside its profile.
    """
    given = dict(_parsed_profile(text) for text in texts)
    names = [spec.name for spec in input_specs(model)]
    unknown = [name for name in given if name not in names]
    if unknown:
        raise BadInputError(
            f"--profile: the model has no input {unknown[0]!r}; it takes {', '.join(names)}"
        )
    profile = {}
    for name in names:
        shapes = [s.arrays[name].shape for s in samples]
        profile[name] = given.get(name) or (_each(min, shapes), shapes[0], _each(max, shapes))
        smallest, _, largest = profile[name]
        for sample, shape in zip(samples, shapes, strict=True):
            inside = len(shape) == len(smallest) and all(
                a <= b <= c for a, b, c in zip(smallest, shape, largest, strict=True)
            )
            if not inside:
                raise BadInputError(
                    f"{sample.name}: input {name!r} of shape {shape} is outside --profile "
                    f"{smallest} to {largest}"
                )
    return profile


def values_of(samples: Sequence[Sample]) -> Profile:
    """(min, opt, max) values of the small integer inputs over the samples: TensorRT asks for them
    where an input is a shape.
    """
    found: dict[str, tuple[Shape, Shape, Shape]] = {}
    for name, first in samples[0].arrays.items():
        arrays = [s.arrays[name].ravel() for s in samples]
        if (
            first.dtype.kind in "iu"
            and first.size <= _MOST_SHAPE_VALUES
            and len({a.size for a in arrays}) == 1
        ):
            stacked = np.stack(arrays)
            found[name] = tuple(
                tuple(int(v) for v in row)
                for row in (stacked.min(axis=0), stacked[0], stacked.max(axis=0))
            )  # type: ignore[assignment]
    return found


def _parsed_profile(text: str) -> tuple[str, tuple[Shape, Shape, Shape]]:
    name, _, shapes = text.rpartition(":")
    try:
        smallest, usual, largest = (
            tuple(int(d) for d in part.split("x")) for part in shapes.split("/")
        )
    except ValueError:
        raise BadInputError(
            f"--profile {text!r}: write INPUT:MIN/OPT/MAX, such as "
            "x:1x3x32x32/1x3x64x64/1x3x128x128"
        ) from None
    return name, (smallest, usual, largest)


def _each(choose: Any, shapes: Sequence[Shape]) -> Shape:
    return tuple(choose(sizes) for sizes in zip(*shapes, strict=True))


def _as_float32(array: NDArray[Any]) -> NDArray[Any]:
    """Reduced floats widened, everything else as it is."""
    return (
        array.astype(np.float32)
        if array.dtype.kind in "fV" and array.dtype.itemsize == 2
        else array
    )


def own_share(seconds: float, facts: Mapping[str, Any]) -> float:
    """The part of a probe's ``seconds`` that is not TensorRT's: typed model, transport,
    comparison.
    """
    theirs = sum(
        facts.get("seconds", {}).get(step, 0.0)
        for step in ("parse", "build", "load", "context", "run", "latency")
    )
    return (seconds - theirs) / seconds if seconds else math.nan
