"""A model's FP32 outputs and activations on ONNX Runtime's CPU provider."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from bisect_trt.base.errors import RunnerFailedError
from bisect_trt.base.limits import Limits
from bisect_trt.base.sample import Sample
from bisect_trt.metrics.decisions import gaps
from bisect_trt.metrics.requirements import ReferenceOutputs
from bisect_trt.model.graph import Graph
from bisect_trt.model.layers import with_outputs, with_unique_names
from bisect_trt.model.lookups import lookup_model
from bisect_trt.model.outputs import list_decisions
from bisect_trt.model.subgraph import Extractor
from bisect_trt.runners.concurrency import Headroom, is_large
from bisect_trt.runners.ort_session import reference_session, run_all, session_as_written


class Reference:
    """A model's FP32 outputs.

    ``is_large`` says that the weights are used where they lie, without a copy: they take
    ``large_bytes`` or more.

    Raises:
        BadInputError: ONNX Runtime cannot load the model.
    """

    def __init__(
        self,
        graph: Graph,
        where: str = "model",
        threads: int = 0,
        large_bytes: int = Limits.large_bytes,
    ) -> None:
        self._graph = graph
        self._where = where
        self._threads = threads
        self._decisions = list_decisions(graph.proto)
        self.is_large = is_large(graph, large_bytes)
        # Opened at once: a model that cannot be loaded is refused before anything is written.
        self._sessions: dict[Graph, ort.InferenceSession] = {graph: self._open(graph)}
        self._lock = Lock()
        self._headroom = Headroom(graph, threads, large_bytes=large_bytes)

    def is_of(self, graph: Graph) -> bool:
        """Whether these are the outputs of ``graph``: a repaired one has the original's."""
        return graph is self._graph

    def at_once(self, sample: Sample) -> int:
        """Returns how many inferences on samples like ``sample`` fit side by side."""
        return self._headroom.at_once(sample)

    def outputs(self, sample: Sample) -> Mapping[str, NDArray[Any]]:
        """Returns one sample's outputs by name, with the gaps of ArgMax decisions; thread-safe.

        Raises:
            RunnerFailedError: ONNX Runtime cannot compute them; names the sample.
        """
        graph = self._graph.taking(sample.arrays)
        with self._lock:
            session = self._sessions.get(graph)
            if session is None:
                session = self._sessions[graph] = self._open(graph)
        arrays = run_all(session, sample.arrays, sample.name)
        if not self._decisions:
            return arrays
        return ReferenceOutputs(
            {name: arrays[name] for name in self._graph.outputs},
            {
                name: gaps(arrays[d.tensor], d.axis, smallest=d.smallest).reshape(
                    arrays[name].shape
                )
                for name, d in self._decisions.items()
            },
        )

    def release(self) -> None:
        """Closes the sessions, and frees the memory of mapped weights."""
        with self._lock:  # waits for a session that another thread opens
            self._sessions.clear()
        if self.is_large:
            self._graph.constants.let_go()

    def _open(self, graph: Graph) -> ort.InferenceSession:
        proto = graph.proto
        names = [n.name for n in proto.graph.node if n.name]
        # ONNX Runtime refuses two nodes of one name, which other engines accept.
        if len(set(names)) < len(names):
            proto = with_unique_names(proto)
        return reference_session(
            with_outputs(proto, [d.tensor for d in self._decisions.values()]),
            self._where,
            quantised=graph.quantised,
            shares_weights=self.is_large,
            threads=self._threads,
        )


class Lookups:
    """Computes what ``graph`` looks up in tables; its session is opened at the first use."""

    def __init__(self, graph: Graph, threads: int = 0) -> None:
        self._graph, self._threads = graph, threads
        self._session: ort.InferenceSession | None = None

    def of(self, sample: Sample) -> dict[str, NDArray[Any]]:
        """Returns float32 arrays, named as the inputs of :attr:`Graph.after_lookups`.

        Raises:
            RunnerFailedError: ONNX Runtime cannot compute them; names the sample.
        """
        if not self._graph.lookups:
            return {}
        if self._session is None:
            model = lookup_model(self._graph.proto, self._graph.lookups)
            self._session = reference_session(model, threads=self._threads)
        return run_all(self._session, sample.arrays, sample.name)


class Recorded:
    """The FP32 values of a model's tensors on one sample, recorded into ``folder``."""

    def __init__(
        self, extractor: Extractor, sample: Sample, folder: Path, threads: int = 0
    ) -> None:
        self._extractor, self._threads = extractor, threads
        self._sample = sample
        self._folder = folder
        self._files: dict[str, Path] = {}

    def of(self, names: Iterable[str]) -> dict[str, NDArray[Any]]:
        """Returns the values of ``names``; inputs of the model may be among them.

        Raises:
            RunnerFailedError: ONNX Runtime cannot compute a tensor, or it is no array.
        """
        wanted = list(names)
        given = self._sample.arrays
        missing = [n for n in wanted if n not in given and n not in self._files]
        # A few at a time, to bound memory.
        for start in range(0, len(missing), 32):
            self._record(missing[start : start + 32])
        return {n: given[n] if n in given else np.load(self._files[n]) for n in wanted}

    def _record(self, names: Sequence[str]) -> None:
        # The model runs as written: a value does not depend on what else is recorded, and a
        # subgraph that gets recorded inputs gives the same values bit for bit.
        model = self._extractor.recorder(names)
        found = outputs_of(model, self._sample.arrays, self._sample.name, self._threads)
        for name, array in found.items():
            path = self._folder / f"{len(self._files)}.npy"
            np.save(path, array)
            self._files[name] = path


def outputs_of(
    model: onnx.ModelProto, arrays: Mapping[str, NDArray[Any]], where: str, threads: int = 0
) -> dict[str, NDArray[Any]]:
    """Returns the outputs of ``model``, executed as written, by name.

    Raises:
        RunnerFailedError: the model cannot run, or an output is a sequence or text.
    """
    # Old models list initialisers among the inputs: these are not fed.
    feed = {v.name: arrays[v.name] for v in model.graph.input if v.name in arrays}
    outputs = run_all(session_as_written(model, where, threads), feed, where)
    for name, array in outputs.items():
        if array.dtype.hasobject:
            raise RunnerFailedError(f"{where}: tensor {name!r} is no array of numbers")
    return outputs
