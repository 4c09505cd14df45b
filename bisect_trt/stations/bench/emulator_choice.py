"""Where the emulator computes: on the CPU, or on a GPU where that works and is asked for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import onnxruntime as ort

from bisect_trt.core.errors import BisectError, MachineError, RunnerUnavailableError, one_line
from bisect_trt.core.finding import Finding
from bisect_trt.core.names import some_of
from bisect_trt.core.precision import Precision, PrecisionPlan
from bisect_trt.core.sample import Sample
from bisect_trt.probe.journal import Journal, Row, content_key
from bisect_trt.runners.device_check import why_not_on_cuda
from bisect_trt.runners.emulator.runner import EmulatedRunner
from bisect_trt.runners.ort.devices import (
    CPU,
    Device,
    cuda_device,
    gpu_facts,
    visible_gpus,
    why_no_provider,
)
from bisect_trt.runners.ort.side_by_side import side_by_side
from bisect_trt.stations.asked.settings import Settings
from bisect_trt.stations.case.case import Case

_ALONE, _BESIDE = 0.9, 0.5
"""What the emulators' activations may take of the GPU's free memory: alone, and beside an engine
that is built and run there too.
"""

_TIMED = 2
_PROBE = 2
"""A probe's plain inferences on the CPU: 2.6 to 3.6 of OCR models (benchmarks/results/cpu.md), 0.8
to 1.1 of large ones, of which a GPU is faster by far (gpu.md)."""
_A_NODE_S = 5e-6
"""A GPU's least seconds a node of a probe: replayed from a CUDA graph the demo's detector takes
10 us, of which the rounding and the choice beside each node are most. A session of 20,000 nodes is
open there after more than a minute: what cannot win is not tried."""

_SHOWN = 5


def emulator_device(settings: Settings) -> tuple[Device, tuple[Finding, ...]]:
    """What ``--emulate-on`` names, and what there is to say of it; for ``auto`` CUDA where it
    works, to be timed by :func:`open_emulator`. Nothing is written.

    Raises:
        RunnerUnavailableError: CUDA was asked for and cannot work here.
    """
    asked = settings.emulate_on
    if asked == "cpu" or settings.ray is not None:  # a cluster's GPUs are none of this machine's
        return (cuda_device("cuda on Ray") if asked == "cuda" else CPU), ()
    if asked == "auto" and why_no_provider() is not None:
        return CPU, ()
    reason = why_not_on_cuda()
    if reason is not None and asked == "cuda":
        raise RunnerUnavailableError(f"--emulate-on cuda: {reason}")
    if reason is not None:
        words = f"emulated on the CPU, since CUDA does not work here: {reason}"
        return CPU, (Finding("emulate-on", "", words),)
    gpus = visible_gpus() or ["0"]
    name, free = gpu_facts(gpus[0])
    share = _ALONE if settings.runner == "emulated" else _BESIDE
    # This process' sessions are on the first GPU, as are those of every len(gpus)-th worker.
    sharing = 1 + (-(-settings.workers // len(gpus)) if settings.workers > 1 else 0)
    return cuda_device(name, 0, int(free * share / sharing)), ()


def open_emulator(
    case: Case, device: Device, journal: Journal | None
) -> tuple[EmulatedRunner, tuple[Finding, ...]]:
    """The emulator of this process, and what there is to say of where it computes.

    Args:
        case: the model, the inputs and the settings.
        device: as of :func:`emulator_device`; ``auto`` takes it where a probe there is faster than
            on the CPU, which makes several beside each other.
        journal: remembers what was chosen, so that the same command goes on with its own answers.
    """
    settings, turns = case.settings, case.reference.turns
    if device == CPU or settings.ray is not None:
        return EmulatedRunner(case.graph, settings.precision, turns=turns), ()
    key = content_key("emulate-on", case.key, settings.emulate_on, device.name, ort.__version__)
    found = journal.recall(key) if journal is not None else None
    emulator = EmulatedRunner(case.graph, settings.precision, device=device, turns=turns)
    if found is None:
        try:
            meta = _tried(case, emulator, timed=settings.emulate_on == "auto")
        except MachineError as error:  # whose memory others took: another run may find it free
            if settings.emulate_on != "auto":
                raise
            meta, journal = _passed_over(one_line(error)), None
        if journal is not None:
            journal.record([Row(key, "emulate-on", meta)])
    else:
        meta = found[0]
    findings = _findings(meta["layers_on_cpu"], device, meta["failure"])
    if not meta["chosen"]:
        emulator = EmulatedRunner(
            case.graph, settings.precision, constants=emulator.constants, turns=turns
        )
    return emulator, findings


def _tried(case: Case, emulator: EmulatedRunner, *, timed: bool) -> dict[str, Any]:
    """What one inference shows, plain data: whether ``emulator`` is chosen, which layers the CPU
    ran in its device's place, and why nothing ran. Where the CPU is faster than a GPU can be, it is
    the CPU's. Raises :class:`MachineError` where the device gave out, which tells nothing of it.
    """
    sample, plan = case.samples[0], PrecisionPlan(Precision.FP32)
    on_cpu = _on_cpu(case, sample) if timed else math.inf
    nodes = sum(node.op_type != "Constant" for node in case.graph.proto.graph.node)
    if on_cpu < _A_NODE_S * nodes:
        return _passed_over()

    def probe() -> object:
        emulator.forget()  # it would begin at the last cut
        return list(emulator.outputs(plan, [sample]))

    try:
        seconds = _seconds(probe, _TIMED if timed else 0)
    except BisectError as error:
        if not timed or isinstance(error, MachineError):
            raise
        return _passed_over(one_line(error))
    if not seconds < on_cpu:
        return _passed_over()
    return {"chosen": True, "layers_on_cpu": emulator.layers_on_cpu, "failure": ""}


def _passed_over(failure: str = "") -> dict[str, Any]:
    """What is known of a device that is not taken."""
    return {"chosen": False, "layers_on_cpu": [], "failure": failure}


def _on_cpu(case: Case, sample: Sample) -> float:
    """About the seconds of a probe on the CPU, at the pace of as many as are made beside each other
    there. Told by the reference: it is open, and an emulator of a large model is not opened for
    nothing.
    """
    count = case.reference.at_once(sample)

    def beside() -> object:
        return tuple(side_by_side(case.reference.outputs, [sample] * count, lambda _: count))

    return _PROBE * _seconds(beside, _TIMED) / count


def _seconds(run: Callable[[], object], times: int) -> float:
    """The least of ``times`` calls after one that is not counted; 0 where none is."""
    run()
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        run()
        taken.append(time.perf_counter() - began)
    return min(taken, default=0.0)


def _findings(layers: Sequence[str], device: Device, failure: str) -> tuple[Finding, ...]:
    if failure:
        words = f"emulated on the CPU, since this model does not run on {device.name}: {failure}"
        return (Finding("emulate-on", "", words),)
    if not layers:
        return ()
    named = some_of([repr(name) for name in layers], _SHOWN)
    words = (
        f"the emulator on {device.name} runs layers on the CPU, for which CUDA has no kernel: "
        f"{named}; the numbers are the same, the time is not"
    )
    return (Finding("cpu-fallback", layers[0], words),)
