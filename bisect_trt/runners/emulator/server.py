"""The emulator as an object that serves plans from another process."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import onnx
from numpy.typing import NDArray

from bisect_trt.core.errors import BadInputError
from bisect_trt.core.machine.memory import keep_large_blocks_apart, share_arenas
from bisect_trt.core.machine.session_habits import SessionHabits, adopt, habits
from bisect_trt.core.precision import Precision, PrecisionPlan
from bisect_trt.core.sample import Sample
from bisect_trt.graph.files.save import PROTOBUF_LIMIT, held_size, weights_size, write_model
from bisect_trt.runners.device_check import DeviceChecker
from bisect_trt.runners.emulator.runner import EmulatedRunner
from bisect_trt.runners.ort.devices import CPU, Device

Arrays = dict[str, NDArray[Any]]
SERVER = "bisect_trt.runners.emulator.server:EmulationServer"


def server_arguments(
    model: onnx.ModelProto,
    base: Precision,
    threads: int,
    device: Device = CPU,
    *,
    elsewhere: bool = False,
) -> dict[str, Any]:
    """What an :class:`EmulationServer` is made of.

    Args:
        model: the FP32 model.
        base: what unpinned layers run in.
        threads: how many each inference may use.
        device: what computes, as the server's process sees it.
        elsewhere: whether it may be on another machine, which has not the model's files.

    Raises:
        BadInputError: the model does not fit into one message.
    """
    if (weights_size(model) if elsewhere else held_size(model)) >= PROTOBUF_LIMIT:
        how = "to other machines; leave --ray out" if elsewhere else "from memory; give its file"
        raise BadInputError(f"--workers: a model above 2 GB cannot be sent {how}")
    stream = io.BytesIO()
    if elsewhere:
        write_model(model, stream)
    return {
        "model": stream.getvalue() or model.SerializeToString(),
        "base": base.value,
        "threads": threads,
        # Another machine has other cores; its actor shares out what it reserved.
        "habits": replace(habits(), threads=0) if elsewhere else habits(),
        "device": device,
    }


class EmulationServer:
    """Holds the model; ``threads`` and ``device`` are what one worker may use, ``habits`` are those
    of who hired it.

    Raises:
        RunnerUnavailableError: the device is none that the emulator can rely on.
    """

    def __init__(
        self,
        model: bytes,
        base: str,
        threads: int,
        habits: SessionHabits,
        device: Device = CPU,
    ) -> None:
        if device != CPU:  # it may be on another machine than whoever hired it
            DeviceChecker(device).check()
        share_arenas()
        adopt(habits)
        if habits.frees_activations:
            keep_large_blocks_apart()
        proto = onnx.load_from_string(model)
        self._runner = EmulatedRunner(proto, Precision(base), threads=threads, device=device)

    def outputs(self, plan: str, samples: Sequence[Sample]) -> list[Arrays]:
        """The outputs of each of ``samples`` under ``plan`` (its JSON)."""
        found = self._runner.outputs(PrecisionPlan.from_json(plan), samples)
        return [dict(outputs) for outputs in found]

    def effects(
        self, sample: Sample, precision: str, layers: Sequence[str]
    ) -> list[tuple[str, Arrays | None]]:
        """As :meth:`EmulatedRunner.effects`, all in one answer."""
        found = self._runner.effects(sample, Precision(precision), layers)
        return [(name, None if outputs is None else dict(outputs)) for name, outputs in found]
