"""Segments that are one network with other weights: one session then serves all of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from bisect_trt.graph.passes.segments.nameless import nameless
from bisect_trt.graph.passes.segments.packed_segment import PackedSegment
from bisect_trt.graph.passes.segments.phrases import SESSION
from bisect_trt.graph.passes.segments.segment import Segment
from bisect_trt.runners.emulator.constants.constant_store import ConstantStore
from bisect_trt.runners.emulator.constants.device_constants import DeviceConstants
from bisect_trt.runners.emulator.switched.segment_form import SegmentForm
from bisect_trt.runners.emulator.switched.segment_session import SegmentSession
from bisect_trt.runners.ort.devices import CPU

_SPARES = 2
"""Segments share sessions where those take so many times less memory: what a plan's own session
would spare each of its runs is less than opening it costs then, and closing the others."""


def shared_sessions(
    segments: Iterable[Segment], constants: ConstantStore | DeviceConstants, threads: int
) -> list[SegmentSession] | None:
    """One form for all segments that are the same but for their weights and names, on the CPU;
    None where that spares little.

    Args:
        segments: of one model, in order; none is kept.
        constants: of the model.
        threads: what one call may use; 0 leaves it to the machine.
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
