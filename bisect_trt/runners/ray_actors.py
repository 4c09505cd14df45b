"""Workers on a Ray cluster: each is an actor with its GPUs. Needs the extra ``[ray]``."""

from __future__ import annotations

import importlib
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from bisect_trt.base.errors import BadInputError, RunnerUnavailableError, one_line
from bisect_trt.base.limits import usable_cores
from bisect_trt.base.outcomes import Verdict
from bisect_trt.runners.process import Served, arrives, lost, must_end

LOCAL = "local"


class RayActor:
    """A :class:`~bisect_trt.runners.process.Remote` over one Ray actor."""

    def __init__(self, ray: Any, handle: Any, shared: Any) -> None:
        self._ray = ray
        self._handle = handle
        self._shared = shared  # keeps the arguments: a restarted actor fetches them again

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """As :meth:`Remote.call`; CRASHED if Ray gave the actor up."""
        pending = self._handle.call.remote(method, *arguments)

        def poll(seconds: float) -> bool:
            return bool(self._ray.wait([pending], timeout=seconds)[0])

        try:
            if not arrives(poll, timeout_s):
                self._replace()
                reason = f"no answer in {timeout_s:g} s: the Ray actor was killed"
                raise lost(reason, Verdict.TIMED_OUT)
            succeeded, value = self._ray.get(pending)
        except self._ray.exceptions.RayError as error:
            reason = f"the Ray actor was lost ({one_line(error, 120)})"
            raise lost(reason, Verdict.CRASHED) from error
        if succeeded:
            return value
        if must_end(value):
            self._replace()
        raise value

    def close(self) -> None:
        """Ends the actor."""
        self._ray.kill(self._handle)

    def _replace(self) -> None:
        self._ray.kill(self._handle, no_restart=False)


class RayServed(Served):
    """The actor's side; failures are answers, because Ray drops the fields of exceptions."""

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
    """Starts ``count`` actors that serve ``target`` on the cluster at ``address``.

    Raises:
        RunnerUnavailableError: Ray is not installed, or the cluster does not answer.
    """
    # Ray's C++ side would print warnings into the run's progress.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    try:
        import ray
    except ImportError as error:
        raise RunnerUnavailableError("--ray: Ray is not installed; pip install ray") from error
    if not ray.is_initialized():
        _connect(ray, address, count * cpus)
    # Other clusters may add machines with GPUs on request; a local one cannot.
    if address == LOCAL and gpus:
        resources: Any = ray.cluster_resources
        count = min(count, int(resources().get("GPU", 0.0) // gpus))
        if not count:
            raise RunnerUnavailableError("--ray local: this machine has no GPU for the workers")
    shared = ray.put(dict(arguments))
    served = ray.remote(RayServed).options(
        num_cpus=cpus, num_gpus=gpus, max_restarts=-1, max_task_retries=3
    )
    # Inside a list Ray passes the reference itself, so that a restarted actor can fetch it again.
    return [RayActor(ray, served.remote(target, [shared]), shared) for _ in range(count)]


def _connect(ray: Any, address: str, cpus: int) -> None:
    """Joins the cluster at ``address``, or starts one here."""
    where: dict[str, Any] = {"address": address}
    if address == LOCAL:
        # All cores: a run may have emulators beside its engines.
        where = {"num_cpus": max(cpus, usable_cores()), "include_dashboard": False}
    elif address != "auto":
        _check_reachable(address)
    try:
        ray.init(**where, logging_level=logging.ERROR, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise RunnerUnavailableError(
            f"--ray {address}: the cluster does not answer ({one_line(error, 120)})"
        ) from error


def _check_reachable(address: str) -> None:
    """Refuses an address at once where nothing listens; Ray waits for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise BadInputError(f"--ray {address}: write HOST:PORT, ray://HOST:PORT, auto or local")
    try:
        socket.create_connection((host, int(port)), timeout=10.0).close()
    except (OSError, OverflowError) as error:
        raise RunnerUnavailableError(
            f"--ray {address}: nothing answers there ({one_line(error, 80)})"
        ) from error
