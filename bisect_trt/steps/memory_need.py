"""What a run needs: memory and time of an inference."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bisect_trt.base.errors import BadInputError, MachineError
from bisect_trt.base.limits import (
    LARGE,
    MANY,
    SessionHabits,
    adopt,
    in_words,
    keep_large_blocks_apart,
    room_bytes,
    thread_count,
)
from bisect_trt.base.sample import Sample, evenly
from bisect_trt.inputs.arrays import bytes_inside, headers_of
from bisect_trt.inputs.files import find_files, is_loader
from bisect_trt.model.graph import Graph
from bisect_trt.model.inputs import InputSpec
from bisect_trt.model.phrases import shares_sessions
from bisect_trt.model.save import weights_size
from bisect_trt.model.shapes import (
    Activations,
    activations,
    bodies_from,
    inference_work,
    live_bytes,
)
from bisect_trt.runners.concurrency import MANY_NODES, ROOM_BYTES, fitting
from bisect_trt.runners.switched_session import room_beside
from bisect_trt.settings import Settings

_COUNTED = 4
"""Inputs may differ in size; so many of them stand for all."""

_A_VALUE, _A_PRODUCT, _A_NODE = 1e-9, 1e-11, 6e-6
"""Seconds on two cores: 26.7 ms of 33 for an OCR detector at 192 by 320, 4.5 of 3.5 for UniMatch,
0.47 of 0.47 for an encoder of 75 nodes. A power of two would do."""

LARGE_INPUT_VALUES = 4 << 20

_A_LARGE_INPUTS_VALUE = 4e-8
"""Seconds for each value of an input beyond these: a copy of it is made three times, hashed and
run, in memory that the system has to clear."""


def usual_seconds(graph: Graph, samples: Sequence[Sample]) -> float:
    """About what one emulated inference takes on two cores, the same on every machine."""
    chosen = [sample.shapes for sample in evenly(samples, _COUNTED)]
    # Mostly all are of one size: a graph of thousands of nodes takes a while to count.
    counts = Counter(tuple(sorted(shapes.items())) for shapes in chosen)
    seconds = sum(count * usual_seconds_on(graph, dict(shapes)) for shapes, count in counts.items())
    return seconds / max(1, len(chosen))


def usual_seconds_on(graph: Graph, shapes: Mapping[str, tuple[int, ...]]) -> float:
    """As :func:`usual_seconds`, on inputs of such shapes."""
    work = inference_work(graph, shapes)
    beyond = sum(max(0, math.prod(shape) - LARGE_INPUT_VALUES) for shape in shapes.values())
    counted = _A_VALUE * work.values + _A_PRODUCT * work.products + _A_NODE * work.nodes
    return counted + _A_LARGE_INPUTS_VALUE * beyond


PROCESS = 200_000_000
"""What this program and its libraries take by themselves."""

_NETWORKS = 3.75
"""How often an inference's activations are held: two histories with their roundings beside a
reference, and what compares them. 2.15 GB of them took 8.19 GB (benchmarks/results/scale.md)."""

_KEPT = 20
"""Inferences' worth of activations that fill the store at the cuts, and as many again of copies
with their references, if neither is full before."""

_COPIES = 128 << 20
"""Bytes of copies and references in memory, and of what the sessions of a few plans hold beside:
fitted to the peaks of benchmarks/results/scale.md."""

_NODE, _OF_MANY, _SHARED = 75_000, 40_000, 18_000
"""Bytes of a node in the sessions that hold it, where those take turns, and where they serve many
copies of a block or phrases of a kind: 4,000 nodes took 0.6 GB, 20,000 0.50 to 0.61, 60,000 1.0 to
1.3."""

_A_THREAD, _SESSIONS_OF = 20_000, 400
"""Bytes of each thread beyond two that one call may use, for each node up to so many: every session
has a pool of its own, with a queue a thread. Of 403 nodes' sessions 14 threads take 123 MB
(benchmarks/results/scale.md)."""

_LONG_S = 2e-4
"""Seconds of a usual node from which on it is worth waking threads for. By their count RT-DETR's
1.5 ms are; ViT-S' 0.25 ms make no difference; OCR models' 0.05 and 0.1 ms are not
(benchmarks/results/scale.md)."""

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Need:
    """``weights`` and ``activations`` (of one plain inference) in bytes; ``workers`` beside the
    process itself. ``activations`` is 0 where the inputs' shapes are not known beforehand.
    ``nodes`` is their number, ``shares`` whether they are many and share few sessions,
    ``small`` whether the usual tensor is known to be, and ``threads`` what a call may use (0: all);
    ``untold`` whether most shapes follow from values and not from the inputs' shapes.
    """

    weights: int
    activations: int
    workers: int
    nodes: int
    shares: bool = False
    small: bool = False
    threads: int = 0
    untold: bool = False

    @property
    def bytes(self) -> int:
        """About the peak of all processes. A worker shares the weights as they are with the others
        and holds no reference.
        """
        each = PROCESS + self._node * self.nodes + self._filled(room_beside(self.weights))
        own = self._copies * self.weights + _NETWORKS * self.activations + self._filled(_COPIES)
        worker = each + self.weights + (_NETWORKS - 1) * self.activations
        # The workers together make as many inferences at once as this process does.
        more = self._more_at_once * (2 if self.workers else 1)
        beyond = max(0, (self.threads or thread_count()) - 2)
        pools = _A_THREAD * min(self.nodes, _SESSIONS_OF) * beyond
        return int(each + own + more + pools + self.workers * worker)

    @property
    def _node(self) -> int:
        if self.shares:
            return _SHARED
        return _OF_MANY if self.nodes >= MANY_NODES else _NODE

    @property
    def _more_at_once(self) -> int:
        """What inferences side by side hold beyond two of them, which were measured above."""
        most = min(ROOM_BYTES, thread_count() * self.activations)
        return max(0, most - 2 * self.activations)

    @property
    def _copies(self) -> float:
        """How often weights are held: as they are, rounded, by a session that prepared them for its
        kernels. Large ones are in memory as they are or in a session, small ones in two sessions
        while the system's library keeps blocks that were freed.
        """
        if self.weights >= LARGE:
            return 2.0
        return 3.0 if self.weights >= MANY else 4.5

    def _filled(self, store: int) -> int:
        """What lies in a store of so many bytes; those are empty where activations are large."""
        return 0 if self.activations >= LARGE else min(store, _KEPT * self.activations)

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
    """As :func:`need_of`, of inputs that were read: not all files tell their shapes beforehand, and
    a loader tells nothing.
    """
    return _need(graph, settings, [sample.shapes for sample in samples])


def _need(graph: Graph, settings: Settings, shapes: Sequence[Shapes]) -> Need:
    """The need with the largest of ``shapes``; of none where they are not known."""
    largest = max(shapes, key=_elements, default=None)
    live = live_bytes(graph, largest) if largest is not None else 0
    asked = settings.workers if settings.workers > 1 and settings.ray is None else 0
    beside = min(asked, thread_count())  # no more are hired
    nodes = len(graph.proto.graph.node)
    on_cpu = settings.emulate_on != "cuda"
    shares = on_cpu and nodes >= MANY_NODES and shares_sessions(graph)
    told = activations(graph, largest) if largest is not None else None
    small = told is not None and told.small
    threads = 0
    if told is not None and largest is not None and on_cpu:
        threads = _threads(graph, largest, told)
    untold = largest is not None and told is None
    return Need(weights_size(graph.proto), live, beside, nodes, shares, small, threads, untold)


def _threads(graph: Graph, inputs: Shapes, told: Activations) -> int:
    """What a call may use: of calls made side by side each has its share. 0, for all, where one is
    made at a time, or nodes are long enough for more; what bodies do is not counted.
    """
    threads = thread_count()
    at_once = fitting(told.held, threads)
    if at_once == 1 or bodies_from(graph, inputs):
        return 0
    nodes = max(1, len(graph.proto.graph.node))
    return 0 if usual_seconds_on(graph, inputs) > _LONG_S * nodes else -(-threads // at_once)


def check_need(need: Need, where: str) -> None:
    """Refuse what does not fit, and let a large run, and no other of this process, save memory
    where it costs some time.

    Raises:
        MachineError: there is less free memory.
    """
    room = room_bytes(PROCESS)
    if room is not None and need.bytes > room:
        if need.workers:
            what = "use --workers 1"
        elif need.activations > need.weights:
            what = "give a smaller --input (a smaller batch or picture)"
        else:
            what = "use a machine with more memory (`inspect` and `export` need less)"
        raise MachineError(
            f"{where}: this needs {need.sentence}, and may take {in_words(room)}: {what}"
        )
    adopt(SessionHabits(need.activations >= LARGE, need.small, need.threads))
    if need.activations >= LARGE or need.weights >= MANY:
        keep_large_blocks_apart()


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


def _elements(shapes: Shapes) -> int:
    total = 0
    for shape in shapes.values():
        count = 1
        for size in shape:
            count *= size
        total += count
    return total
