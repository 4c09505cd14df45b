"""The memory that a run needs, and the usual time of an inference."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bisect_trt.base.errors import MachineError
from bisect_trt.base.limits import in_words, room_bytes, thread_count
from bisect_trt.base.sample import Sample, evenly
from bisect_trt.model.graph import Graph
from bisect_trt.model.save import held_size, weights_size
from bisect_trt.model.shapes import inference_bytes, inference_work, live_bytes
from bisect_trt.settings import Settings

Shapes = Mapping[str, tuple[int, ...]]

PROCESS = 200_000_000
"""Bytes that this program and its libraries take by themselves."""


def usual_seconds(graph: Graph, samples: Sequence[Sample]) -> float:
    """The approximate time of one emulated inference on two cores, the same on every machine."""
    # Inputs may differ in size; four stand for all.
    chosen = [sample.shapes for sample in evenly(samples, 4)]
    # Mostly all are of one size: a graph of thousands of nodes takes a while to count.
    counts = Counter(tuple(sorted(shapes.items())) for shapes in chosen)
    seconds = sum(count * _seconds_on(graph, dict(shapes)) for shapes, count in counts.items())
    return seconds / max(1, len(chosen))


def _seconds_on(graph: Graph, shapes: Shapes) -> float:
    work = inference_work(graph, shapes)
    # Seconds for each value made, product added up and node run; within a factor of two.
    return 1e-9 * work.values + 1e-11 * work.products + 6e-6 * work.nodes


@dataclass(frozen=True)
class Need:
    """The memory that a run needs, in bytes.

    ``activations``: those of one inference, 0 where the inputs' shapes are not known.
    ``workers``: the processes beside this one.
    ``inside``: the weights that the model file itself holds.
    ``partial``: most shapes follow from values, so that ``activations`` counts the others only.
    """

    weights: int
    activations: int
    workers: int
    nodes: int
    inside: int = 0
    partial: bool = False

    @property
    def bytes(self) -> int:
        """The approximate peak of all processes."""
        # Weights: mapped, rounded, and as kernels like them. Activations: those of two emulators, a
        # reference and what compares them. Stores: copies of inputs, full
        # after some tens of inferences.
        each = (
            PROCESS
            + 75_000 * self.nodes
            + 3 * self.weights
            + 2 * self.inside
            + 4 * self.activations
            + min(256 << 20, 40 * self.activations)
        )
        return (1 + self.workers) * each

    @property
    def sentence(self) -> str:
        """The need for a person."""
        activations = f"{in_words(self.activations)} of activations"
        if self.partial:
            activations = f"activations of which shapes tell {in_words(self.activations)}, and more"
        weights = f"{in_words(self.weights)} of weights"
        if not self.activations:  # no input is read yet
            return f"about {in_words(self.bytes)} of memory ({weights}, before any input)"
        return f"about {in_words(self.bytes)} of memory ({weights}, {activations})"


def need_of(graph: Graph, settings: Settings, samples: Sequence[Sample] = ()) -> Need:
    """What a run of ``graph`` needs; without ``samples`` what the weights alone need."""
    shapes = (sample.shapes for sample in samples)
    largest = max(shapes, key=lambda each: sum(map(math.prod, each.values())), default=None)
    activations = None if largest is None else inference_bytes(graph, largest)
    partial = largest is not None and activations is None
    if activations is None:
        activations = 0 if largest is None else live_bytes(graph, largest)
    workers = settings.workers if settings.workers > 1 and settings.ray is None else 0
    return Need(
        weights=weights_size(graph.proto),
        activations=activations,
        workers=min(workers, thread_count(settings.threads)),  # no more are started
        nodes=len(graph.proto.graph.node),
        inside=held_size(graph.proto),
        partial=partial,
    )


def check_need(need: Need, where: str) -> None:
    """Refuse a run that does not fit.

    Raises:
        MachineError: there is less free memory.
    """
    room = room_bytes(PROCESS)
    if room is None or need.bytes <= room:
        return
    if need.workers:
        what = "use --workers 1"
    elif need.activations > need.weights:
        what = "give a smaller --input (a smaller batch or picture)"
    else:
        what = "use a machine with more memory (`inspect` and `export` need less)"
    raise MachineError(
        f"{where}: this needs {need.sentence}, and may take {in_words(room)}: {what}"
    )
