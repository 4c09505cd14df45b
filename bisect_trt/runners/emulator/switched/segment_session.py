"""One segment of a switched model as a session, fed with the switches of a plan."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from bisect_trt.core.errors import RunnerFailedError
from bisect_trt.graph.passes.branchless import with_lists, without_branches
from bisect_trt.graph.passes.segmented import Segment, settled
from bisect_trt.runners.emulator.constants.constant_store import ConstantStore
from bisect_trt.runners.emulator.constants.device_constants import DeviceConstants
from bisect_trt.runners.emulator.switched.captured_session import CapturedSession
from bisect_trt.runners.emulator.switched.packed_segment import PackedSegment
from bisect_trt.runners.emulator.switched.switches import Setting
from bisect_trt.runners.ort.devices import CPU, CUDA_PROVIDER, Device
from bisect_trt.runners.ort.profiles import cpu_nodes
from bisect_trt.runners.ort.sessions import failure_of_session, giving_back, switched_session
from bisect_trt.runners.ort.values import Value, caller, owned, value_of

_WORTH_SETTLING = 48
"""A session without switches costs as much to make as it saves in about 24 runs of a segment of
small nodes. It is made after more with the same switches than a panel has samples: a plan that is
tried on those comes once."""

_SETTLED = 2
"""A run mostly asks for two settings again and again: nothing lowered, and the plan in work."""


@dataclass(eq=False)
class _Ready:
    """A session of ``segment``, whose model was let go; its flags of ``places`` are integers;
    ``profiles`` is where ONNX Runtime writes what ran where, until that was read."""

    session: ort.InferenceSession
    call: Callable[..., Any]
    segment: Segment
    places: frozenset[str]
    profiles: tempfile.TemporaryDirectory[str] | None


class SegmentSession:
    """Runs ``segment``; its sessions are made when they are first needed.

    ``on_cpu`` names what the CPU ran in place of another device, known after the first inference.
    ``selects`` says that a session with switches made from then on computes both roundings and
    takes one, as one on another device than the CPU does; the numbers are the same.

    Args:
        segment: a part of a switched model.
        constants: of the model, in the memory of ``device``; their lock is held while sessions are
            made, but by :meth:`open`.
        threads: what one call may use; 0 leaves it to the machine.
        device: what computes.
        settles: whether a setting that comes often gets a session without switches.
    """

    def __init__(
        self,
        segment: Segment,
        constants: ConstantStore | DeviceConstants,
        threads: int,
        device: Device,
        *,
        settles: bool = True,
    ) -> None:
        self._packed = PackedSegment(segment)
        self._segment = self._packed.named
        self.selects = self._ran = False
        self._constants, self._threads = constants, threads
        self._device = device
        self._settles = settles and device == CPU
        # A session that comes for many runs begins with the memory that others leave.
        self._options = None if settles else giving_back()
        self.on_cpu: tuple[str, ...] = ()
        self._lent = constants.lent
        self._flags = list(segment.flags)
        self._weights = list(segment.weights.values())
        self._switched: _Ready | None = None
        self._settled: dict[bytes, _Ready] = {}
        self._uses: dict[bytes, int] = {}
        # The values must outlive the call, and making one costs more than passing it.
        self._switch = [
            owned(np.array(state, dtype), device.memory, device.number)
            for dtype in (np.bool_, np.int64)
            for state in (False, True)
        ]
        self._fed: tuple[tuple[_Ready, bytes] | None, dict[str, Value]] = (None, {})
        self._captured: CapturedSession | None = None
        self._captures = device.provider == CUDA_PROVIDER

    @property
    def is_open(self) -> bool:
        """Whether :meth:`open` has nothing to do."""
        return self._switched is not None or self._captures

    def open(self) -> None:
        """Make the session that most runs need, where there is none; several segments' are made
        side by side. No lock is taken: whoever holds it may wait for the threads that open. Two who
        open at a time make one session in vain.

        Raises:
            RunnerFailedError: with ONNX Runtime's words.
        """
        if not self.is_open:
            self._switched = self._with_switches()

    def close(self) -> None:
        """Let all sessions go; whoever runs next opens one, who is running ends by what it has."""
        with self._lent.lock:
            self._switched, self._fed = None, (None, {})
            self._settled.clear()
            self._lent.by.pop(self, None)

    def as_set(self, setting: Setting) -> Segment:
        """The segment with its switches written out as ``setting`` has them."""
        on = {name for name, state in zip(self._flags, setting, strict=False) if state}
        return settled(self._packed.unpacked(), on)

    def _with_switches(self) -> _Ready:
        whole = self._packed.unpacked()
        if self._device != CPU:
            return self._opened(without_branches(whole))
        if self.selects:
            try:
                return self._opened(*with_lists(whole))
            except RunnerFailedError:  # some operators need shapes beforehand; a list tells none
                self.selects = self._ran = False
        return self._opened(whole)

    def states(self, setting: Setting) -> dict[str, bool]:
        """What ``setting`` says of each flag, and of each weight: whether it is rounded as for a
        lowered layer.
        """
        names = [*self._flags, *self._segment.weights]
        return dict(zip(names, setting.tolist(), strict=True))

    def run(self, tensors: Mapping[str, Value], setting: Setting) -> dict[str, Value]:
        """What the segment gives; several threads may ask.

        Args:
            tensors: at least what it takes.
            setting: of its switches.

        Raises:
            RunnerFailedError: with ONNX Runtime's words.
        """
        replayed = self._replayed(tensors, setting) if self._captures else None
        if replayed is not None:
            return replayed
        with self._lent.lock:
            ready = self._session_for(setting)
            feed = dict(self._switches(ready, setting))
            owners = self._lent.by[self]
            options, self._options = self._options, None
        for name in ready.segment.takes:
            feed[name] = tensors[name]
        try:
            results = ready.call(feed, self._segment.gives, options)
        except Exception as error:
            if ready.places and not self._ran:  # of lists no shape is told, which a Scan asks for
                with self._lent.lock:  # another thread may have met it before
                    self.selects = False
                    if self._switched is ready:
                        self._switched = None
                return self.run(tensors, setting)
            raise failure_of_session("the emulated model", error) from error
        self._ran = self._ran or bool(ready.places)
        del owners  # until here another thread may have had their place
        if ready.profiles is not None:
            with self._lent.lock:
                self._read_profile(ready)
        return {name: results[i] for i, name in enumerate(self._segment.gives)}

    def _replayed(self, tensors: Mapping[str, Value], setting: Setting) -> dict[str, Value] | None:
        """As :meth:`run`, by a CUDA graph; None where this segment or shape has none: it is a
        shorter way, no condition. Nothing of a graph that depends on values runs on the CPU.
        """
        try:
            with self._lent.lock:
                if self._captured is None:
                    self._captured = CapturedSession(
                        without_branches(self._packed.unpacked()),
                        self._constants,
                        self._threads,
                        self._device,
                    )
            found = self._captured.run(tensors, setting)
        except Exception:  # of ONNX Runtime there are many kinds
            found = None
        if found is None:
            # Not both: the other way has sessions of its own, with the device's memory.
            self._captures, self._captured = False, None
        return found

    def _session_for(self, setting: Setting) -> _Ready:
        """The session without switches where this setting came often enough, else with them."""
        key = setting.tobytes()
        if key in self._settled:
            return self._settled[key]
        uses = self._uses[key] = self._uses.pop(key, 0) + 1
        if uses > _WORTH_SETTLING and self._settles:
            del self._uses[key]
            if len(self._settled) == _SETTLED:
                del self._settled[next(iter(self._settled))]
            self._settled[key] = self._opened(self.as_set(setting))
            return self._settled[key]
        if len(self._uses) > 4 * _SETTLED:
            del self._uses[next(iter(self._uses))]
        if self._switched is None:
            self._switched = self._with_switches()
        return self._switched

    def _opened(self, segment: Segment, places: frozenset[str] = frozenset()) -> _Ready:
        profiles, profile = None, None
        if self._device != CPU:
            profiles = tempfile.TemporaryDirectory(prefix="bisect-trt-")
            profile = str(Path(profiles.name) / "profile")
        session = switched_session(segment.model, self._threads, self._device, profile)
        named = replace(segment, model=onnx.ModelProto())
        return _Ready(session, caller(session), named, places, profiles)

    def _read_profile(self, ready: _Ready) -> None:
        profiles, ready.profiles = ready.profiles, None
        if profiles is not None:
            self.on_cpu = tuple(cpu_nodes(ready.session))
            profiles.cleanup()

    def _switches(self, ready: _Ready, setting: Setting) -> Mapping[str, Value]:
        """Flags and weights as the setting has them; those of the last run where it is the same."""
        known = (ready, setting.tobytes())
        if self._fed[0] == known and self in self._lent.by:
            return self._fed[1]
        states = [value_of(state) for state in self._switch]
        left, places = ready.segment.flags, ready.places
        feed = {
            name: states[2 * (name in places) + bool(state)]
            for name, state in zip(self._flags, setting, strict=False)
            if name in left
        }
        lowered = setting[len(self._flags) :]
        owners = []
        for (name, weight), low in zip(self._segment.weights.items(), lowered, strict=True):
            precision = weight.lowered if low else weight.pinned
            # Two layers may read one constant in two precisions, of which the store keeps one.
            owners.append(self._constants.owner(weight.tensor, precision))
            feed[name] = value_of(owners[-1])
        self._lent.by[self], self._fed = owners, (known, feed)
        return feed
