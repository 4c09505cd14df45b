"""Executes every plan of a base precision in the same sessions, whose inputs switch the roundings.

The model is cut into segments, and the tensors alive at the cuts are kept. An evaluation starts at
the first segment whose switches differ from a kept run on the same sample. The outputs are those of
a whole run, bit for bit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from itertools import pairwise
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
from bisect_trt.runners.ort_session import failure_of_session, session_as_written
from bisect_trt.runners.values import Value, bytes_of, caller, owned, value_of, viewed

KEPT_BYTES = 16 << 20
"""Memory for the kept tensors of all cuts."""

_WHERE = "the emulated model"

Setting = NDArray[np.bool_]
"""The switches of one segment: its flags, then its weights; True where reduced."""

Tensors = Mapping[str, Value]


class KeptActivations:
    """Keeps the tensors alive at cuts, the most recently used within a budget; thread-safe."""

    def __init__(self, budget_bytes: int = KEPT_BYTES) -> None:
        self._budget_bytes = budget_bytes
        self._kept: OrderedDict[Hashable, tuple[Tensors, int]] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()

    def first_of(self, keys: Sequence[Hashable]) -> tuple[int, Tensors] | None:
        """Returns the index of the first of ``keys`` that is kept, and its tensors."""
        with self._lock:
            for index, key in enumerate(keys):
                if key in self._kept:
                    self._kept.move_to_end(key)
                    return index, self._kept[key][0]
        return None

    def keep(self, key: Hashable, tensors: Tensors) -> None:
        """Keeps ``tensors``, and drops those that were not used for longest."""
        size = sum(bytes_of(value) for value in tensors.values())
        with self._lock:
            if size > self._budget_bytes or key in self._kept:
                return
            self._kept[key] = (dict(tensors), size)
            self._bytes += size
            while self._bytes > self._budget_bytes:
                _, (_, freed) = self._kept.popitem(last=False)
                self._bytes -= freed

    def clear(self) -> None:
        """Drops everything."""
        with self._lock:
            self._kept.clear()
            self._bytes = 0


class Switches:
    """Turns a set of reduced layers into the switches of each segment."""

    def __init__(self, segments: Sequence[SegmentSession]) -> None:
        self._numbers: dict[str, int] = {}
        # Pairs of a switch and a layer that turns it on; for each switch, the layer that has
        # rounded the tensor already and makes it needless, or -1.
        switches: list[int] = []
        layers: list[int] = []
        unless: list[int] = []
        ends = []
        for segment in segments:
            conditions = [(flag.on, flag.off) for flag in segment.flags.values()]
            conditions += [((weight.layer,), ()) for weight in segment.weights.values()]
            for on, off in conditions:
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
        """Returns the switches of each segment if the layers ``reduced`` are reduced."""
        # The last element, index -1, stands for no layer and stays False.
        low = np.zeros(len(self._numbers) + 1, np.bool_)
        low[[self._numbers[name] for name in reduced if name in self._numbers]] = True
        values = np.zeros(len(self._unless), np.bool_)
        values[self._switches[low[self._layers]]] = True
        values &= ~low[self._unless]
        return [values[start:end] for start, end in self._bounds]

    def start_of(self, layer: str) -> int:
        """Returns the first segment that ``layer`` changes if it alone is reduced."""
        return self._starts.get(layer, 0)

    def _index(self, layer: str) -> int:
        return self._numbers.setdefault(layer, len(self._numbers))

    def _first_segments(self, ends: Sequence[int]) -> dict[str, int]:
        first = np.full(len(self._numbers), len(ends), np.intp)
        np.minimum.at(first, self._layers, np.searchsorted(ends, self._switches, side="right"))
        return {name: int(first[i]) for name, i in self._numbers.items() if first[i] < len(ends)}


class SegmentSession:
    """Executes one segment."""

    def __init__(
        self, segment: Segment, constants: ConstantStore, threads: int, device: Device
    ) -> None:
        self.takes, self.gives = segment.takes, segment.gives
        self.flags, self.weights = segment.flags, segment.weights
        self._constants = constants
        self._call = caller(session_as_written(segment.model, _WHERE, threads, device))
        self._states = [
            owned(np.array(state), device.memory, device.number) for state in (False, True)
        ]

    def run(self, tensors: Tensors, setting: Setting) -> dict[str, Value]:
        """Returns the segment's outputs; thread-safe.

        Raises:
            RunnerFailedError: ONNX Runtime cannot run the segment.
        """
        feed = {name: tensors[name] for name in self.takes}
        states = setting.tolist()
        for name, on in zip(self.flags, states, strict=False):  # the weights' states follow
            feed[name] = value_of(self._states[on])
        owners = []  # must live until the call is done
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
        return {name: results[i] for i, name in enumerate(self.gives)}


class SwitchedSession:
    """Executes a model with any of its layers reduced to ``low``, and the others in ``pin``."""

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
        # Tensors at a cut would be copied from the GPU to the host and back.
        segments = segments if device == CPU else 1
        whole = to_switched(graph, low, pin, selects=device != CPU)

        def opened(segment: Segment) -> SegmentSession:
            return SegmentSession(segment, constants, threads, device)

        self._segments = list(in_order(opened, cut(whole, graph, segments)))
        self._switches = Switches(self._segments)
        self._headroom, self._device = Headroom(graph, threads), device
        self._graph = graph
        # The last segment that reads each tensor, which is freed after it.
        self._last = {name: i for i, one in enumerate(self._segments) for name in one.takes}
        self._last |= dict.fromkeys(graph.outputs, len(self._segments))
        self._kept = KeptActivations() if kept is None else kept
        # Part of the keys, since sessions share kept tensors; an id() could be reused.
        self._identity = object()
        self._settings: tuple[frozenset[str], list[Setting], list[bytes]] | None = None

    def at_once(self, sample: Sample) -> int:
        """Returns how many inferences on samples like ``sample`` fit side by side."""
        return self._headroom.at_once(sample) if self._device == CPU else 1

    def run(self, sample: Sample, reduced: frozenset[str]) -> Arrays:
        """Returns one sample's outputs by name; thread-safe."""
        settings, prefixes = self._settings_of(reduced)
        inputs, owners = _input_values(sample.arrays)
        count = len(self._segments)
        # The last cut comes first: starting there saves most.
        keys: list[Hashable] = [
            (self._identity, sample.digest, prefixes[index]) for index in range(count - 1, 0, -1)
        ]
        hit = self._kept.first_of(keys)
        start = 0 if hit is None else count - 1 - hit[0]
        tensors = inputs if hit is None else {**inputs, **hit[1]}
        for index in range(start, count):
            tensors = self._advance(tensors, index, settings[index])
            if index + 1 < count:
                alive = {n: v for n, v in tensors.items() if n not in inputs}
                self._kept.keep(keys[count - 2 - index], alive)
        outputs = self._outputs_of(tensors)
        del owners
        return outputs

    def sensitivities(
        self, sample: Sample, wanted: Collection[str]
    ) -> Iterator[tuple[str, Arrays | None]]:
        """Yields the outputs with one layer reduced, for each of ``wanted``; None if that fails.

        Raises:
            RunnerFailedError: ONNX Runtime cannot run the model.
        """
        # One run with no layer reduced advances segment by segment. Before each, the layers that
        # first change something there are run from there to the end.
        by_segment: dict[int, list[str]] = {}
        for name in wanted:
            by_segment.setdefault(self._switches.start_of(name), []).append(name)
        none_reduced = self._switches.of(())
        tensors, owners = _input_values(sample.arrays)
        at_once = self.at_once(sample)
        for index in range(max(by_segment, default=-1) + 1):
            names = by_segment.get(index, ())
            finish = partial(self._finished, tensors, index)
            yield from zip(names, side_by_side(finish, names, lambda _: at_once), strict=True)
            tensors = self._advance(tensors, index, none_reduced[index])
        del owners

    def _finished(self, tensors: Tensors, start: int, layer: str) -> Arrays | None:
        """The outputs with ``layer`` reduced, from segment ``start`` on; None if that fails."""
        settings = self._switches.of((layer,))
        try:
            for index in range(start, len(self._segments)):
                tensors = self._advance(tensors, index, settings[index])
            return self._outputs_of(tensors)
        except RunnerFailedError:
            return None

    def _advance(self, tensors: Tensors, index: int, setting: Setting) -> dict[str, Value]:
        """The tensors alive after segment ``index``."""
        alive = {**tensors, **self._segments[index].run(tensors, setting)}
        return {name: value for name, value in alive.items() if self._last.get(name, -1) > index}

    def _outputs_of(self, tensors: Tensors) -> Arrays:
        outputs = {name: viewed(tensors[name]) for name in self._graph.outputs}
        # An input that is also an output is the caller's memory, which may be freed: copied.
        inputs = (value.name for value in self._graph.proto.graph.input)
        return outputs | {name: outputs[name].copy() for name in inputs if name in outputs}

    def _settings_of(self, reduced: frozenset[str]) -> tuple[list[Setting], list[bytes]]:
        """The switches of each segment, and a digest of all switches before it."""
        last = self._settings
        if last is not None and last[0] == reduced:
            return last[1:]
        settings = self._switches.of(reduced)
        prefixes, before = [], blake2b(digest_size=16)
        for index, setting in enumerate(settings):
            # Tells the cuts on both sides of a segment without switches apart.
            before.update(b"%d" % index)
            prefixes.append(before.digest())
            before.update(np.packbits(setting).tobytes())
        self._settings = (reduced, settings, prefixes)
        return settings, prefixes


def _input_values(arrays: Mapping[str, NDArray[Any]]) -> tuple[dict[str, Value], list[Any]]:
    """The inputs as ONNX Runtime's values, and their owners, which must outlive them."""
    owners = {name: owned(array) for name, array in arrays.items()}
    return {name: value_of(owner) for name, owner in owners.items()}, list(owners.values())
