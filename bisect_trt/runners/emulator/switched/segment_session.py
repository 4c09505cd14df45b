"""One segment of a switched model as a session, fed with the switches of a plan."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from bisect_trt.core.errors import BisectError
from bisect_trt.graph.passes.branchless import without_branches
from bisect_trt.graph.passes.segmented import Segment
from bisect_trt.runners.emulator.constants.constant_store import ConstantStore
from bisect_trt.runners.emulator.constants.device_constants import DeviceConstants
from bisect_trt.runners.emulator.switched.captured_session import CapturedSession
from bisect_trt.runners.emulator.switched.segment_form import Ready, SegmentForm
from bisect_trt.runners.emulator.switched.shared_forms import Part
from bisect_trt.runners.emulator.switched.switches import Setting
from bisect_trt.runners.ort.devices import CUDA_PROVIDER, Device
from bisect_trt.runners.ort.profiles import cpu_nodes
from bisect_trt.runners.ort.sessions import failure_of_session, giving_back
from bisect_trt.runners.ort.values import Value, owned, value_of


class SegmentSession:
    """Runs ``segment``; its sessions are made when they are first needed.

    ``on_cpu`` names what the CPU ran in place of another device, known after the first inference.

    Args:
        segment: a part of a switched model.
        constants: of the model, in the memory of ``device``; their lock is held while sessions are
            made, but by :meth:`open`.
        threads: what one call may use; 0 leaves it to the machine.
        device: what computes.
        settles: whether a setting that comes often gets a session without switches.
        part: whose sessions to run, where others run them too, of the same constants; else it has
            its own.
    """

    def __init__(
        self,
        segment: Segment,
        constants: ConstantStore | DeviceConstants,
        threads: int,
        device: Device,
        *,
        settles: bool = True,
        part: Part | None = None,
    ) -> None:
        self.form = part.form if part else SegmentForm(segment, threads, device, settles=settles)
        self._names = part.names if part else None
        self._constants, self._threads = constants, threads
        self._device = device
        # A session that comes for many runs begins with the memory that others leave.
        self._options = None if settles else giving_back()
        self.on_cpu: tuple[str, ...] = ()
        self._lent = constants.lent
        inside = self._names.inside if self._names else {}
        self._outside = {inside.get(name, name): name for name in segment.takes}
        self._gives = segment.gives
        self._given = [inside.get(name, name) for name in segment.gives]
        self._flags = [inside.get(name, name) for name in segment.flags]
        self._weights = {inside.get(name, name): w for name, w in segment.weights.items()}
        # The values must outlive the call, and making one costs more than passing it.
        self._switch = [
            owned(np.array(state, dtype), device.memory, device.number)
            for dtype in (np.bool_, np.int64)
            for state in (False, True)
        ]
        self._fed: tuple[tuple[Ready, bytes] | None, dict[str, Value]] = (None, {})
        self._captured: CapturedSession | None = None
        self._captures = device.provider == CUDA_PROVIDER

    @property
    def is_open(self) -> bool:
        """Whether :meth:`open` has nothing to do."""
        return self.form.is_open or self._captures

    def open(self) -> None:
        """As :meth:`SegmentForm.open`, where that is needed. No lock is taken: whoever holds it may
        wait for the threads that open.

        Raises:
            RunnerFailedError: with ONNX Runtime's words.
        """
        if not self.is_open:
            try:
                self.form.open()
            except BisectError as error:
                self._name(error)
                raise

    def close(self) -> None:
        """Let all sessions go; whoever runs next opens one, who is running ends by what it has."""
        with self._lent.lock:
            self._fed = (None, {})
            self.form.close()
            self._lent.by.pop(self, None)

    def states(self, setting: Setting) -> dict[str, bool]:
        """What ``setting`` says of each flag, and of each weight: whether it is rounded as for a
        lowered layer. By the names of its form.
        """
        return dict(zip([*self._flags, *self._weights], setting.tolist(), strict=True))

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
            try:
                ready = self.form.session_for(setting)
            except BisectError as error:
                self._name(error)
                raise
            feed = dict(self._switches(ready, setting))
            owners = self._lent.by[self]
            options, self._options = self._options, None
        for name in ready.segment.takes:
            feed[name] = tensors[self._outside[name]]
        try:
            results = ready.call(feed, self._given, options)
        except Exception as error:
            if ready.places and not self.form.ran:  # of lists no shape is told: a Scan asks for it
                with self._lent.lock:
                    self.form.refuse_lists(ready)
                return self.run(tensors, setting)
            self._name(error)
            raise failure_of_session("the emulated model", error) from error
        self.form.ran = self.form.ran or bool(ready.places)
        del owners  # until here another thread may have had their place
        if ready.profiles is not None:
            with self._lent.lock:
                self._read_profile(ready)
        return {name: results[i] for i, name in enumerate(self._gives)}

    def _name(self, error: Exception) -> None:
        """Let the message of ``error`` say the segment's own names."""
        if self._names is not None:
            error.args = (self._names.own(str(error)),)

    def _replayed(self, tensors: Mapping[str, Value], setting: Setting) -> dict[str, Value] | None:
        """As :meth:`run`, by a CUDA graph; None where this segment or shape has none: it is a
        shorter way, no condition. Nothing of a graph that depends on values runs on the CPU.
        """
        try:
            with self._lent.lock:
                if self._captured is None:
                    self._captured = CapturedSession(
                        without_branches(self.form.unpacked()),
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

    def _read_profile(self, ready: Ready) -> None:
        profiles, ready.profiles = ready.profiles, None
        if profiles is not None:
            self.on_cpu = tuple(cpu_nodes(ready.session))
            profiles.cleanup()

    def _switches(self, ready: Ready, setting: Setting) -> Mapping[str, Value]:
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
        for (name, weight), low in zip(self._weights.items(), lowered, strict=True):
            precision = weight.lowered if low else weight.pinned
            # Two layers may read one constant in two precisions, of which the store keeps one.
            owners.append(self._constants.owner(weight.tensor, precision))
            feed[name] = value_of(owners[-1])
        self._lent.by[self], self._fed = owners, (known, feed)
        return feed
