"""Where ONNX Runtime computes the emulator's FP32: on the CPU, or on one GPU in strict FP32."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
from dataclasses import dataclass
from functools import cache

import onnxruntime as ort

CPU_PROVIDER, CUDA_PROVIDER = "CPUExecutionProvider", "CUDAExecutionProvider"
_DRIVER_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Device:
    """One device as sessions are made for it: ``provider`` with ``options``, ``memory`` as ONNX
    Runtime names it, ``number`` as this process counts, ``name`` for people and caches.
    """

    provider: str = CPU_PROVIDER
    options: tuple[tuple[str, str], ...] = ()
    memory: str = "cpu"
    number: int = 0
    name: str = "cpu"

    @property
    def providers(self) -> list[str | tuple[str, dict[str, str]]]:
        """What a session is told; the CPU takes what the device has no kernel for."""
        if self.provider == CPU_PROVIDER:
            return [CPU_PROVIDER]
        return [(self.provider, dict(self.options)), CPU_PROVIDER]


CPU = Device()


def cuda_device(name: str = "cuda", number: int = 0, memory_bytes: int = 0) -> Device:
    """GPU ``number`` in strict FP32."""
    options = {
        "device_id": str(number),
        "use_tf32": "0",
        # EXHAUSTIVE takes the fastest of a few timings: the same plan could get another answer in
        # the next process.
        "cudnn_conv_algo_search": "HEURISTIC",
        # The default doubles what it holds; an engine on the same GPU needs memory too.
        "arena_extend_strategy": "kSameAsRequested",
    }
    if memory_bytes:
        options["gpu_mem_limit"] = str(memory_bytes)
    return Device(CUDA_PROVIDER, tuple(options.items()), "cuda", number, name)


def why_no_provider() -> str | None:
    """Why this ONNX Runtime cannot use CUDA at all; None where it has the provider."""
    if CUDA_PROVIDER in ort.get_available_providers():
        return None
    return (
        "this ONNX Runtime has no CUDA provider: pip uninstall onnxruntime, then pip install "
        "onnxruntime-gpu (the extra [ort-cuda])"
    )


@cache
def load_cuda_libraries() -> None:
    """Find CUDA's libraries in NVIDIA's own packages, where the system has none; once. From here on
    ONNX Runtime tells errors alone: it warns of each provider that is no plugin.
    """
    # As the driver's tool counts GPUs, by whose numbers they are named.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    ort.set_default_logger_severity(3)
    if hasattr(ort, "preload_dlls"):
        # What it does not find it prints; the session then says that CUDA does not start.
        with contextlib.redirect_stdout(io.StringIO()):
            ort.preload_dlls()


def tf32_override() -> dict[str, str]:
    """The variable that decides over TF32 in every CUDA library of a process, where it is set:
    answers depend on it.
    """
    value = os.environ.get("NVIDIA_TF32_OVERRIDE")
    return {} if value is None else {"NVIDIA_TF32_OVERRIDE": value}


def visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES may name here: its own list where it is set, else the numbers of
    the driver's GPUs.
    """
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [device.strip() for device in listed.split(",") if device.strip()]
    try:
        command = ["nvidia-smi", "--list-gpus"]
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=_DRIVER_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = [line for line in answer.stdout.splitlines() if line.startswith("GPU ")]
    return [str(number) for number in range(len(lines))]


def gpu_facts(device: str) -> tuple[str, int]:
    """The name and the free bytes of GPU ``device`` (as CUDA_VISIBLE_DEVICES names it), as the
    driver's tool says; ("cuda", 0) where that cannot be asked.
    """
    try:
        name, free = _asked(device, "name,memory.free")
        return name or "cuda", int(free) << 20
    except (OSError, subprocess.SubprocessError, ValueError):
        return "cuda", 0


def gpu_versions(device: str) -> dict[str, str]:
    """GPU ``device`` and its driver, by name, as the driver's tool says; nothing where that cannot
    be asked.
    """
    try:
        name, driver = _asked(device, "name,driver_version")
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}
    return {"gpu": name, "driver": driver}


def _asked(device: str, query: str) -> tuple[str, str]:
    """Two facts of a GPU."""
    command = ["nvidia-smi", "-i", device, f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    answer = subprocess.run(
        command, capture_output=True, text=True, timeout=_DRIVER_TIMEOUT_S, check=True
    )
    first, _, second = answer.stdout.strip().partition("\n")[0].rpartition(",")
    return first.strip(), second.strip()
