"""The sessions that a cut model is run by: one a segment, or of many nodes one for all copies of a
block, or else one for all that are of a kind of a few layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bisect_trt.graph.model.graph import Graph
from bisect_trt.graph.passes.segments.packed_segment import PackedSegment
from bisect_trt.graph.passes.segments.phrases import has_phrases, in_phrases
from bisect_trt.graph.passes.segments.segment import Segment
from bisect_trt.runners.emulator.constants.constant_store import ConstantStore
from bisect_trt.runners.emulator.constants.device_constants import DeviceConstants
from bisect_trt.runners.emulator.switched.captured_segment import CapturedSegment
from bisect_trt.runners.emulator.switched.phrased_segment import PhrasedSegment
from bisect_trt.runners.emulator.switched.segment_form import SegmentForm
from bisect_trt.runners.emulator.switched.segment_session import SegmentSession
from bisect_trt.runners.emulator.switched.shared_sessions import shared_sessions
from bisect_trt.runners.ort.devices import CUDA_PROVIDER, Device


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

    Args:
        parts: of a switched model.
        graph: it was written of.
        constants: of the model, in the memory of ``device``.
        threads: what one call may use; 0 leaves it to the machine.
        device: what computes.
        shared: whether forms may be shared, on the CPU: the model has many nodes.
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
