"""One segment of a switched model, run phrase by phrase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from bisect_trt.graph.passes.segments.segment import Segment
from bisect_trt.runners.emulator.switched.segment_session import SegmentSession
from bisect_trt.runners.emulator.switched.switches import Setting
from bisect_trt.runners.ort.values import Value


class PhrasedSegment:
    """Runs ``segment`` by the sessions of its phrases; what only they hand on is let go behind the
    last that takes it.

    Args:
        segment: a part of a switched model.
        sessions: of its phrases, in order, under names of their own.
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
