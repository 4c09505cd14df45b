"""An emulated model of a hundred thousand nodes, run part by part: all samples go through the
session of one part before the next one's, and two are there at a time, or being opened.

A session takes 4 kB a node. ONNX Runtime opens one on one thread, so that two are opened in the
time of one and a bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import chain
from typing import Any

import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from bisect_trt.core.machine.cores import thread_count
from bisect_trt.core.machine.threads import on_pool
from bisect_trt.core.sample import Sample
from bisect_trt.graph.inspection.activations import inference_bytes
from bisect_trt.graph.model.graph import Graph
from bisect_trt.graph.model.opset import operators
from bisect_trt.graph.model.shapes import shapes_of, with_shapes
from bisect_trt.graph.passes.segments.packed_segment import PackedSegment
from bisect_trt.graph.passes.segments.segment import Segment
from bisect_trt.graph.passes.segments.segmented import cut
from bisect_trt.graph.passes.switched import SwitchedModel
from bisect_trt.runners.ort.sessions import failure_of_session
from bisect_trt.runners.ort.side_by_side import ROOM_BYTES, side_by_side
from bisect_trt.runners.ort.values import Value, caller, owned, value_of, viewed

PART = 15_000
"""Nodes of a part, with the roundings: 60 MB of a session."""

FROM = 100_000
"""Nodes of a model that is run so: of a smaller one the session stays open from call to call."""

_MOST, _FEWEST = 128, 16
"""Samples that go through a part together; where there is no room for a few, opening every part for
so few would take longer than it spares."""

Parts = Sequence[PackedSegment]
Tensors = Mapping[str, Value]


def is_parted(model: onnx.ModelProto, graph: Graph, sample: Sample) -> bool:
    """Whether ``model`` is run by parts. A Scan asks for shapes, which are not always known behind
    a cut.

    Args:
        model: emulated.
        graph: of which it was written.
        sample: like those that it will be run on.
    """
    nodes = model.graph.node
    if len(nodes) < FROM or "Scan" in operators(nodes):
        return False
    return _room(graph, sample) >= _FEWEST


def at_a_time(graph: Graph, sample: Sample) -> int:
    """How many samples like ``sample`` go through a part together."""
    return max(_FEWEST, min(_MOST, _room(graph, sample)))


def _room(graph: Graph, sample: Sample) -> int:
    """For how many samples there is room; none where nothing is told of the tensors."""
    each = inference_bytes(graph, sample.shapes)
    return 0 if each is None else ROOM_BYTES // max(1, each)


def in_parts(model: onnx.ModelProto, graph: Graph) -> Parts:
    """``model`` cut where few tensors cross, into parts that are run one after the other.

    Args:
        model: emulated; it may be let go.
        graph: of which it was written.
    """
    count = -(-len(model.graph.node) // PART)
    pieces = cut(SwitchedModel(model), graph, count)
    first = next(pieces)
    second = next(pieces, None)
    if second is None:
        return [PackedSegment(first)]
    shapes: dict[str, tuple[int, ...]] = {}
    return [PackedSegment(_shaped(part, shapes)) for part in chain([first, second], pieces)]


def _shaped(part: Segment, shapes: dict[str, tuple[int, ...]]) -> Segment:
    """``part``, which says what is known of the shapes of what it takes. A session that knows them
    plans where its tensors lie; else it asks for each anew, and of two runs side by side one waits
    for the other. What the file claims of its outputs may be wrong, and is left out.

    Args:
        part: changed.
        shapes: by tensor, of the parts before; those that this one gives are put in.
    """
    for output in part.model.graph.output:
        if output.type.HasField("tensor_type"):
            output.type.tensor_type.ClearField("shape")
    for value in part.model.graph.input:
        if value.name in shapes:
            shape = value.type.tensor_type.shape
            shape.ClearField("dim")
            for size in shapes[value.name]:
                shape.dim.add(dim_value=size)
    known = shapes_of(with_shapes(Graph(part.model)))
    for name in part.gives:
        found = known.get(name)
        if found and None not in found:  # none at all may be no rank, too
            shapes[name] = tuple(size or 0 for size in found)
    return part


def run_parts(
    parts: Parts,
    samples: Sequence[Sample],
    outputs: Sequence[str],
    opened: Callable[[Callable[[], onnx.ModelProto]], ort.InferenceSession],
    at_once: Callable[[Sample], int],
) -> Iterator[dict[str, NDArray[Any]]]:
    """The outputs by name for each of ``samples``; the first is there when all of them have gone
    through all parts. Where one fails, those before it are answered first.

    Args:
        parts: of one model, two or more, in order.
        samples: held by the caller.
        outputs: of the model.
        opened: opens a session over the model that is made when it is asked for; called from two
            threads.
        at_once: how many samples of a kind are run side by side.

    Raises:
        RunnerFailedError: with ONNX Runtime's words.
        MachineError: there is not enough memory.
    """
    owners = [{name: owned(array) for name, array in s.arrays.items()} for s in samples]
    alive: list[Tensors | Exception] = [
        {name: value_of(owner) for name, owner in given.items()} for given in owners
    ]
    given = {name for owner in owners for name in owner}
    last = {name: place for place, part in enumerate(parts) for name in part.named.takes}
    last |= dict.fromkeys(outputs, len(parts))
    with closing(_sessions(parts, opened)) as sessions:
        for place, part in enumerate(parts):
            session = next(sessions)
            if wrong := _misled(session, given, alive):
                del session
                session = opened(partial(_without_shapes, part, wrong))
            step = partial(_run, session, part, place, last)
            pairs = zip(samples, alive, strict=True)
            alive = list(side_by_side(step, pairs, lambda pair: at_once(pair[0])))
            del session, step  # before the next is begun
    for left in alive:
        if isinstance(left, Exception):
            raise left
        yield {name: viewed(left[name]) for name in outputs}


def _sessions(
    parts: Parts, opened: Callable[[Callable[[], onnx.ModelProto]], ort.InferenceSession]
) -> Generator[ort.InferenceSession, None, None]:
    """The session of each part; with two threads the next is opened while one is asked."""
    models = (partial(_model_of, part) for part in parts)
    if thread_count() == 1:
        yield from map(opened, models)
        return
    with ThreadPoolExecutor(2) as pool:
        # One is in the caller's hands until it asks for the next.
        yield from on_pool(pool, 1, opened, models, lambda _: 1)


def _model_of(part: PackedSegment) -> onnx.ModelProto:
    return part.unpacked().model


def _misled(
    session: ort.InferenceSession, given: Collection[str], alive: Sequence[Tensors | Exception]
) -> list[str]:
    """What ``session`` would not take because inference told it another shape: it believes what a
    body claims of its outputs, and is wrong about some poolings and STFT.

    Args:
        session: of a part.
        given: the inputs of the model, of which the model itself says what it takes.
        alive: what each sample gives it.
    """
    asked = [i for i in session.get_inputs() if i.shape and i.name not in given]
    there = [tensors for tensors in alive if not isinstance(tensors, Exception)]
    return [
        i.name
        for i in asked
        if all(isinstance(size, int) for size in i.shape)
        and any(list(tensors[i.name].shape()) != i.shape for tensors in there)
    ]


def _without_shapes(part: PackedSegment, names: Collection[str]) -> onnx.ModelProto:
    """The model of ``part``, which says no shapes of ``names``."""
    model = _model_of(part)
    for value in model.graph.input:
        if value.name in names:
            value.type.tensor_type.ClearField("shape")
    return model


def _run(
    session: ort.InferenceSession,
    part: PackedSegment,
    place: int,
    last: Mapping[str, int],
    asked: tuple[Sample, Tensors | Exception],
) -> Tensors | Exception:
    """What is alive behind ``part``, or why there is nothing."""
    sample, tensors = asked
    if isinstance(tensors, Exception):
        return tensors
    takes, gives = part.named.takes, part.named.gives
    try:
        found = caller(session)({name: tensors[name] for name in takes}, gives, None)
    except Exception as error:
        failure = failure_of_session(sample.name, error)
        failure.__cause__ = error.with_traceback(None)  # it would hold the session
        return failure
    behind = {**tensors, **{name: found[i] for i, name in enumerate(gives)}}
    return {name: value for name, value in behind.items() if last.get(name, -1) > place}
