"""Segments captured as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from bisect_trt.base.errors import BisectError, RunnerFailedError
from bisect_trt.metrics.arrays import Arrays
from bisect_trt.model.segment_forms import (
    giving,
    told_by_shapes,
    with_constants,
    with_weights_chosen,
    without_branches,
)
from bisect_trt.model.segments import PackedSegment
from bisect_trt.model.switched import Segment
from bisect_trt.runners.constants import ConstantStore, DeviceConstants
from bisect_trt.runners.device import CUDA_PROVIDER, Device
from bisect_trt.runners.ort_session import switched_session
from bisect_trt.runners.segment_session import SegmentForm, SegmentSession, Setting
from bisect_trt.runners.values import Value, kept, owned, value_of, viewed

_MOST_SHAPES = 8
"""A graph is of one shape and is never let go; samples of more shapes are run without."""

_NO_GRAPH = "-1"
"""What ONNX Runtime takes for: neither capture nor replay."""

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class _Bound:
    """The places that one graph reads and writes."""

    binding: ort.IOBinding
    options: ort.RunOptions
    inputs: Mapping[str, ort.OrtValue]
    outputs: Mapping[str, ort.OrtValue]


class CapturedSession:
    """Runs ``segment`` with every input and output in a place of its own.

    Raises:
        RunnerFailedError: ONNX Runtime cannot capture it (nodes run on the host), or is too old to
            say where its inputs are read.
    """

    def __init__(
        self,
        segment: Segment,
        constants: ConstantStore | DeviceConstants,
        threads: int,
        device: Device,
        *,
        replays: bool = True,
    ) -> None:
        if not hasattr(ort.InferenceSession, "get_input_memory_infos"):
            raise RunnerFailedError("this ONNX Runtime does not say where inputs are read")
        model, choices = with_weights_chosen(segment)
        self._session = switched_session(model, threads, _capturing(device) if replays else device)
        places = zip(
            self._session.get_inputs(), self._session.get_input_memory_infos(), strict=True
        )
        at_home = [i.name for i, info in places if info.name.lower() != device.memory]
        if at_home and replays:
            # A replay repeats kernels only: what the host reads of it would stay the first one's.
            raise RunnerFailedError(f"the host reads the input {at_home[0]!r}")
        self._takes, self._gives = segment.takes, segment.gives
        self._device = device
        self._lock = Lock()
        count = len(segment.flags) + len(segment.weights)
        self._switches = self._place([max(1, count)], np.bool_)
        names = (*segment.flags, *(choices[name].switch for name in segment.weights))
        self._switch_of = dict(zip(names, range(count), strict=True))
        self._weights = {}
        for name, weight in segment.weights.items():
            of = choices[name]
            self._weights[of.pinned] = constants.owner(weight.tensor, weight.pinned)
            self._weights[of.reduced] = constants.owner(weight.tensor, weight.reduced)
        self._bound: dict[Shapes, _Bound] = {}

    def run(self, tensors: Mapping[str, Value], setting: Setting) -> dict[str, Value] | None:
        """What the segment gives, in the host's memory; None for a shape too many.

        Raises:
            Exception: ONNX Runtime's.
        """
        arrays = {name: viewed(tensors[name]) for name in self._takes}
        shapes = tuple(array.shape for array in arrays.values())
        with self._lock:
            if shapes not in self._bound and len(self._bound) == _MOST_SHAPES:
                return None
            if setting.size:
                self._switches.update_inplace(np.ascontiguousarray(setting))
            bound = self._bound.get(shapes)
            if bound is None:
                bound = self._bound[shapes] = self._bind(arrays)
            else:
                for name, array in arrays.items():
                    bound.inputs[name].update_inplace(array)
                self._session.run_with_iobinding(bound.binding, bound.options)
            return {name: value_of(kept(place.numpy())) for name, place in bound.outputs.items()}

    def _bind(self, arrays: Mapping[str, NDArray[Any]]) -> _Bound:
        """The places for inputs of new shapes, after one run without a graph: it tells what shapes
        the outputs have.
        """
        binding = self._session.io_binding()
        inputs = {name: self._place(a.shape, a.dtype.type) for name, a in arrays.items()}
        for name, place in inputs.items():
            place.update_inplace(np.ascontiguousarray(arrays[name]))
            binding.bind_ortvalue_input(name, place)
        for name, owner in self._weights.items():
            binding.bind_ortvalue_input(name, owner)
        memory, number = self._device.memory, self._device.number
        for name, index in self._switch_of.items():
            at = self._switches.data_ptr() + index
            binding.bind_input(name, memory, number, np.bool_, [], at)
        for name in self._gives:
            binding.bind_output(name, memory, number)
        self._session.run_with_iobinding(binding, _options(_NO_GRAPH))
        outputs = dict(zip(self._gives, binding.get_outputs(), strict=True))
        for name, place in outputs.items():
            binding.bind_ortvalue_output(name, place)
        return _Bound(binding, _options(str(len(self._bound))), inputs, outputs)

    def _place(self, shape: Any, dtype: Any) -> ort.OrtValue:
        return ort.OrtValue.ortvalue_from_shape_and_type(
            list(shape), dtype, self._device.memory, self._device.number
        )


def _capturing(device: Device) -> Device:
    if device.provider != CUDA_PROVIDER:
        return device
    return replace(device, options=(*device.options, ("enable_cuda_graph", "1")))


def _options(number: str) -> ort.RunOptions:
    options = ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", number)
    return options


def fixed_segment(
    segment: Segment,
    shapes: Mapping[str, tuple[int, ...]],
    values: Arrays,
    run: Callable[[Segment], Arrays],
) -> tuple[Segment, Arrays]:
    """``segment`` with what follows from ``shapes`` and ``values`` as constants, and those it would
    give.

    Raises:
        Exception: that of ``run``.
    """
    known = dict(values)
    fixed = with_constants(segment, known) if known else segment
    while names := told_by_shapes(fixed, shapes, known):
        known |= run(giving(fixed, names))
        fixed = with_constants(fixed, known)
    return fixed, {name: known[name] for name in segment.gives if name in known}


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
