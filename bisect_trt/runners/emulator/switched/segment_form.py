"""The sessions of a segment, shared by all that compute the same with other weights."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from bisect_trt.core.errors import RunnerFailedError
from bisect_trt.graph.passes.segments.branchless import with_lists, without_branches
from bisect_trt.graph.passes.segments.packed_segment import PackedSegment
from bisect_trt.graph.passes.segments.segment import Segment, settled
from bisect_trt.runners.emulator.switched.switches import Setting
from bisect_trt.runners.ort.devices import CPU, Device
from bisect_trt.runners.ort.profiles import cpu_nodes
from bisect_trt.runners.ort.sessions import switched_session
from bisect_trt.runners.ort.values import Value, caller, owned, value_of

_WORTH_SETTLING = 48
"""A session without switches costs as much to make as it saves in about 24 runs of a segment of
small nodes. It is made after more with the same switches than a panel has samples: a plan that is
tried on those comes once."""

_SETTLED = 2
"""A run mostly asks for two settings again and again: nothing lowered, and the plan in work."""

_COUNTED = 64
"""Settings whose runs are counted: of a form that many segments have each may come in another."""


@dataclass(eq=False)
class Ready:
    """A session of ``segment``, whose model was let go; its flags of ``places`` are integers;
    ``profiles`` is where ONNX Runtime writes what ran where, until that was read; ``is_new`` until
    it was heard that it ran."""

    session: ort.InferenceSession
    call: Callable[..., Any]
    segment: Segment
    places: frozenset[str]
    profiles: tempfile.TemporaryDirectory[str] | None
    is_new: bool = True


class SegmentForm:
    """Makes the sessions of ``packed`` when they are first needed.

    ``selects`` says that a session with switches made from then on computes both roundings and
    takes one, as one on another device than the CPU does; the numbers are the same. ``ran`` that
    one of those did. ``on_cpu`` names what the CPU ran in place of another device.

    Args:
        packed: a part of a switched model.
        threads: what one call may use; 0 leaves it to the machine.
        device: what computes.
        settles: whether a setting that comes often gets a session without switches.
    """

    def __init__(
        self, packed: PackedSegment, threads: int, device: Device, *, settles: bool = True
    ) -> None:
        self._packed = packed
        self.segment = packed.named
        self.selects = self.ran = False
        self.on_cpu: tuple[str, ...] = ()
        self._threads, self._device = threads, device
        self._settles = settles and device == CPU
        self._switched: Ready | None = None
        # The values must outlive the call, and making one costs more than passing it.
        self._states = [
            owned(np.array(state, dtype), device.memory, device.number)
            for dtype in (np.bool_, np.int64)
            for state in (False, True)
        ]
        self._settled: dict[bytes, Ready] = {}
        # When each was asked for last; how often another was, and since when.
        self._last: dict[bytes, int] = {}
        self._uses: dict[bytes, tuple[int, int]] = {}
        self._calls = 0

    @property
    def is_open(self) -> bool:
        """Whether :meth:`open` has nothing to do."""
        return self._switched is not None

    def open(self) -> None:
        """Make the session that most runs need, where there is none; several forms' are made side
        by side, so no lock is taken. Two who open at a time make one session in vain.

        Raises:
            RunnerFailedError: with ONNX Runtime's words.
        """
        if self._switched is None:
            self._switched = self._with_switches()

    def close(self) -> None:
        """Let all sessions go; who is running ends by what it has."""
        self._switched = None
        self._settled.clear()
        self._last.clear()

    def unpacked(self) -> Segment:
        """The segment with its model, a new object."""
        return self._packed.unpacked()

    def as_set(self, setting: Setting) -> Segment:
        """The segment with its switches written out as ``setting`` has them."""
        on = {name for name, state in zip(self.segment.flags, setting, strict=False) if state}
        return settled(self.unpacked(), on)

    def session_for(self, setting: Setting) -> Ready:
        """The session without switches where this setting came often enough, and no more others do
        than have a place, else with them.

        Raises:
            RunnerFailedError: with ONNX Runtime's words.
        """
        key = setting.tobytes()
        self._calls += 1
        if key in self._settled:
            self._last[key] = self._calls
            return self._settled[key]
        uses, since = self._uses.pop(key, (0, self._calls))
        self._uses[key] = uses + 1, since
        if uses == _WORTH_SETTLING and self._settles:
            del self._uses[key]
            if self._has_place(since):
                self._last[key] = self._calls
                self._settled[key] = self._opened(self.as_set(setting))
                return self._settled[key]
        if len(self._uses) > _COUNTED:
            del self._uses[next(iter(self._uses))]
        if self._switched is None:
            self._switched = self._with_switches()
        return self._switched

    def _has_place(self, since: int) -> bool:
        """Whether another setting may be settled; one gives way that was not asked for ``since``
        that call.
        """
        if len(self._settled) == _SETTLED:
            idle = [key for key in self._settled if self._last[key] < since]
            for key in idle[:1]:
                del self._settled[key], self._last[key]
        return len(self._settled) < _SETTLED

    def state(self, on: bool, is_place: bool) -> Value:
        """What a flag that is ``on`` or not is fed with, as a boolean or as a place in a list."""
        return value_of(self._states[2 * is_place + on])

    def hear(self, ready: Ready) -> None:
        """Hear that ``ready`` ran."""
        self.ran = self.ran or bool(ready.places)
        profiles, ready.profiles = ready.profiles, None
        ready.is_new = False
        if profiles is not None:
            self.on_cpu = tuple(cpu_nodes(ready.session))
            profiles.cleanup()

    def refuse_lists(self, ready: Ready) -> None:
        """Hear that ``ready``, which never ran, selects and cannot: its flags will branch."""
        self.selects = False
        if self._switched is ready:  # another thread may have met it before
            self._switched = None

    def _with_switches(self) -> Ready:
        whole = self.unpacked()
        if self._device != CPU:
            return self._opened(without_branches(whole))
        if self.selects:
            try:
                return self._opened(*with_lists(whole))
            except RunnerFailedError:  # some operators need shapes beforehand; a list tells none
                self.selects = self.ran = False
        return self._opened(whole)

    def _opened(self, segment: Segment, places: frozenset[str] = frozenset()) -> Ready:
        profiles, profile = None, None
        if self._device != CPU:
            profiles = tempfile.TemporaryDirectory(prefix="bisect-trt-")
            profile = str(Path(profiles.name) / "profile")
        session = switched_session(segment.model, self._threads, self._device, profile)
        named = replace(segment, model=onnx.ModelProto())
        return Ready(session, caller(session), named, places, profiles)
