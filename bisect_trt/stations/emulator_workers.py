"""Who hires the emulator's workers, and how many threads each of them gets."""

from __future__ import annotations

from collections.abc import Sequence

from bisect_trt.core.cores import thread_count
from bisect_trt.runners.emulator.fleet import EmulatedFleet
from bisect_trt.runners.emulator.runner import EmulatedRunner
from bisect_trt.runners.emulator.server import SERVER, server_arguments
from bisect_trt.runners.workers.crew import Crew
from bisect_trt.runners.workers.process import IsolatedWorker
from bisect_trt.runners.workers.ray_actors import LOCAL, ray_actors
from bisect_trt.runners.workers.remote import Remote
from bisect_trt.stations.case import Case

_ATTEMPTS = 3
"""An emulated probe is asked again where its worker was lost: it kills nobody by itself."""

_STALL_S = 60.0
"""An emulator's worker computes or reads; without any use of the processor for so long it hangs."""


def open_fleet(case: Case, local: EmulatedRunner) -> EmulatedFleet | None:
    """The emulator's workers; None for a run in this process alone.

    Several processes of one machine share its cores evenly, and are no more than these. On a
    cluster each has one, or its part of ``--threads``.

    Args:
        case: the model and the settings.
        local: the emulator of this process.

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
    arguments = server_arguments(case.graph.proto, settings.precision, threads)
    members: Sequence[Remote]
    if settings.ray is not None:
        members = ray_actors(settings.ray, SERVER, arguments, count, gpus=0, cpus=threads)
    else:
        members = [IsolatedWorker(SERVER, arguments, stall_s=_STALL_S) for _ in range(count)]
    return EmulatedFleet(local, Crew(members, _ATTEMPTS), settings.probe_timeout_s)


def shared_out(workers: int, threads: int) -> tuple[int, int]:
    """How many of ``workers`` are hired on a machine with so many ``threads`` to use, and how many
    each of them gets: together never more.
    """
    count = min(workers, threads)
    return count, threads // count


def fewer_hired(asked: int, hired: int) -> str:
    """Why fewer workers were hired than asked for."""
    cores = "core" if hired == 1 else "cores"
    return f"--workers {asked}: more than the {hired} {cores} to use here, so {hired} were hired"
