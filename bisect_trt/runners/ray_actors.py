"""Workers on a Ray cluster: each an actor with its GPUs; Ray starts, places and restarts them.
Needs the extra ``[ray]``.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from bisect_trt.base.errors import (
    BadInputError,
    RunnerFailedError,
    RunnerUnavailableError,
    one_line,
)
from bisect_trt.base.interrupt import STOPPING
from bisect_trt.base.limits import thread_count
from bisect_trt.base.outcomes import Verdict
from bisect_trt.runners.process import LOOK_INTERVAL_S, Served, must_end

LOCAL = "local"
CONNECT_TIMEOUT_S = 10.0


class RayActor:
    """A :class:`~bisect_trt.runners.process.Remote` over one Ray actor."""

    def __init__(self, ray: Any, handle: Any, shared: Any) -> None:
        self._ray = ray
        self._handle = handle
        self._shared = shared  # a restarted actor fetches its arguments again: they must be kept

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """As :meth:`Remote.call`; CRASHED where Ray gave the actor up."""
        asked = self._handle.call.remote(method, *arguments)
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        try:
            while not self._ray.wait([asked], timeout=LOOK_INTERVAL_S)[0]:
                if STOPPING.is_set():
                    raise KeyboardInterrupt
                if time.monotonic() > deadline:
                    self._replace()
                    raise RunnerFailedError(
                        f"no answer in {timeout_s:g} s: the Ray actor was killed",
                        Verdict.TIMED_OUT,
                        lost=True,
                    )
            succeeded, value = self._ray.get(asked)
        except self._ray.exceptions.RayError as error:
            raise RunnerFailedError(
                f"the Ray actor was lost ({one_line(error, 120)})", Verdict.CRASHED, lost=True
            ) from error
        if succeeded:
            return value
        if must_end(value):
            self._replace()
        raise value

    def close(self) -> None:
        """End the actor."""
        self._ray.kill(self._handle)

    def _replace(self) -> None:
        self._ray.kill(self._handle, no_restart=False)


class RayServed(Served):
    """What an actor holds. Failures are answers: Ray would drop what an exception carries."""

    def __init__(self, target: str, shared: Sequence[Any]) -> None:
        super().__init__(target, importlib.import_module("ray").get(shared[0]))


def ray_actors(
    address: str,
    target: str,
    arguments: Mapping[str, Any],
    count: int,
    *,
    gpus: float,
    cpus: int = 1,
) -> Sequence[RayActor]:
    """``count`` actors that serve ``target`` on the cluster at ``address``.

    Raises:
        RunnerUnavailableError: Ray is not installed, or the cluster does not answer.
    """
    # Its C++ side would print warnings of its own into the run's progress.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    try:
        import ray
    except ImportError as error:
        raise RunnerUnavailableError("--ray: Ray is not installed; pip install ray") from error
    if not ray.is_initialized():
        _connect(ray, address, count * cpus)
    # A cluster that others run may get GPUs when they are asked for; this one never will.
    if address == LOCAL and gpus:
        resources: Any = ray.cluster_resources
        count = min(count, int(resources().get("GPU", 0.0) // gpus))
        if not count:
            raise RunnerUnavailableError("--ray local: this machine has no GPU for the workers")
    shared = ray.put(dict(arguments))
    served = ray.remote(RayServed).options(
        num_cpus=cpus, num_gpus=gpus, max_restarts=-1, max_task_retries=3
    )
    # In a list the reference travels as it is: a restarted actor fetches the arguments again.
    return [RayActor(ray, served.remote(target, [shared]), shared) for _ in range(count)]


def _connect(ray: Any, address: str, cpus: int) -> None:
    """Join the cluster at ``address``, or start one here.

    It has all cores: a run may have emulators beside its engines.
    """
    where: dict[str, Any] = {"address": address}
    if address == LOCAL:
        where = {"num_cpus": max(cpus, thread_count()), "include_dashboard": False}
    elif address != "auto":
        _check_reachable(address)
    try:
        ray.init(**where, logging_level=logging.ERROR, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise RunnerUnavailableError(
            f"--ray {address}: the cluster does not answer ({one_line(error, 120)})"
        ) from error


def _check_reachable(address: str) -> None:
    """Ray itself waits for minutes where nothing listens."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise BadInputError(f"--ray {address}: write HOST:PORT, ray://HOST:PORT, auto or local")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise RunnerUnavailableError(
            f"--ray {address}: nothing answers there ({one_line(error, 80)})"
        ) from error
