"""A segment whose model is kept as bytes: of many nodes its objects take six times as much, and as
much as the session that is made of them.
"""

from __future__ import annotations

from dataclasses import replace

import onnx

from bisect_trt.graph.passes.segments.segment import Segment

_MOST = 1 << 30
"""Bytes of a model from which on it stays as it is: no message may have more than twice that."""


class PackedSegment:
    """``named`` is the segment with everything but its model; :meth:`unpacked` is all of it.

    Args:
        segment: whoever holds it too keeps its model in memory.
    """

    def __init__(self, segment: Segment) -> None:
        self._whole: Segment | None = None
        self._packed = b""
        if segment.model.ByteSize() < _MOST:
            self._packed = segment.model.SerializeToString()
            self.named = replace(segment, model=onnx.ModelProto())
        else:
            self._whole = self.named = segment

    def unpacked(self) -> Segment:
        """The segment; its model is a new object where it was packed."""
        if self._whole is not None:
            return self._whole
        return replace(self.named, model=onnx.ModelProto.FromString(self._packed))
