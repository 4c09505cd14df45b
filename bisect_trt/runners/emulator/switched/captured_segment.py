"""A segment that is replayed by a CUDA graph where it can be, and else run kernel by kernel."""

from __future__ import annotations

from collections.abc import Mapping

from bisect_trt.graph.passes.branchless import without_branches
from bisect_trt.graph.passes.packed_segment import PackedSegment
from bisect_trt.runners.emulator.constants.constant_store import ConstantStore
from bisect_trt.runners.emulator.constants.device_constants import DeviceConstants
from bisect_trt.runners.emulator.switched.captured_session import CapturedSession
from bisect_trt.runners.emulator.switched.segment_form import SegmentForm
from bisect_trt.runners.emulator.switched.segment_session import SegmentSession
from bisect_trt.runners.emulator.switched.switches import Setting
from bisect_trt.runners.ort.devices import Device
from bisect_trt.runners.ort.values import Value


class CapturedSegment(SegmentSession):
    """As its base; the graph is captured by the first inference.

    Args:
        packed: a part of a switched model.
        constants: of the model, in the memory of ``device``.
        threads: what one call may use on the host; 0 leaves it to the machine.
        device: a GPU of CUDA's.
    """

    def __init__(
        self,
        packed: PackedSegment,
        constants: ConstantStore | DeviceConstants,
        threads: int,
        device: Device,
    ) -> None:
        super().__init__(packed.named, constants, SegmentForm(packed, threads, device))
        self._threads, self._device = threads, device
        self._captured: CapturedSession | None = None
        self._captures = True

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
        try:
            with self._constants.lent.lock:
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
