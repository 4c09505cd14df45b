"""Calls an object in another process, so that a crash or a hang there can be survived."""

from __future__ import annotations

import importlib
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from queue import LifoQueue
from typing import IO, Any, Protocol

from bisect_trt.base.errors import (
    BisectError,
    MachineError,
    RunnerFailedError,
    RunnerUnavailableError,
    is_out_of_memory,
    one_line,
)
from bisect_trt.base.interrupt import STOPPING
from bisect_trt.base.outcomes import Verdict

LOG_LINES = 8
"""Lines of a child's log that a failure shows."""
POLL_INTERVAL_S = 0.5
"""Time between two checks of a worker that has not answered."""

Failure = RunnerFailedError | RunnerUnavailableError
Answer = tuple[bool, Any]
"""(True, what a method returned), or (False, the :data:`Failure`)."""


class Remote(Protocol):
    """Calls methods of one object elsewhere; arguments and answers are plain data."""

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Returns what ``method`` returns.

        Raises:
            RunnerFailedError: the object's own, or ``lost`` with CRASHED or TIMED_OUT.
            RunnerUnavailableError: the object cannot be made.
        """
        ...

    def close(self) -> None:
        """Ends the object."""
        ...


class Served:
    """The worker's side: makes ``target`` (``module:Class``) at the first call, and calls it."""

    def __init__(self, target: str, arguments: Mapping[str, Any]) -> None:
        self._target = target
        self._arguments = arguments
        self._object: Any = None

    def call(self, method: str, *arguments: Any) -> Answer:
        """Returns what ``method`` returned, or its failure."""
        try:
            if self._object is None:
                module, _, name = self._target.partition(":")
                self._object = getattr(importlib.import_module(module), name)(**self._arguments)
                self._arguments = {}  # frees a model's bytes
            return True, getattr(self._object, method)(*arguments)
        except Exception as error:
            return False, failure_of(error)


def failure_of(error: Exception) -> Failure:
    """Translates an error of a worker's object for its caller."""
    if isinstance(error, Failure):
        return error
    if isinstance(error, MachineError) or is_out_of_memory(error):
        return RunnerFailedError(one_line(error), Verdict.CRASHED, machine=True)
    if isinstance(error, BisectError):
        return RunnerFailedError(str(error), Verdict.BUILD_FAILED)
    # Bindings of native libraries raise exceptions of any class.
    return RunnerFailedError(f"{type(error).__name__}: {one_line(error)}", Verdict.CRASHED)


def must_end(failure: Failure) -> bool:
    """True if a worker cannot be used again: it lost its GPU, or keeps memory."""
    return isinstance(failure, RunnerUnavailableError) or failure.lost


def lost(reason: str, verdict: Verdict, log: Sequence[str] = ()) -> RunnerFailedError:
    """Makes the failure of a worker that gave no answer."""
    return RunnerFailedError(reason, verdict, log, lost=True)


def arrives(poll: Callable[[float], bool], timeout_s: float | None) -> bool:
    """Waits until ``poll(seconds)`` finds an answer; False at the time-out.

    Raises:
        KeyboardInterrupt: the command stops.
    """
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while True:
        # In short waits: Ctrl-C interrupts the main thread only, and others must end too.
        left_s = max(0.0, deadline - time.monotonic())
        if poll(min(left_s, POLL_INTERVAL_S)):
            return True
        if STOPPING.is_set():
            raise KeyboardInterrupt
        if not left_s:
            return False


def serve(descriptor: int) -> None:
    """Answers the calls from a connection until the other end closes."""
    connection = Connection(descriptor)
    served = Served(*connection.recv())
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        connection.send(served.call(method, *arguments))


@dataclass(frozen=True)
class _Child:
    """A started process, the connection to it and the file that it prints to."""

    process: subprocess.Popen[bytes]
    connection: Connection
    log: IO[bytes]

    def how_it_ended(self) -> str:
        """Says how the process ended; a process that lives without its connection is killed."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(10.0)
        self.process.kill()
        code = self.process.wait()
        if code == -signal.SIGKILL:
            return "the process was killed from outside (out of memory?)"
        if code < 0:
            named = next((s.name for s in signal.Signals if s == -code), f"signal {-code}")
            return f"the process crashed ({named})"
        return f"the process ended with exit code {code}"

    def last_lines(self) -> tuple[str, ...]:
        """The end of what the process printed."""
        if self.log.closed:
            return ()
        size = os.fstat(self.log.fileno()).st_size
        text = os.pread(self.log.fileno(), 8192, max(0, size - 8192))
        lines = [line.strip() for line in text.decode(errors="replace").splitlines()]
        return tuple(line for line in lines if line)[-LOG_LINES:]

    def end(self) -> None:
        """Kills the process."""
        # The connection stays: another thread may wait for an answer on it.
        self.process.kill()
        self.process.wait()
        self.log.close()


class IsolatedWorker:
    """Calls methods of ``target`` (``module:Class``) in a child process; a lost one is replaced."""

    def __init__(
        self,
        target: str,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._target = target
        self._arguments = dict(arguments)
        self._environment = dict(environment or {})
        self._child: _Child | None = None

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """As :meth:`Remote.call`."""
        try:
            succeeded, value = self._exchanged((method, arguments), timeout_s)
        except BaseException:  # after Ctrl-C a late answer would be taken for the next call's
            self.close()
            raise
        if succeeded:
            return value
        if must_end(value):
            self.close()
        raise value

    @property
    def pid(self) -> int | None:
        """The child's process id; None while there is no child."""
        return self._child.process.pid if self._child is not None else None

    def close(self) -> None:
        """Ends the child, if there is one."""
        child, self._child = self._child, None
        if child is not None:
            child.end()

    def __enter__(self) -> IsolatedWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _exchanged(self, request: tuple[str, Sequence[Any]], timeout_s: float | None) -> Answer:
        child = self._child
        messages: list[tuple[str, Any]] = [request]
        if child is None or child.process.poll() is not None:
            self.close()
            child = self._child = _start(self._environment)
            messages.insert(0, (self._target, self._arguments))
        try:
            for message in messages:
                child.connection.send(message)
            if not arrives(child.connection.poll, timeout_s):
                reason = f"no answer in {timeout_s:g} s: the process was killed"
                return False, lost(reason, Verdict.TIMED_OUT, child.last_lines())
            answer: Answer = child.connection.recv()
        except (EOFError, OSError):
            if STOPPING.is_set():  # the run ended it: no crash of the engine
                raise KeyboardInterrupt from None
            return False, lost(child.how_it_ended(), Verdict.CRASHED, child.last_lines())
        return answer


def _start(environment: Mapping[str, str]) -> _Child:
    # Not by multiprocessing or a library on it: these execute the caller's main module again, and
    # keep no log of a process that crashed.
    log = tempfile.TemporaryFile(prefix="bisect-trt-log-")  # noqa: SIM115 (until the child ends)
    connection, child_end = Pipe()
    package_root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(p for p in (package_root, os.environ.get("PYTHONPATH", "")) if p)
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # as nvidia-smi counts GPUs
    process = subprocess.Popen(
        [sys.executable, "-c", f"from {__name__} import serve; serve({child_end.fileno()})"],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=[child_end.fileno()],
        env={**order, **os.environ, **environment, "PYTHONPATH": path},
        start_new_session=True,  # Ctrl-C is the parent's to handle
    )
    child_end.close()
    return _Child(process, connection, log)


class WorkerPool:
    """A :class:`Remote` over several: each call goes to a free member.

    A call whose worker crashed is made up to ``attempts`` times; one that timed out is repeated
    only with ``retry_timeouts``.
    """

    def __init__(
        self, members: Sequence[Remote], attempts: int = 2, *, retry_timeouts: bool = False
    ) -> None:
        self._members = list(members)
        self._attempts = attempts
        self._retry_timeouts = retry_timeouts
        self._closed = False
        # Last in, first out: the member that just became free has its model loaded.
        self._free: LifoQueue[Remote] = LifoQueue()
        for member in reversed(self._members):
            self._free.put(member)

    def __len__(self) -> int:
        return len(self._members)

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """As :meth:`Remote.call`, by a free member; waits until there is one."""
        for attempt in range(1, self._attempts + 1):
            member = self._free.get()
            try:
                if self._closed:  # a thread still at work must not start a process again
                    raise RunnerFailedError("the runner was closed", Verdict.CRASHED)
                return member.call(method, *arguments, timeout_s=timeout_s)
            except RunnerFailedError as error:
                again = error.lost and (
                    self._retry_timeouts or error.verdict is not Verdict.TIMED_OUT
                )
                if not again or attempt == self._attempts:
                    raise
            finally:
                self._free.put(member)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def close(self) -> None:
        """Ends all members for good."""
        self._closed = True
        for member in self._members:
            member.close()
