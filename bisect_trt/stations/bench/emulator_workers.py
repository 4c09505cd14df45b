"""Who hires the emulator's workers, on which GPUs, and how many threads each of them gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bisect_trt.core.machine.cores import thread_count
from bisect_trt.core.names import counted
from bisect_trt.runners.emulator.fleet import EmulatedFleet
from bisect_trt.runners.emulator.runner import EmulatedRunner
from bisect_trt.runners.emulator.server import SERVER, server_arguments
from bisect_trt.runners.ort.devices import CPU, Device, visible_gpus
from bisect_trt.runners.workers.crew import Crew
from bisect_trt.runners.workers.process import IsolatedWorker
from bisect_trt.runners.workers.ray_actors import LOCAL, ray_actors
from bisect_trt.runners.workers.remote import Remote
from bisect_trt.stations.case.case import Case

_ATTEMPTS = 3
"""An emulated probe is asked again where its worker was lost: it kills nobody by itself."""

_STALL_S = 60.0
"""An emulator's worker computes or reads; without any use of the processor for so long it hangs."""


def open_fleet(case: Case, local: EmulatedRunner, device: Device) -> EmulatedFleet | None:
    """The emulator's workers; None for a run in this process alone.

    Several processes of one machine share its cores evenly, are no more than these, and take its
    GPUs in turn. On a cluster each has one core, or its part of ``--threads``.

    Args:
        case: the model and the settings.
        local: the emulator of this process, on the device that it chose.
        device: what actors on a cluster compute on.

    Raises:
        BadInputError: the model cannot be sent to them.
        RunnerUnavailableError: the cluster asked for is not there.
    """
    settings = case.settings
    if settings.workers == 1 and settings.ray is None:
        return None
    if settings.ray in (None, LOCAL):
        count, threads = shared_out(settings.workers, thread_count())
    else:
        count = settings.workers
        threads = max(1, (settings.threads or count) // count)
    device = local.device if settings.ray is None else device
    arguments = server_arguments(
        case.graph.proto,
        settings.precision,
        threads,
        replace(device, number=0),
        elsewhere=settings.ray not in (None, LOCAL),
    )
    members: Sequence[Remote]
    if settings.ray is not None:
        gpus = 0.0 if device == CPU else 1.0 if settings.runner == "emulated" else 0.5
        members = ray_actors(settings.ray, SERVER, arguments, count, gpus=gpus, cpus=threads)
    else:
        members = [
            IsolatedWorker(SERVER, arguments, seen, stall_s=_STALL_S)
            for seen in gpus_in_turn(visible_gpus() if device != CPU else (), count)
        ]
    return EmulatedFleet(local, Crew(members, _ATTEMPTS), settings.probe_timeout_s, device)


def gpus_in_turn(gpus: Sequence[str], workers: int) -> list[dict[str, str]]:
    """The environment of each of ``workers``: which of ``gpus`` it sees, all where none is
    named.
    """
    if not gpus:
        return [{} for _ in range(workers)]
    return [{"CUDA_VISIBLE_DEVICES": gpus[i % len(gpus)]} for i in range(workers)]


def shared_out(workers: int, threads: int) -> tuple[int, int]:
    """How many of ``workers`` are hired on a machine with so many ``threads`` to use, and how many
    each of them gets: together never more.
    """
    count = min(workers, threads)
    return count, threads // count


def fewer_hired(asked: int, hired: int) -> str:
    """Why fewer workers were hired than asked for."""
    were = "was" if hired == 1 else "were"
    cores = counted(hired, "core")
    return f"--workers {asked}: more than the {cores} to use here, so {hired} {were} hired"
