"""What a run works on, loaded and checked before anything is written: model, samples, layers,
requirements, references.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from hashlib import sha256
from typing import Any

import onnxruntime as ort
from numpy.typing import NDArray

from bisect_trt.core.errors import BadInputError
from bisect_trt.core.observer import Observer
from bisect_trt.graph.layers import list_layers, with_unique_names
from bisect_trt.graph.load import LoadedModel, load_model, loadable
from bisect_trt.numerics.requirements import TaskMetric, load_metric, parse_requirements
from bisect_trt.probe.journal import content_key
from bisect_trt.runners.ort_sessions import reference_session, run_all
from bisect_trt.stations.checked_rewrite import rewritten
from bisect_trt.stations.samples import input_specs, load_samples
from bisect_trt.stations.settings import Settings, load_golden, source_of
from bisect_trt.version import __version__


class Material:
    """Loads and refuses. Raises :class:`BadInputError` naming the file, tensor or option."""

    def __init__(self, settings: Settings, observer: Observer) -> None:
        self._observer = observer
        observer.station("load")
        self.model: LoadedModel = load_model(settings.model)
        self.samples = load_samples(settings.inputs, input_specs(self.model.proto))
        self.rewritten: dict[str, tuple[str, ...]] = {}
        if settings.rewrite is not None:
            fused = rewritten(self.model.proto, self.samples, settings.rewrite)
            self.rewritten = fused.replaced
            self.model = replace(
                self.model, proto=fused.model, digest=f"{self.model.digest}+{settings.rewrite}"
            )
        self._session = self._open_reference()
        self.layers = [
            x for x in list_layers(self.model.proto) if settings.precision in x.precisions
        ]
        self.names = [x.name for x in self.layers]
        if not self.layers:
            raise BadInputError(
                f"{self.model.name}: no layer can run in {settings.precision.value}: there is "
                "nothing to search "
                "(integer, quantised or already reduced models have no FP32 layers)"
            )
        self.task_metrics: dict[str, TaskMetric] = dict(load_metric(m) for m in settings.metrics)
        outputs = [o.name for o in self.model.proto.graph.output]
        for output in self.model.proto.graph.output:
            if not output.type.HasField("tensor_type"):
                raise BadInputError(
                    f"{self.model.name}: output {output.name!r} is no tensor; sequences cannot be "
                    "compared"
                )
        self.requirements = parse_requirements(settings.require, outputs, self.task_metrics)
        self.golden = load_golden(settings.golden, outputs)
        if self.golden is not None and len(self.samples) > 1:
            raise BadInputError(
                f"--golden belongs to one input, and {len(self.samples)} were given; pass one "
                "--input"
            )

    @cached_property
    def references(self) -> list[dict[str, NDArray[Any]]]:
        """The reference outputs of each sample, computed when first needed; the session is then let
        go.
        """
        self._observer.station("reference")
        results = [run_all(self._session, s.arrays, s.name) for s in self.samples]
        del self._session
        return results

    @cached_property
    def key(self) -> str:
        """The content that every answer of the journal depends on."""
        return content_key(
            __version__,
            self.model.digest,
            [
                (n, a.dtype.str, a.shape, sha256(a.tobytes()).hexdigest())
                for s in self.samples
                for n, a in s.arrays.items()
            ],
            self.requirements.texts,
            [source_of(m) for m in self.task_metrics.values()],
        )

    def open_again(self) -> Callable[[Mapping[str, NDArray[Any]]], dict[str, NDArray[Any]]]:
        """The reference for further inputs; it raises :class:`RunnerFailedError` where they cannot
        be computed.
        """
        session = self._open_reference()
        return lambda arrays: run_all(session, arrays, self.model.name)

    def check_golden(self, golden: Mapping[str, NDArray[Any]]) -> None:
        """Raise :class:`BadInputError` for golden outputs of another shape than the model's."""
        for name, array in golden.items():
            shape = self.references[0][name].shape
            if array.shape != shape:
                raise BadInputError(
                    f"--golden: output {name!r} has shape {array.shape}, the model gives {shape}"
                )

    def _open_reference(self) -> ort.InferenceSession:
        nodes = self.model.proto.graph.node
        named = [n.name for n in nodes if n.name]
        unique = len(set(named)) == len(named)
        if unique and self.model.path is not None and not self.rewritten:
            return reference_session(str(self.model.path))
        # ONNX Runtime refuses two nodes of one name, which other engines accept.
        with loadable(
            self.model.proto if unique else with_unique_names(self.model.proto)
        ) as source:
            return reference_session(source)
