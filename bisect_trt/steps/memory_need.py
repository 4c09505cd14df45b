"""What a run needs: memory, and the time of an inference."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bisect_trt.base.errors import BadInputError, MachineError
from bisect_trt.base.limits import in_words, room_bytes, thread_count
from bisect_trt.base.sample import Sample, evenly
from bisect_trt.inputs.files import find_files, is_loader
from bisect_trt.inputs.npz import bytes_inside, headers_of
from bisect_trt.model.graph import Graph
from bisect_trt.model.inputs import InputSpec
from bisect_trt.model.save import held_size, weights_size
from bisect_trt.model.shapes import inference_bytes, inference_work, live_bytes
from bisect_trt.settings import Settings

Shapes = Mapping[str, tuple[int, ...]]

_VALUE_S = 1e-9
_PRODUCT_S = 1e-11
_NODE_S = 6e-6
"""Seconds on two cores for each value made, product added up and node run; within a factor of 2."""

LARGE_INPUT_VALUES = 4 << 20

_COPIED_VALUE_S = 4e-8
"""Seconds for each value of an input beyond these: perturbed inputs copy and hash it."""

PROCESS = 200_000_000
"""Bytes that this program and its libraries take by themselves."""

_NODE_BYTES = 75_000
"""What a node takes in the sessions that hold it."""

_STORES_BYTES = 256 << 20
"""Copies of inputs that are kept; full after some tens of inferences."""

_ACTIVATIONS_HELD = 4
"""Inferences at a time: two emulators' beside a reference, and what compares them."""

_WEIGHTS_HELD = 3
_INSIDE_HELD = 2
"""Copies of weights: mapped, rounded and as kernels like them; two more of those in the model."""


def usual_seconds(graph: Graph, samples: Sequence[Sample]) -> float:
    """About what one emulated inference takes on two cores, the same on every machine."""
    # Inputs may differ in size; four stand for all.
    chosen = [sample.shapes for sample in evenly(samples, 4)]
    # Mostly all are of one size: a graph of thousands of nodes takes a while to count.
    counts = Counter(tuple(sorted(shapes.items())) for shapes in chosen)
    seconds = sum(count * _seconds_on(graph, dict(shapes)) for shapes, count in counts.items())
    return seconds / max(1, len(chosen))


def _seconds_on(graph: Graph, shapes: Shapes) -> float:
    work = inference_work(graph, shapes)
    beyond = sum(max(0, math.prod(shape) - LARGE_INPUT_VALUES) for shape in shapes.values())
    counted = _VALUE_S * work.values + _PRODUCT_S * work.products + _NODE_S * work.nodes
    return counted + _COPIED_VALUE_S * beyond


@dataclass(frozen=True)
class Need:
    """``weights`` and ``activations`` (of one inference) in bytes; ``workers`` beside this process.

    ``inside`` are the weights that the model holds itself. ``activations`` is 0 where the inputs'
    shapes are not known; ``untold`` says that most shapes follow from values.
    """

    weights: int
    activations: int
    workers: int
    nodes: int
    inside: int = 0
    untold: bool = False

    @property
    def bytes(self) -> int:
        """About the peak of all processes."""
        each = (
            PROCESS
            + _NODE_BYTES * self.nodes
            + _WEIGHTS_HELD * self.weights
            + _INSIDE_HELD * self.inside
            + _ACTIVATIONS_HELD * self.activations
            + min(_STORES_BYTES, 40 * self.activations)
        )
        return (1 + self.workers) * each

    @property
    def sentence(self) -> str:
        """The need for a person."""
        held = f"{in_words(self.activations)} of activations"
        if self.untold:
            held = f"activations of which shapes tell {in_words(self.activations)}, and more"
        weights = f"{in_words(self.weights)} of weights"
        return f"about {in_words(self.bytes)} of memory ({weights}, {held})"


def need_of(graph: Graph, settings: Settings, specs: Sequence[InputSpec]) -> Need:
    """What a run of ``graph`` needs; of the inputs only headers are read."""
    return _need(graph, settings, _told_shapes(settings, specs))


def need_of_samples(graph: Graph, settings: Settings, samples: Sequence[Sample]) -> Need:
    """As :func:`need_of`, of inputs that were read: not every file's header tells their shapes."""
    return _need(graph, settings, [sample.shapes for sample in samples])


def _need(graph: Graph, settings: Settings, shapes: Sequence[Shapes]) -> Need:
    largest = max(shapes, key=lambda each: sum(map(math.prod, each.values())), default=None)
    known = None if largest is None else inference_bytes(graph, largest)
    live = 0 if largest is None else live_bytes(graph, largest)
    workers = settings.workers if settings.workers > 1 and settings.ray is None else 0
    return Need(
        weights=weights_size(graph.proto),
        activations=live if known is None else known,
        workers=min(workers, thread_count()),  # no more are hired
        nodes=len(graph.proto.graph.node),
        inside=held_size(graph.proto),
        untold=largest is not None and known is None,
    )


def check_need(need: Need, where: str) -> None:
    """Refuse what does not fit.

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


def _told_shapes(settings: Settings, specs: Sequence[InputSpec]) -> list[Shapes]:
    """The shapes of inputs, the largest of each source, as far as headers tell them."""
    names = [spec.name for spec in specs]
    found: list[Shapes] = []
    for source in (*settings.inputs, *(s for s in settings.holdout if s != "none")):
        if isinstance(source, Mapping):
            found.append({str(n): tuple(a.shape) for n, a in source.items() if hasattr(a, "shape")})
        elif isinstance(source, (str, Path)) and not is_loader(source):
            found += _of_files(source, names, settings.stacked)
    return found


def _of_files(source: str | Path, names: Sequence[str], stacked: bool) -> list[Shapes]:
    """Of the array file with the most bytes inside that ``source`` names."""
    try:
        files = [p for p in find_files([source]) if p.suffix in (".npy", ".npz")]
        if not files:
            return []
        headers = headers_of(max(files, key=bytes_inside), names)
    except (BadInputError, OSError):  # whoever reads it says what is wrong
        return []
    return [{n: (1, *shape[1:]) if stacked else shape for n, shape in headers.items()}]
