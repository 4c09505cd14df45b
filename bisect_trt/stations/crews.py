"""Which workers a run has: processes of this machine, or actors on a Ray cluster."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from bisect_trt.runners.emulator.fleet import EmulatedFleet
from bisect_trt.runners.emulator.runner import EmulatedRunner
from bisect_trt.runners.emulator.server import SERVER, server_arguments
from bisect_trt.runners.workers.crew import Crew
from bisect_trt.runners.workers.process import IsolatedWorker
from bisect_trt.runners.workers.ray_actors import ray_actors
from bisect_trt.runners.workers.remote import Remote
from bisect_trt.stations.case import Material
from bisect_trt.stations.settings import Settings

ATTEMPTS = 3
"""An emulated probe is asked again where its worker was lost: it kills nobody by itself."""


def open_fleet(
    settings: Settings, local: EmulatedRunner, material: Material
) -> EmulatedFleet | None:
    """The emulator's workers; None for a run in this process alone.

    Several processes of one machine share its cores evenly. Raises :class:`RunnerUnavailableError`
    for a Ray cluster that is not there.
    """
    if settings.workers == 1 and settings.ray is None:
        return None
    threads = 1 if settings.ray is not None else max(1, (os.cpu_count() or 1) // settings.workers)
    arguments = server_arguments(
        material.model.proto, material.samples, settings.precision, threads
    )
    members: Sequence[Remote]
    if settings.ray is not None:
        members = ray_actors(settings.ray, SERVER, arguments, settings.workers, gpus=0)
    else:
        members = [IsolatedWorker(SERVER, arguments) for _ in range(settings.workers)]
    return EmulatedFleet(local, material.samples, Crew(members, ATTEMPTS))


def engine_crew(settings: Settings, target: str, arguments: Mapping[str, Any]) -> Crew:
    """One worker a GPU, at most ``--workers`` of them: processes here, each with its own
    CUDA_VISIBLE_DEVICES, or Ray actors.
    """
    if settings.ray is not None:
        return Crew(ray_actors(settings.ray, target, arguments, settings.workers, gpus=1))
    devices = visible_gpus()[: settings.workers]
    if settings.workers == 1 or len(devices) < 2:
        return Crew([IsolatedWorker(target, arguments)])
    return Crew(
        [IsolatedWorker(target, arguments, {"CUDA_VISIBLE_DEVICES": device}) for device in devices]
    )


def visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES may name here: its own list where it is set, else the numbers of
    the driver's GPUs.
    """
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [device.strip() for device in listed.split(",") if device.strip()]
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [
        str(number)
        for number, _ in enumerate(
            line for line in answer.stdout.splitlines() if line.startswith("GPU ")
        )
    ]
