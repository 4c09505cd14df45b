"""The device that computes the emulator's FP32: the CPU, or one GPU in strict FP32."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
from dataclasses import dataclass
from functools import cache

import onnxruntime as ort

TF32_OVERRIDE = "NVIDIA_TF32_OVERRIDE"
"""The environment variable that decides over TF32 in CUDA's libraries."""

CPU_PROVIDER, CUDA_PROVIDER = "CPUExecutionProvider", "CUDAExecutionProvider"


@dataclass(frozen=True)
class Device:
    """A device that sessions run on.

    ``provider`` and its ``options`` are execution provider and settings, ``memory`` is ONNX
    Runtime's name of its memory. ``number`` counts this process' devices, ``name`` is for people
    and caches.
    """

    provider: str = CPU_PROVIDER
    options: tuple[tuple[str, str], ...] = ()
    memory: str = "cpu"
    number: int = 0
    name: str = "cpu"

    @property
    def providers(self) -> list[str | tuple[str, dict[str, str]]]:
        """The execution providers of a session; the CPU takes nodes that the device cannot."""
        if self.provider == CPU_PROVIDER:
            return [CPU_PROVIDER]
        return [(self.provider, dict(self.options)), CPU_PROVIDER]


CPU = Device()


def cuda_device(name: str = "cuda", number: int = 0, memory_bytes: int = 0) -> Device:
    """Returns GPU ``number`` in strict FP32, limited to ``memory_bytes`` unless that is 0."""
    options = {
        "device_id": str(number),
        "use_tf32": "0",  # TF32 is emulated like the other precisions
        # EXHAUSTIVE picks an algorithm by timing: the next process could give another answer.
        "cudnn_conv_algo_search": "HEURISTIC",
        # The default doubles the arena; an engine on the same GPU needs memory too.
        "arena_extend_strategy": "kSameAsRequested",
    }
    if memory_bytes:
        options["gpu_mem_limit"] = str(memory_bytes)
    return Device(CUDA_PROVIDER, tuple(options.items()), "cuda", number, name)


def why_no_provider() -> str | None:
    """Says why this ONNX Runtime cannot use CUDA; None where it has the provider."""
    if CUDA_PROVIDER in ort.get_available_providers():
        return None
    return (
        "this ONNX Runtime has no CUDA provider: pip uninstall onnxruntime, then pip install "
        "onnxruntime-gpu (the extra [ort-cuda])"
    )


@cache
def load_cuda_libraries() -> None:
    """Loads CUDA's libraries from NVIDIA's Python packages, where the system has none; once."""
    # nvidia-smi, whose numbers name the GPUs, counts them in this order.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    # Errors only: ONNX Runtime warns of each provider that is not a plugin.
    ort.set_default_logger_severity(3)
    if hasattr(ort, "preload_dlls"):
        # It prints what it does not find; opening a session then reports that CUDA does not start.
        with contextlib.redirect_stdout(io.StringIO()):
            ort.preload_dlls()


def tf32_override() -> dict[str, str]:
    """The environment variable that decides over TF32 in CUDA's libraries, where it is set."""
    # It is part of a runner's versions, because answers depend on it.
    value = os.environ.get(TF32_OVERRIDE)
    return {} if value is None else {TF32_OVERRIDE: value}


def visible_gpus() -> list[str]:
    """The GPUs that CUDA_VISIBLE_DEVICES lists, or the numbers of all GPUs where it is not set."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [device.strip() for device in listed.split(",") if device.strip()]
    try:
        # Its exit status warns of broken hardware too: the list counts.
        printed = _nvidia_smi("--list-gpus", check=False)
    except (OSError, subprocess.SubprocessError):
        return []
    lines = [line for line in printed.splitlines() if line.startswith("GPU ")]
    return [str(number) for number in range(len(lines))]


def gpu_facts(device: str) -> tuple[str, int]:
    """Returns name and free bytes of a GPU of CUDA_VISIBLE_DEVICES; ("cuda", 0) where unknown."""
    name, free = _query_gpu(device, "name,memory.free")
    return name or "cuda", int(free) << 20 if free.isdecimal() else 0


def gpu_versions(device: str) -> dict[str, str]:
    """Returns a GPU's name and its driver's version; empty where unknown."""
    name, driver = _query_gpu(device, "name,driver_version")
    return {"gpu": name, "driver": driver} if driver else {}


@dataclass(frozen=True)
class GpuCondition:
    """What a GPU does while engines are timed on it.

    ``clock_mhz`` is the multiprocessors' clock, ``max_clock_mhz`` its limit. ``processes`` is how
    many compute on the GPU, None where that is hidden.
    """

    clock_mhz: int
    max_clock_mhz: int
    processes: int | None


def gpu_condition() -> GpuCondition | None:
    """The condition of the first GPU of CUDA_VISIBLE_DEVICES; None where it is unknown."""
    gpus = visible_gpus()
    clocks = _query_gpu(gpus[0], "clocks.sm,clocks.max.sm") if gpus else ("", "")
    if not all(clock.isdecimal() for clock in clocks):
        return None
    try:
        listed = _nvidia_smi("-i", gpus[0], "--query-compute-apps=pid", "--format=csv,noheader")
        processes = sum(line.strip().isdecimal() for line in listed.splitlines())
    except (OSError, subprocess.SubprocessError):
        processes = 0
    # A container may not see processes, not even its own.
    return GpuCondition(int(clocks[0]), int(clocks[1]), processes or None)


def _query_gpu(device: str, query: str) -> tuple[str, str]:
    """Two facts of a GPU; both empty where unknown."""
    try:
        csv = _nvidia_smi("-i", device, f"--query-gpu={query}", "--format=csv,noheader,nounits")
    except (OSError, subprocess.SubprocessError):
        return "", ""
    # The name may contain a comma; the second fact does not.
    first, _, second = csv.strip().partition("\n")[0].rpartition(",")
    return first.strip(), second.strip()


def _nvidia_smi(*arguments: str, check: bool = True) -> str:
    command = ["nvidia-smi", *arguments]
    # A broken driver may hang.
    answer = subprocess.run(command, capture_output=True, text=True, timeout=30.0, check=check)
    return answer.stdout
