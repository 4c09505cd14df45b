"""The ``emulated-whole`` runner: ``to_emulated``'s model in one optimised ONNX Runtime session.

It makes a session for each plan, so it is no runner to search with. It is the second opinion on an
answer: it fuses and orders FP32 operations differently from the node-by-node emulator, and a plan
whose verdict turns on that is too close.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import chain, groupby, islice
from typing import Any

import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from bisect_trt.base.limits import give_back, on_pool, thread_count
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.model.emulated import to_emulated
from bisect_trt.model.graph import Graph, as_graph, operators
from bisect_trt.model.roundings import with_roundings
from bisect_trt.model.segments import PackedSegment, cut
from bisect_trt.model.shapes import inference_bytes, shapes_of, with_shapes
from bisect_trt.model.switched import Segment, SwitchedModel
from bisect_trt.runners.concurrency import (
    ROOM_BYTES,
    Headroom,
    Sessions,
    Turns,
    side_by_side,
    until_failed,
)
from bisect_trt.runners.ort_session import (
    RoundedConstants,
    failure_of_session,
    reference_session,
    run_all,
)
from bisect_trt.runners.values import Value, caller, owned, value_of, viewed

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
    """``model`` cut where few tensors cross, into parts that are run one after the other."""
    count = -(-len(model.graph.node) // PART)
    subgraphs = cut(SwitchedModel(model), graph, count)
    first = next(subgraphs)
    second = next(subgraphs, None)
    if second is None:
        return [PackedSegment(first)]
    shapes: dict[str, tuple[int, ...]] = {}
    return [PackedSegment(_shaped(part, shapes)) for part in chain([first, second], subgraphs)]


def _shaped(part: Segment, shapes: dict[str, tuple[int, ...]]) -> Segment:
    """``part``, which says what is known of the shapes of what it takes. A session that knows them
    plans where its tensors lie; else it asks for each anew, and of two runs side by side one waits
    for the other. What the file claims of its outputs may be wrong, and is left out.
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
            step = partial(_run_part, session, part, place, last)
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


def _run_part(
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


_SWALLOW_CASTS = (
    "LayerNormFusion",  # of older ONNX Runtimes
    "LayerNormFusionL1",
    "LayerNormFusionL2",
    "SimplifiedLayerNormFusion",
)
"""Fusions that take the casts around a normalisation into it: their node has no kernel for BF16 on
a CPU, and may read two types (a written-out LayerNorm that is pinned as a whole)."""


class WholeModelRunner:
    """Executes a model in a fresh session for each plan; the last plan's is kept until another's
    turn comes (see ``turns``), and if the weights are large no longer than a call. With a hundred
    thousand nodes it is run by parts (see ``by_parts``).
    """

    name = "emulated-whole"

    def __init__(
        self,
        model: onnx.ModelProto | Graph,
        constants: RoundedConstants | None = None,
        turns: Turns | None = None,
    ) -> None:
        self.versions: Mapping[str, str] = {
            "onnxruntime": ort.__version__,
            "onnx": onnx.__version__,
        }
        self._graph = as_graph(model)
        self._constants = constants
        self._turns = turns or Turns(self._graph)
        self._turns.introduce(self, Sessions.SECOND)
        self._kept: tuple[PrecisionPlan, Graph, ort.InferenceSession] | None = None
        self._cut: tuple[PrecisionPlan, Graph, Parts] | None = None
        self._room = Headroom(self._graph)

    def outputs(
        self, plan: PrecisionPlan, samples: Sequence[Sample]
    ) -> Iterator[Mapping[str, NDArray[Any]]]:
        try:
            # Before a session of the other form is opened, nothing runs in this one.
            for graph, few in groupby(samples, lambda s: self._graph.taking(s.arrays)):
                yield from self._outputs(plan, graph, few)
        finally:
            if self._turns.is_large:
                self.release()
            self._turns.trim()  # of 20,000 nodes each call leaves 10 MB in pieces

    def release(self) -> None:
        """Let the session, or the parts, and their memory go."""
        if self._kept is not None or self._cut is not None:
            self._kept = self._cut = None
            give_back()

    def _outputs(
        self, plan: PrecisionPlan, graph: Graph, samples: Iterator[Sample]
    ) -> Iterator[Mapping[str, NDArray[Any]]]:
        """Of samples that are run in one form of the model, ``graph``."""
        is_new = not self._has_session(plan, graph)
        first = next(samples)
        its = chain([first], samples)
        parts = self._make_ready(plan, graph, first)
        if parts is not None:
            opened = partial(self._opened, plan, graph)
            failed: list[Exception] = []
            stream = until_failed(its, failed)
            for sample in stream:
                several = [sample, *islice(stream, at_a_time(graph, sample) - 1)]
                yield from run_parts(parts, several, graph.outputs, opened, self._room.at_once)
            if failed:
                raise failed[0]
            return
        ready = ((self._session_of(plan, graph), sample) for sample in its)
        for asked in islice(ready, int(is_new)):  # a plan that fails, fails on the first
            yield _run(asked)
        yield from side_by_side(_run, ready, lambda s: self._room.at_once(s[1]))

    def _has_session(self, plan: PrecisionPlan, graph: Graph) -> bool:
        kept = self._kept  # whoever takes the turn may let it go at any time
        return kept is not None and kept[:2] == (plan, graph)

    def _make_ready(self, plan: PrecisionPlan, graph: Graph, sample: Sample) -> Parts | None:
        """The parts by which the model is run; None where it has a session, which then is open."""
        known = self._cut
        if known is not None and known[:2] == (plan, graph):
            return known[2]
        if self._has_session(plan, graph):
            return None
        self._make_room()
        made = [to_emulated(graph, plan)]
        if is_parted(made[0], graph, sample):
            parts = in_parts(made.pop(), with_roundings(graph, plan.base))
            if len(parts) > 1:
                self._cut = (plan, graph, parts)
                self._turns.trim()
                return parts
            made = [parts[0].unpacked().model]
            del parts
        self._kept = (plan, graph, self._opened(plan, graph, made.pop))
        return None

    def _session_of(self, plan: PrecisionPlan, graph: Graph) -> ort.InferenceSession:
        kept = self._kept  # whoever takes the turn may let it go at any time
        if kept is None or kept[:2] != (plan, graph):
            self._make_room()
            session = self._opened(plan, graph, lambda: to_emulated(graph, plan))
            kept = self._kept = (plan, graph, session)
        return kept[2]

    def _make_room(self) -> None:
        """Before a plan is emulated: two sessions of one model would be in memory for a moment."""
        self.release()
        self._turns.take(self)
        self._turns.make_room(Sessions.SECOND)

    def _opened(
        self, plan: PrecisionPlan, graph: Graph, made: Callable[[], onnx.ModelProto]
    ) -> ort.InferenceSession:
        """A session over what ``made`` makes, ``graph`` under ``plan`` or a part of it."""
        self._turns.take(self)
        session = reference_session(
            made,
            quantised=graph.quantised,
            constants=self._constants,
            without=_SWALLOW_CASTS,
        )
        self._turns.trim()
        return session

    def facts(self, plan: PrecisionPlan) -> Mapping[str, Any]:
        return {}


def _run(asked: tuple[ort.InferenceSession, Sample]) -> Mapping[str, NDArray[Any]]:
    session, sample = asked
    return run_all(session, sample.arrays, sample.name)
