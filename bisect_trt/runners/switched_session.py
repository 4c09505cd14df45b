"""Runs every plan of a base precision in the same sessions, whose roundings are switched by what
is fed.

The model is cut into segments, and what is alive at the cuts is kept for a while. An evaluation
starts at the segment in which its plan first differs from one that was run on the same sample. The
numbers are those of a run from the start, bit for bit.
"""

from __future__ import annotations

import tempfile
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.base.errors import RunnerFailedError
from bisect_trt.base.limits import in_order
from bisect_trt.base.plan import Precision
from bisect_trt.base.sample import Sample
from bisect_trt.metrics.arrays import Arrays
from bisect_trt.model.graph import Graph
from bisect_trt.model.switched import SEGMENTS, Segment, cut, to_switched
from bisect_trt.runners.concurrency import Headroom, side_by_side
from bisect_trt.runners.constants import ConstantStore
from bisect_trt.runners.device import CPU, Device
from bisect_trt.runners.ort_session import cpu_nodes, failure_of_session, session_as_written
from bisect_trt.runners.values import Value, bytes_of, caller, owned, value_of, viewed

KEPT_BYTES = 16 << 20
"""What activations at cuts may take in all."""

_WHERE = "the emulated model"

Setting = NDArray[np.bool_]
"""For one segment: its flags, then which of its weights are rounded as for a reduced layer."""

Tensors = Mapping[str, Value]


class KeptActivations:
    """The tensors alive at a cut, by what they depend on; those used last, within a budget.

    Several threads may share it.
    """

    def __init__(self, budget_bytes: int = KEPT_BYTES) -> None:
        self._budget_bytes = budget_bytes
        self._kept: OrderedDict[Hashable, tuple[Tensors, int]] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()

    def first_of(self, keys: Sequence[Hashable]) -> tuple[int, Tensors] | None:
        """The place among ``keys`` of the first one that is kept, and its tensors."""
        with self._lock:
            for place, key in enumerate(keys):
                if key in self._kept:
                    self._kept.move_to_end(key)
                    return place, self._kept[key][0]
        return None

    def keep(self, key: Hashable, tensors: Tensors) -> None:
        """Remember ``tensors``, and forget what was not used for longest."""
        size = sum(bytes_of(value) for value in tensors.values())
        with self._lock:
            if size > self._budget_bytes or key in self._kept:
                return
            self._kept[key] = (dict(tensors), size)
            self._bytes += size
            while self._bytes > self._budget_bytes:
                _, (_, gone) = self._kept.popitem(last=False)
                self._bytes -= gone

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._kept.clear()
            self._bytes = 0


class Switches:
    """Turns the set of reduced layers into each segment's setting."""

    def __init__(self, segments: Sequence[SegmentSession]) -> None:
        self._place: dict[str, int] = {}
        # Each switch with each layer that asks for it, and the one that it is not needed for.
        switches: list[int] = []
        layers: list[int] = []
        unless: list[int] = []
        ends = []
        for segment in segments:
            asked = [(flag.on, flag.off) for flag in segment.flags.values()]
            asked += [((weight.layer,), ()) for weight in segment.weights.values()]
            for on, off in asked:
                layers += [self._index(name) for name in on]
                switches += [len(unless)] * len(on)
                assert len(off) <= 1
                unless.append(self._index(off[0]) if off else -1)
            ends.append(len(unless))
        self._switches, self._layers, self._unless = (
            np.asarray(column, np.intp) for column in (switches, layers, unless)
        )
        self._bounds = list(pairwise([0, *ends]))
        self._starts = self._first_segments(ends)

    def of(self, reduced: Iterable[str]) -> list[Setting]:
        """The setting of each segment where the layers ``reduced`` are.

        A flag is on where one of its layers is reduced and not the one that has rounded the tensor
        already.
        """
        # The last place stands for no layer: index -1.
        low = np.zeros(len(self._place) + 1, np.bool_)
        low[[place for name in reduced if (place := self._place.get(name)) is not None]] = True
        values = np.zeros(len(self._unless), np.bool_)
        values[self._switches[low[self._layers]]] = True
        values &= ~low[self._unless]
        return [values[start:end] for start, end in self._bounds]

    def start_of(self, layer: str) -> int:
        """The first segment that ``layer`` may change where it alone is reduced."""
        return self._starts.get(layer, 0)

    def _index(self, layer: str) -> int:
        return self._place.setdefault(layer, len(self._place))

    def _first_segments(self, ends: Sequence[int]) -> dict[str, int]:
        first = np.full(len(self._place), len(ends), np.intp)
        np.minimum.at(first, self._layers, np.searchsorted(ends, self._switches, side="right"))
        return {name: int(first[i]) for name, i in self._place.items() if first[i] < len(ends)}


class SegmentSession:
    """Runs one segment. ``on_cpu`` names what the CPU ran in place of another device, known after
    the first run.
    """

    def __init__(
        self, segment: Segment, constants: ConstantStore, threads: int, device: Device
    ) -> None:
        self.takes, self.gives = segment.takes, segment.gives
        self.flags, self.weights = segment.flags, segment.weights
        self.on_cpu: tuple[str, ...] = ()
        self._constants = constants
        self._profile: tempfile.TemporaryDirectory[str] | None = None
        profile = None
        if device != CPU:
            self._profile = tempfile.TemporaryDirectory(prefix="bisect-trt-")
            profile = str(Path(self._profile.name) / "profile")
        self._session = session_as_written(segment.model, _WHERE, threads, device, profile)
        self._call = caller(self._session)
        self._states = [
            owned(np.array(state), device.memory, device.number) for state in (False, True)
        ]

    def run(self, tensors: Tensors, setting: Setting) -> dict[str, Value]:
        """What the segment gives; several threads may ask.

        Raises:
            RunnerFailedError: with ONNX Runtime's words.
        """
        feed = {name: tensors[name] for name in self.takes}
        states = setting.tolist()
        for name, on in zip(self.flags, states, strict=False):
            feed[name] = value_of(self._states[on])
        owners = []  # hold what is fed until the call is done
        for (name, weight), low in zip(
            self.weights.items(), states[len(self.flags) :], strict=True
        ):
            precision = weight.reduced if low else weight.pinned
            owners.append(self._constants.owner(weight.tensor, precision))
            feed[name] = value_of(owners[-1])
        try:
            results = self._call(feed, self.gives, None)
        except Exception as error:
            raise failure_of_session(_WHERE, error) from error
        if self._profile is not None:
            self.on_cpu = tuple(cpu_nodes(self._session))
            self._profile.cleanup()
            self._profile = None
        return {name: results[i] for i, name in enumerate(self.gives)}


class SwitchedSession:
    """Executes a model with any of its layers reduced to ``low`` and the others in ``pin``."""

    def __init__(
        self,
        graph: Graph,
        constants: ConstantStore,
        low: Precision,
        pin: Precision,
        *,
        threads: int = 0,
        device: Device = CPU,
        kept: KeptActivations | None = None,
        segments: int = SEGMENTS,
    ) -> None:
        # What crosses a cut would be copied from a GPU to the host and back.
        segments = segments if device == CPU else 1
        whole = to_switched(graph, low, pin, selects=device != CPU)

        def opened(segment: Segment) -> SegmentSession:
            return SegmentSession(segment, constants, threads, device)

        self._segments = list(in_order(opened, cut(whole, graph, segments)))
        self._switches = Switches(self._segments)
        self._headroom, self._device = Headroom(graph, threads), device
        self._graph = graph
        # A tensor is let go behind the last segment that takes it.
        self._last = {name: i for i, one in enumerate(self._segments) for name in one.takes}
        self._last |= dict.fromkeys(graph.outputs, len(self._segments))
        self._kept = KeptActivations() if kept is None else kept
        # Another session may share what is kept; an id could come again.
        self._own = object()
        self._settings: tuple[frozenset[str], list[Setting], list[bytes]] | None = None

    @property
    def on_cpu(self) -> tuple[str, ...]:
        """What the CPU ran in place of another device, known after the first run."""
        return tuple(name for segment in self._segments for name in segment.on_cpu)

    def at_once(self, sample: Sample) -> int:
        """How many runs on samples like ``sample`` are made side by side."""
        return self._headroom.at_once(sample) if self._device == CPU else 1

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
        start = 0 if found is None else count - 1 - found[0]
        tensors = given if found is None else {**given, **found[1]}
        for place in range(start, count):
            tensors = self._advance(tensors, place, settings[place])
            if place + 1 < count:
                alive = {n: v for n, v in tensors.items() if n not in given}
                self._kept.keep(keys[count - 2 - place], alive)
        outputs = self._fetched(tensors)
        del owners
        return outputs

    def sensitivities(
        self, sample: Sample, wanted: Collection[str]
    ) -> Iterator[tuple[str, Arrays | None]]:
        """The outputs with one layer reduced, for each of ``wanted``; None where that fails.

        The run with none reduced advances segment by segment; at each one, the layers that first
        change something there are run from its beginning to the end.

        Raises:
            RunnerFailedError: the model itself cannot be run.
        """
        by_segment: dict[int, list[str]] = {}
        for name in wanted:
            by_segment.setdefault(self._switches.start_of(name), []).append(name)
        nothing = self._switches.of(())
        tensors, owners = _given(sample.arrays)
        at_once = self.at_once(sample)
        for place in range(max(by_segment, default=-1) + 1):
            names = by_segment.get(place, ())
            finish = partial(self._finished, tensors, place)
            yield from zip(names, side_by_side(finish, names, lambda _: at_once), strict=True)
            tensors = self._advance(tensors, place, nothing[place])
        del owners

    def _finished(self, tensors: Tensors, start: int, layer: str) -> Arrays | None:
        """The outputs with ``layer`` reduced, from the cut before segment ``start`` on."""
        settings = self._switches.of((layer,))
        try:
            for place in range(start, len(self._segments)):
                tensors = self._advance(tensors, place, settings[place])
            return self._fetched(tensors)
        except RunnerFailedError:
            return None

    def _advance(self, tensors: Tensors, place: int, setting: Setting) -> dict[str, Value]:
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


def _given(arrays: Mapping[str, NDArray[Any]]) -> tuple[dict[str, Value], list[Any]]:
    """The inputs as ONNX Runtime's values, and their owners, which must outlive them."""
    owners = {name: owned(array) for name, array in arrays.items()}
    return {name: value_of(owner) for name, owner in owners.items()}, list(owners.values())
