"""Which segments of a model are one network with other weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bisect_trt.graph.passes.nameless import Names, nameless
from bisect_trt.graph.passes.segmented import Segment
from bisect_trt.runners.emulator.switched.segment_form import SegmentForm
from bisect_trt.runners.ort.devices import CPU

_SPARES = 2
"""Segments share sessions where those hold so many times fewer nodes: what a plan's own session
would spare each of its runs is less than opening it costs then, and closing the others."""


@dataclass(frozen=True)
class Part:
    """A segment: what runs it, and what its own tensors and nodes are called there."""

    form: SegmentForm
    names: Names


def shared_forms(segments: Iterable[Segment], threads: int) -> list[Part] | None:
    """One form for all segments that are the same but for their weights and names, on the CPU;
    None where that spares little.

    Args:
        segments: of one model, in order.
        threads: what one call may use; 0 leaves it to the machine.
    """
    found: dict[tuple[bytes, tuple[str, ...]], SegmentForm] = {}
    parts, nodes, distinct = [], 0, 0
    for segment in segments:
        own, names = nameless(segment)
        # The order of switches is not the bytes' own.
        asked = (*own.takes, "", *own.gives, "", *own.flags, "", *own.weights)
        key = (own.model.SerializeToString(deterministic=True), asked)
        nodes += len(own.model.graph.node)
        form = found.get(key)
        if form is None:
            distinct += len(own.model.graph.node)
            form = found[key] = SegmentForm(own, threads, CPU)
        parts.append(Part(form, names))
    return parts if distinct * _SPARES <= nodes else None
