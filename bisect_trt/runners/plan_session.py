"""A plan that runs on many samples: the segments as one session, without switches and cuts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock

import numpy as np

from bisect_trt.model.segment_forms import joined
from bisect_trt.model.segments import PackedSegment
from bisect_trt.runners.concurrency import Sessions, Turns
from bisect_trt.runners.constants import ConstantStore
from bisect_trt.runners.device import CPU
from bisect_trt.runners.ort_session import giving_back
from bisect_trt.runners.segment_session import SegmentForm, SegmentSession, Setting
from bisect_trt.runners.values import Value

_WORTH_IT = 16
"""Of an OCR detector such a session takes 70 ms to make and 8 ms less a run, on two cores side by
side; of thousands of small nodes it pays after 24 runs. A test on new copies makes a hundred and
more, a search set forty."""

_COUNTED = 8


class PlanSession:
    """Runs the plan in work from the start to the end, once it was asked for that often, or of many
    nodes where that was foretold: the segments are closed for it, and nothing may run in them. The
    numbers are those of the segments, bit for bit. There is one at a time.
    """

    def __init__(
        self,
        segments: Sequence[SegmentSession],
        outputs: Sequence[str],
        constants: ConstantStore,
        threads: int,
        turns: Turns,
    ) -> None:
        self._segments, self._outputs = segments, tuple(outputs)
        self._constants, self._threads = constants, threads
        self._turns = turns
        turns.introduce(self, Sessions.ONE_PLAN)
        self._uses: dict[frozenset[str], int] = {}
        self._ready: tuple[frozenset[str], SegmentSession, Setting] | None = None
        self._lock = Lock()

    def run(
        self, given: Mapping[str, Value], reduced: frozenset[str], settings: Sequence[Setting]
    ) -> dict[str, Value] | None:
        """The outputs by name; None where the segments should be run. Several threads may ask.

        Raises:
            RunnerFailedError: with ONNX Runtime's words.
        """
        with self._lock:
            ready = self._ready
            if ready is None or ready[0] != reduced:
                counted = 0 if self._turns.many_nodes else 1
                uses = self._uses[reduced] = self._uses.pop(reduced, 0) + counted
                if len(self._uses) > _COUNTED:
                    del self._uses[next(iter(self._uses))]
                if uses <= _WORTH_IT:
                    return None
                # Plans that are asked for in turn would open a session each time.
                self._uses.clear()
                self._ready = None  # two would be in memory for a moment
                self._turns.make_room(Sessions.ONE_PLAN)
                ready = self._ready = (reduced, *self._opened(settings))
        return ready[1].run(given, ready[2])

    def validation(self, reduced: frozenset[str]) -> bool:
        """Whether a session of the plan is open."""
        ready = self._ready
        return ready is not None and ready[0] == reduced

    def foretell(self, reduced: frozenset[str], runs: int) -> None:
        """Hear that a plan will be run so often: where that is often enough, it is run so from the
        first time on.
        """
        if runs > _WORTH_IT:
            with self._lock:
                self._uses[reduced] = max(self._uses.pop(reduced, 0), _WORTH_IT + 1)

    def release(self) -> None:
        """Let the session go; the plan is counted anew."""
        with self._lock:
            self._ready = None

    def _opened(self, settings: Sequence[Setting]) -> tuple[SegmentSession, Setting]:
        parts = list(zip(self._segments, settings, strict=True))
        whole = joined([part.form.as_set(setting) for part, setting in parts], self._outputs)
        states = {n: state for part, setting in parts for n, state in part.states(setting).items()}
        # It comes for many runs: it begins with the memory that others leave.
        form = SegmentForm(PackedSegment(whole), self._threads, CPU, settles=False)
        session = SegmentSession(whole, self._constants, form, options=giving_back())
        session.open()
        whole.model.Clear()  # of many nodes it takes as much as the session
        setting = np.asarray([states[n] for n in (*whole.flags, *whole.weights)], np.bool_)
        return session, setting
