"""A segment as a CUDA graph: a plan is an array of booleans in the GPU's memory, and a probe one
launch in place of thousands.

Of a network of many small layers a probe takes as long as the host needs to launch its kernels:
ViT-L's took 26.8 ms kernel by kernel and takes 11.0 ms replayed (benchmarks/results/gpu.md).
The kernels are the same, and so are the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from bisect_trt.core.errors import RunnerFailedError
from bisect_trt.graph.passes.segments.segment import Segment
from bisect_trt.graph.passes.segments.weights_chosen import with_weights_chosen
from bisect_trt.runners.emulator.constants.constant_store import ConstantStore
from bisect_trt.runners.emulator.constants.device_constants import DeviceConstants
from bisect_trt.runners.emulator.switched.switches import Setting
from bisect_trt.runners.ort.devices import CUDA_PROVIDER, Device
from bisect_trt.runners.ort.sessions import switched_session
from bisect_trt.runners.ort.values import Value, kept, value_of, viewed

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

    Args:
        segment: one that selects and does not branch.
        constants: of the model, in the memory of ``device``.
        threads: what one call may use on the host; 0 leaves it to the machine.
        device: what computes.
        replays: False for one that is run once; it may do on the host what it likes.

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
            self._weights[of.lowered] = constants.owner(weight.tensor, weight.lowered)
        self._bound: dict[Shapes, _Bound] = {}

    def run(self, tensors: Mapping[str, Value], setting: Setting) -> dict[str, Value] | None:
        """What the segment gives, in the host's memory; None for a shape too many.

        Args:
            tensors: at least what it takes, in the host's memory.
            setting: of its switches.

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
