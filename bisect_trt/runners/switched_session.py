"""The evaluation's fast way: sessions for all plans of a base precision, the roundings switched by
what is fed.

The model is cut into segments (see :mod:`bisect_trt.model.segments`), and what is alive at the cuts
is kept for a while: an evaluation starts at the segment in which its plan first differs from one
that was run on the same sample. A plan that is run on many samples gets a session of its own (see
``plan_session``). The numbers are those of a run from the start, bit for bit.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.base.errors import RunnerFailedError
from bisect_trt.base.limits import give_back, in_order
from bisect_trt.base.plan import Precision
from bisect_trt.base.sample import Sample
from bisect_trt.model.graph import Graph
from bisect_trt.model.inputs import fixed_shape, input_specs
from bisect_trt.model.segments import MOST_SEGMENTS, PackedSegment, cut
from bisect_trt.model.shapes import inference_bytes
from bisect_trt.model.switched import to_switched
from bisect_trt.runners.concurrency import Headroom, Sessions, Turns, side_by_side
from bisect_trt.runners.constants import ConstantStore, DeviceConstants
from bisect_trt.runners.device import CPU, Device
from bisect_trt.runners.phrased import sessions_of
from bisect_trt.runners.plan_session import PlanSession
from bisect_trt.runners.segment_session import SegmentSession, Setting, Switches
from bisect_trt.runners.values import Value, bytes_of, owned, value_of, viewed

_LEAST, MOST_BYTES = 8 << 20, 16 << 20
"""Of an OCR detector 8 MB are a sample at a quarter of its dozen cuts, of which the last are where
late pins begin: two, four and twelve times as much saved no time, on one page or eight, nor with
``--robust 0``. Of larger models a cut alone may take as much."""

KeptTensors = Mapping[str, Value]


def room_beside(weights: int) -> int:
    """The bytes to keep beside so many bytes of weights: the promise of memory leaves half of them
    where they are held as they are and rounded.
    """
    return min(MOST_BYTES, _LEAST + weights // 8)


class KeptActivations:
    """The tensors alive at a cut, by what they depend on; those used last, within a budget.

    Several threads may share it.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._kept: OrderedDict[Hashable, tuple[KeptTensors, int]] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()

    def first_of(self, keys: Sequence[Hashable]) -> tuple[int, KeptTensors] | None:
        """The place among ``keys`` of the first one that is kept, and its tensors; None if none
        is.
        """
        with self._lock:
            for place, key in enumerate(keys):
                if key in self._kept:
                    self._kept.move_to_end(key)
                    return place, self._kept[key][0]
        return None

    def keep(self, key: Hashable, tensors: KeptTensors) -> None:
        """Remember ``tensors``, and forget what was not used for longest."""
        size = sum(bytes_of(value) for value in tensors.values())
        with self._lock:
            if size > self._most_bytes or key in self._kept:
                return
            self._kept[key] = (dict(tensors), size)
            self._bytes += size
            while self._bytes > self._most_bytes:
                _, (_, gone) = self._kept.popitem(last=False)
                self._bytes -= gone

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._kept.clear()
            self._bytes = 0


Arrays = dict[str, NDArray[Any]]
Tensors = dict[str, Value]

_ON_GPU, _LITTLE = 4, 16 << 20
"""Segments there, of a model that holds no more bytes at a time: an effect then takes 0.6 of an
inference in the mean."""


class SwitchedSession:
    """Executes a model with any of its layers reduced to ``low`` and the others in ``pin``.

    For another device than the CPU the model is cut less: what crosses a cut is copied to the host
    and back.
    """

    def __init__(
        self,
        graph: Graph,
        constants: ConstantStore | DeviceConstants,
        low: Precision,
        pin: Precision,
        threads: int,
        device: Device = CPU,
        *,
        kept: KeptActivations | None = None,
        turns: Turns | None = None,
        segments: int = MOST_SEGMENTS,
    ) -> None:
        most = segments if device == CPU else min(segments, segments_on_gpu(graph))
        self._turns = turns or Turns(graph)
        alike = self._turns.many_nodes and device == CPU
        # Packed one by one: the objects of all take more than the sessions.
        subgraphs = cut(to_switched(graph, low, pin), graph, most, alike=alike)
        packed = list(map(PackedSegment, subgraphs))
        parts = [part.named for part in packed]
        self._switches = Switches(parts)
        self._segments = sessions_of(packed, graph, constants, threads, device, shared=alike)
        self._sessions = [one for segment in self._segments for one in segment.sessions]
        self._one_of_each = list({one.form: one for one in reversed(self._sessions)}.values())
        shares = len(self._one_of_each) < len(self._sessions)
        self._room, self._device = Headroom(graph, threads), device
        self._graph = graph
        # A tensor is let go behind the last segment that takes it.
        last = {name: place for place, part in enumerate(parts) for name in part.takes}
        last |= dict.fromkeys(graph.outputs, len(parts))
        self._last = last
        self._kept = KeptActivations() if kept is None else kept
        # Another session may share the store; an id could come again.
        self._own = object()
        self._settings: tuple[frozenset[str], list[Setting], list[bytes]] | None = None
        self._whole: PlanSession | None = None
        self._opening = Lock()
        self._ran: frozenset[str] | None = None
        if shares:
            self._turns.introduce(self, Sessions.SHARED)
        elif len(parts) > 1 and isinstance(constants, ConstantStore):
            self._whole = PlanSession(
                self._sessions, graph.outputs, constants, threads, self._turns
            )
            self._turns.introduce(self, Sessions.EVERY_PLAN)
        self._turns.trim()

    @property
    def on_cpu(self) -> tuple[str, ...]:
        """What the CPU ran in place of another device, known after the first inference."""
        return tuple(name for one in self._sessions for name in one.on_cpu)

    def at_once(self, sample: Sample) -> int:
        """How many runs on samples like ``sample`` are made side by side; of a GPU one, and of
        phrases: thousands of short calls wait for Python's lock, and two runs take four times one.
        """
        alone = self._device != CPU or len(self._sessions) > len(self._segments)
        return 1 if alone else self._room.at_once(sample)

    def foretell(self, reduced: frozenset[str], runs: int) -> None:
        """As :meth:`PlanSession.foretell`."""
        if self._whole is not None:
            self._whole.foretell(reduced, runs)

    def run(self, sample: Sample, reduced: frozenset[str]) -> Arrays:
        """The outputs by name for one sample; several threads may ask.

        Raises:
            RunnerFailedError: with ONNX Runtime's words.
        """
        settings, prefixes = self._set(reduced)
        given, owners = _given(sample.arrays)
        count = len(self._segments)
        # From the last cut back: the first that is kept spares most.
        keys: list[Hashable] = [
            (self._own, sample.digest, prefixes[place]) for place in range(count - 1, 0, -1)
        ]
        found = self._kept.first_of(keys)
        # Where the segments may be closed, what is kept at their cuts spares less than it costs.
        if self._whole is not None and (found is None or self._turns.many_nodes):
            results = self._whole.run(given, reduced, settings)
            if results is not None:
                del owners
                self._ran = reduced
                return self._fetched(results)
        self._open_segments()
        start = 0 if found is None else count - 1 - found[0]
        tensors = given if found is None else {**given, **found[1]}
        for place in range(start, count):
            tensors = self._advance(tensors, place, settings[place])
            if place + 1 < count:
                alive = {n: v for n, v in tensors.items() if n not in given}
                self._kept.keep(keys[count - 2 - place], alive)
        outputs = self._fetched(tensors)
        del owners
        self._ran = reduced
        return outputs

    def release(self) -> None:
        """Close the segments; the session of a plan stays."""
        for session in self._one_of_each:
            session.close()
        for session in self._sessions:
            session.forget()
        give_back()

    def sensitivities(
        self, sample: Sample, wanted: Collection[str]
    ) -> Iterator[tuple[str, Arrays | None]]:
        """The outputs with one layer reduced, for each of ``wanted``.

        The run with none reduced advances segment by segment; at each one, the layers that first
        change something there are run from its beginning to the end.

        Raises:
            RunnerFailedError: the model itself cannot be run.
        """
        by_segment: dict[int, list[str]] = {}
        for name in wanted:
            by_segment.setdefault(self._switches.start_of(name), []).append(name)
        self._open_segments()
        nothing = self._switches.of(())
        tensors, owners = _given(sample.arrays)
        at_once = self.at_once(sample)
        for place in range(max(by_segment, default=-1) + 1):
            names = by_segment.get(place, ())
            finish = partial(self._finished, tensors, place)
            yield from zip(names, side_by_side(finish, names, lambda _: at_once), strict=True)
            tensors = self._advance(tensors, place, nothing[place])
        del owners

    def is_ready(self, reduced: frozenset[str]) -> bool:
        """Whether the plan ran, and its sessions are open still."""
        by_one = self._whole is not None and self._whole.validation(reduced)
        return self._ran == reduced and (by_one or self._is_open)

    @property
    def _is_open(self) -> bool:
        return all(session.is_open for session in self._one_of_each)

    def _open_segments(self) -> None:
        """Open all of them side by side, where they are not."""
        if self._is_open:
            return
        with self._opening:
            if self._is_open:  # another thread was sooner
                return
            # What cannot make room for a plan's session takes no turns: it would never end.
            if self._whole is not None:
                self._turns.make_room(Sessions.EVERY_PLAN)
            deque(in_order(SegmentSession.open, self._one_of_each), maxlen=0)
            self._turns.trim()

    def _finished(self, tensors: Tensors, start: int, layer: str) -> Arrays | None:
        """The outputs with ``layer`` reduced, from the cut before segment ``start`` on."""
        settings = self._switches.of((layer,))
        try:
            for place in range(start, len(self._segments)):
                tensors = self._advance(tensors, place, settings[place])
            return self._fetched(tensors)
        except RunnerFailedError:
            return None

    def _advance(self, tensors: Tensors, place: int, setting: Setting) -> Tensors:
        """What is alive behind segment ``place``."""
        alive = {**tensors, **self._segments[place].run(tensors, setting)}
        return {name: value for name, value in alive.items() if self._last.get(name, -1) > place}

    def _fetched(self, tensors: Tensors) -> Arrays:
        found = {name: viewed(tensors[name]) for name in self._graph.outputs}
        # An input that is an output is handed on where the caller has it, who may let it go.
        given = (value.name for value in self._graph.proto.graph.input)
        return found | {name: found[name].copy() for name in given if name in found}

    def _set(self, reduced: frozenset[str]) -> tuple[list[Setting], list[bytes]]:
        """The switches, and by what the activations before each segment are known; those of the
        last plan where it is the same.
        """
        known = self._settings
        if known is not None and known[0] == reduced:
            return known[1:]
        settings = self._switches.of(reduced)
        prefixes, before = [], blake2b(digest_size=16)
        for place, setting in enumerate(settings):
            # Of a segment without switches the cuts before it and behind it are two.
            before.update(b"%d" % place)
            prefixes.append(before.digest())
            before.update(np.packbits(setting).tobytes())
        self._settings = (reduced, settings, prefixes)
        return settings, prefixes


def _given(arrays: Mapping[str, NDArray[Any]]) -> tuple[Tensors, list[Any]]:
    """The inputs as ONNX Runtime's values, and their owners, which must outlive them."""
    owners = {name: owned(array) for name, array in arrays.items()}
    return {name: value_of(owner) for name, owner in owners.items()}, list(owners.values())


def segments_on_gpu(graph: Graph) -> int:
    """How many segments a model is cut into where each cut costs a copy to the host and back: one
    where its inputs' shapes do not tell what would be copied.
    """
    shapes = {spec.name: fixed_shape(spec) for spec in input_specs(graph.proto)}
    known = {name: shape for name, shape in shapes.items() if shape is not None}
    held = inference_bytes(graph, known) if len(known) == len(shapes) else None
    return _ON_GPU if held is not None and held <= _LITTLE else 1
