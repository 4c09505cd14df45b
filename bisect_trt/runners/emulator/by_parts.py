"""An emulated model of a hundred thousand nodes, run part by part: the session of one part is open
at a time, and all samples go through it before the next one's is opened.

A session takes 4 kB a node. (ONNX Runtime looks for each initialiser among all that a session has,
too: seven parts with 26,000 of them in all are opened in 8 s, one session in 17.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import helper

from bisect_trt.core.sample import Sample
from bisect_trt.graph.inspection.activations import inference_bytes
from bisect_trt.graph.model.graph import Graph
from bisect_trt.graph.model.opset import operators
from bisect_trt.graph.passes.packed_segment import PackedSegment
from bisect_trt.graph.passes.segmented import cut
from bisect_trt.graph.passes.switched import SwitchedModel
from bisect_trt.runners.ort.sessions import failure_of_session
from bisect_trt.runners.ort.side_by_side import ROOM_BYTES, side_by_side
from bisect_trt.runners.ort.values import Value, caller, owned, value_of, viewed

PART = 30_000
"""Nodes of a part, with the roundings: 120 MB of a session."""

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
    return [PackedSegment(part) for part in cut(SwitchedModel(model), graph, count)]


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
        opened: opens a session over the model that is made when it is asked for.
        at_once: how many samples of a kind are run side by side.

    Raises:
        RunnerFailedError: with ONNX Runtime's words.
        MachineError: there is not enough memory.
    """
    owners = [{name: owned(array) for name, array in s.arrays.items()} for s in samples]
    alive: list[Tensors | Exception] = [
        {name: value_of(owner) for name, owner in given.items()} for given in owners
    ]
    last = {name: place for place, part in enumerate(parts) for name in part.named.takes}
    last |= dict.fromkeys(outputs, len(parts))
    shapes: dict[str, Sequence[int]] = {}
    for place, part in enumerate(parts):
        session = opened(partial(_shaped, part, shapes))
        # As ONNX Runtime infers them from what the model says of its inputs; none for no rank.
        told = {value.name: value.shape for value in session.get_outputs()}
        shapes |= {n: s for n, s in told.items() if s and all(isinstance(d, int) for d in s)}
        step = partial(_run, session, part, place, last)
        pairs = zip(samples, alive, strict=True)
        alive = list(side_by_side(step, pairs, lambda pair: at_once(pair[0])))
        del session, step  # before the next is opened
    for left in alive:
        if isinstance(left, Exception):
            raise left
        yield {name: viewed(left[name]) for name in outputs}


def _shaped(part: PackedSegment, shapes: Mapping[str, Sequence[int]]) -> onnx.ModelProto:
    """The model of ``part``, which says what shapes of what it takes are known. A session that
    knows them plans where its tensors lie; else it asks for each anew, and of two runs side by side
    one waits for the other. What the file claims of its outputs may be wrong, and is left out.
    """
    model = part.unpacked().model
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")
    for value in model.graph.input:
        if value.name in shapes:
            kind = value.type.tensor_type.elem_type
            value.CopyFrom(helper.make_tensor_value_info(value.name, kind, shapes[value.name]))
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
        failure.__cause__ = error
        return failure
    behind = {**tensors, **{name: found[i] for i, name in enumerate(gives)}}
    return {name: value for name, value in behind.items() if last.get(name, -1) > place}
