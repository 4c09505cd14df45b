"""A segment that is replayed by a CUDA graph where it can be, and else run kernel by kernel."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from bisect_trt.core.errors import BisectError
from bisect_trt.graph.passes.segments.branchless import without_branches
from bisect_trt.graph.passes.segments.packed_segment import PackedSegment
from bisect_trt.graph.passes.segments.segment import Segment
from bisect_trt.numerics.arrays import Arrays
from bisect_trt.runners.emulator.constants.constant_store import ConstantStore
from bisect_trt.runners.emulator.constants.device_constants import DeviceConstants
from bisect_trt.runners.emulator.switched.captured_session import CapturedSession
from bisect_trt.runners.emulator.switched.fixed_segment import fixed_segment
from bisect_trt.runners.emulator.switched.segment_form import SegmentForm
from bisect_trt.runners.emulator.switched.segment_session import SegmentSession
from bisect_trt.runners.emulator.switched.switches import Setting
from bisect_trt.runners.ort.devices import Device
from bisect_trt.runners.ort.values import Value, kept, owned, value_of, viewed

_A_SHAPE = 16
"""Elements of a tensor that may be a shape, or a part of one."""

_MOST_FIXED = 4
"""Sessions that are of one shape each, with memory of the device's each."""


class _Replayed(NamedTuple):
    """A session, which of the segment's switches are its own, and what the segment gives whatever
    the plan: its shapes tell it.
    """

    session: CapturedSession
    switches: NDArray[np.intp]
    given: Mapping[str, ort.OrtValue]

    def run(self, tensors: Mapping[str, Value], setting: Setting) -> dict[str, Value] | None:
        """As :meth:`CapturedSession.run`, with a setting of all the segment's switches."""
        found = self.session.run(tensors, setting[self.switches])
        if found is None:
            return None
        return found | {name: value_of(owner) for name, owner in self.given.items()}


class CapturedSegment(SegmentSession):
    """As its base; the graph is captured by the first inference. What follows from the shapes of
    its inputs is computed once for each: it would be the host's part of it.

    Args:
        packed: a part of a switched model.
        constants: of the model, in the memory of ``device``.
        threads: what one call may use on the host; 0 leaves it to the machine.
        device: a GPU of CUDA's.
        data: the model's inputs, whose values are no shapes.
    """

    def __init__(
        self,
        packed: PackedSegment,
        constants: ConstantStore | DeviceConstants,
        threads: int,
        device: Device,
        data: Collection[str] = (),
    ) -> None:
        super().__init__(packed.named, constants, SegmentForm(packed, threads, device))
        self._threads, self._device, self._data = threads, device, frozenset(data)
        self._sessions: dict[object, _Replayed] = {}
        # Told by the first inference: whether sessions are of one shape, and of which values.
        self._by_shape = True
        self._by_value: tuple[str, ...] = ()
        self._captures = True

    @property
    def captures(self) -> bool:
        """Whether inferences are replayed, as far as is known."""
        return self._captures

    @property
    def is_open(self) -> bool:
        """Whether :meth:`open` has nothing to do."""
        return self._captures or super().is_open

    def run(self, tensors: Mapping[str, Value], setting: Setting) -> dict[str, Value]:
        """As :meth:`SegmentSession.run`."""
        replayed = self._replayed(tensors, setting) if self._captures else None
        return super().run(tensors, setting) if replayed is None else replayed

    def _replayed(self, tensors: Mapping[str, Value], setting: Setting) -> dict[str, Value] | None:
        """As :meth:`run`, by a CUDA graph; None where this segment or shape has none: it is a
        shorter way, no condition. Nothing of a graph that depends on values runs on the CPU.
        """
        found = None
        try:
            with self._constants.lent.lock:
                replayed = self._session_for({name: viewed(tensors[name]) for name in self.takes})
            if replayed is not None:
                found = replayed.run(tensors, setting)
        except Exception:  # of ONNX Runtime there are many kinds
            found = None
        if found is None:
            # Not both: the other way has sessions of its own, with the device's memory.
            with self._constants.lent.lock:
                self._captures = False
                self._sessions.clear()
        return found

    def _session_for(self, arrays: Arrays) -> _Replayed | None:
        """What runs inputs of the shapes of ``arrays``; None where there were too many others."""
        found = self._sessions.get(self._key(arrays))
        if found is None and self._captures and len(self._sessions) < _MOST_FIXED:
            found = self._made(arrays)
            self._sessions[self._key(arrays)] = found  # making the first says what keys are
        return found

    def _key(self, arrays: Arrays) -> object:
        """What a session is made for: nothing in particular where no node asks for a shape."""
        shapes = tuple(a.shape for a in arrays.values()) if self._by_shape else ()
        return shapes, tuple(arrays[name].tobytes() for name in self._by_value)

    def _made(self, arrays: Arrays) -> _Replayed:
        """By shapes alone, or else by the values too of what may be the shapes of other segments'
        tensors.
        """
        segment = without_branches(self.form.unpacked())
        told = {name: arrays[name].copy() for name in self._by_value}
        try:
            return self._opened(segment, arrays, told)
        except BisectError:
            small = {n: a.copy() for n, a in arrays.items() if n not in self._data and _is_short(a)}
            if self._sessions or not small:
                raise
            made = self._opened(segment, arrays, small)
            self._by_value = tuple(small)
            return made

    def _opened(self, segment: Segment, arrays: Arrays, values: Arrays) -> _Replayed:
        def run(part: Segment) -> Arrays:
            session = CapturedSession(
                part, self._constants, self._threads, self._device, replays=False
            )
            fed = {name: value_of(owner) for name, owner in owners.items()}
            found = session.run(fed, np.zeros(len(part.flags) + len(part.weights), np.bool_))
            return {name: viewed(value).copy() for name, value in (found or {}).items()}

        owners = {name: owned(array) for name, array in arrays.items()}
        shapes = {name: array.shape for name, array in arrays.items()}
        fixed, given = fixed_segment(segment, shapes, values, run)
        session = CapturedSession(fixed, self._constants, self._threads, self._device)
        if not self._sessions:
            self._by_shape = fixed is not segment
        places = {n: i for i, n in enumerate((*segment.flags, *segment.weights))}
        left = [places[name] for name in (*fixed.flags, *fixed.weights)]
        return _Replayed(session, np.array(left, np.intp), {n: kept(a) for n, a in given.items()})


def _is_short(array: NDArray[Any]) -> bool:
    return array.dtype.kind == "i" and array.ndim <= 1 and array.size <= _A_SHAPE
