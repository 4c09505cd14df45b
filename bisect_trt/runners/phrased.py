"""Sessions that segments of many nodes share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from bisect_trt.model.graph import Graph
from bisect_trt.model.phrases import SESSION, has_phrases, in_phrases
from bisect_trt.model.segment_forms import nameless
from bisect_trt.model.segments import PackedSegment
from bisect_trt.model.switched import Segment
from bisect_trt.runners.captured import CapturedSegment
from bisect_trt.runners.constants import ConstantStore, DeviceConstants
from bisect_trt.runners.device import CPU, CUDA_PROVIDER, Device
from bisect_trt.runners.segment_session import SegmentForm, SegmentSession, Setting
from bisect_trt.runners.values import Value


class PhrasedSegment:
    """Runs ``segment`` by the sessions of its phrases; what only they hand on is let go behind the
    last that takes it.
    """

    def __init__(self, segment: Segment, sessions: Sequence[SegmentSession]) -> None:
        self.sessions = tuple(sessions)
        place = {name: i for i, name in enumerate((*segment.flags, *segment.weights))}
        asked = [[place[name] for name in session.switches] for session in sessions]
        self._order = np.asarray([i for places in asked for i in places], np.intp)
        ends = np.cumsum([len(places) for places in asked]).tolist()
        self._bounds = list(zip([0, *ends], ends, strict=False))
        self._gives = segment.gives
        last = {name: i for i, session in enumerate(sessions) for name in session.takes}
        done: list[list[str]] = [[] for _ in sessions]
        for i, session in enumerate(sessions):
            for name in session.gives:
                if name not in segment.gives:  # what only dead layers read nobody takes
                    done[last.get(name, i)].append(name)
        self._done = tuple(map(tuple, done))

    def run(self, tensors: Mapping[str, Value], setting: Setting) -> dict[str, Value]:
        """As :meth:`SegmentSession.run`."""
        alive, asked = dict(tensors), setting[self._order]
        for session, (start, end), done in zip(
            self.sessions, self._bounds, self._done, strict=True
        ):
            alive.update(session.run(alive, asked[start:end]))
            for name in done:
                del alive[name]
        return {name: alive[name] for name in self._gives}


_SPARES = 2
"""Segments share sessions where those take so many times less memory: what a plan's own session
would spare each of its runs is less than opening it costs then, and closing the others."""


def shared_sessions(
    segments: Iterable[Segment], constants: ConstantStore | DeviceConstants, threads: int
) -> list[SegmentSession] | None:
    """One form for all segments that are the same but for their weights and names, on the CPU;
    None where that spares little.
    """
    forms: dict[tuple[bytes, tuple[str, ...]], SegmentForm] = {}
    numbers: dict[tuple[str, ...], tuple[str, ...]] = {}  # those of one form have the same
    found, nodes, held = [], 0, 0
    for segment in segments:
        own, names = nameless(segment)
        count = len(own.model.graph.node)
        # The order of switches is not the bytes' own.
        asked = (*own.takes, "", *own.gives, "", *own.flags, "", *own.weights)
        key = (own.model.SerializeToString(deterministic=True), asked)
        nodes += count
        if key not in forms:
            held += count + SESSION
            forms[key] = SegmentForm(PackedSegment(own), threads, CPU)
        names = replace(names, numbers=numbers.setdefault(names.numbers, names.numbers))
        found.append(SegmentSession(segment, constants, forms[key], names=names))
    return found if held * _SPARES <= nodes else None


def sessions_of(
    parts: Sequence[PackedSegment],
    graph: Graph,
    constants: ConstantStore | DeviceConstants,
    threads: int,
    device: Device,
    *,
    shared: bool,
) -> Sequence[SegmentSession | PhrasedSegment]:
    """What runs each of ``parts``: sessions of its own, or by forms that many share where those are
    much fewer.
    """
    fewer = _shared(parts, graph, constants, threads) if shared and len(parts) > 1 else None
    if fewer is not None:
        return fewer
    if device.provider == CUDA_PROVIDER:
        data = [i.name for i in graph.proto.graph.input]
        return [CapturedSegment(part, constants, threads, device, data) for part in parts]
    forms = (SegmentForm(part, threads, device) for part in parts)
    pairs = zip(parts, forms, strict=True)
    return [SegmentSession(part.named, constants, form) for part, form in pairs]


def _shared(
    parts: Sequence[PackedSegment],
    graph: Graph,
    constants: ConstantStore | DeviceConstants,
    threads: int,
) -> Sequence[SegmentSession | PhrasedSegment] | None:
    """By copies of a block, or else by phrases; None where neither spares much."""
    whole = shared_sessions((part.unpacked() for part in parts), constants, threads)
    if whole is not None or not has_phrases(graph):
        return whole
    owners: list[int] = []

    def phrases() -> Iterator[Segment]:
        for place, own in enumerate(in_phrases(parts, graph)):
            for phrase in own:
                owners.append(place)
                yield phrase

    each = shared_sessions(phrases(), constants, threads)
    if each is None:
        return None
    of_part: list[list[SegmentSession]] = [[] for _ in parts]
    for place, session in zip(owners, each, strict=True):
        of_part[place].append(session)
    pairs = zip(parts, of_part, strict=True)
    return [PhrasedSegment(part.named, sessions) for part, sessions in pairs]
