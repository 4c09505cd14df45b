"""Work in processes of their own, whose end harms no other: one process, and a pool of workers.

A process is started by hand and not by :mod:`multiprocessing` or a library on it: these execute the
caller's main module again, and keep no log of a process that crashed.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from queue import LifoQueue
from threading import Event, Thread
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

LOG_BYTES = 8192
LOG_LINES = 8
EXIT_TIMEOUT_S = 10.0
LOOK_INTERVAL_S = 0.5
"""How often a worker that has not answered is looked at."""

Failure = RunnerFailedError | RunnerUnavailableError
Answer = tuple[bool, Any]
"""(True, what a method returned), or (False, the :data:`Failure`)."""


class Remote(Protocol):
    """Calls methods of one object elsewhere; arguments and answers are plain data."""

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """What ``method`` returns.

        Raises:
            RunnerFailedError: with a verdict: the object's own, or CRASHED or TIMED_OUT and
                ``lost``.
            RunnerUnavailableError: the object cannot be made.
        """
        ...

    def close(self) -> None:
        """Let the object go."""
        ...


class Served:
    """The worker's side: makes ``target`` (``module:Class``) at the first call, and calls it."""

    def __init__(self, target: str, arguments: Mapping[str, Any]) -> None:
        self._target = target
        self._arguments = arguments
        self._object: Any = None

    def call(self, method: str, *arguments: Any) -> Answer:
        """What ``method`` returned, or how it failed."""
        try:
            if self._object is None:
                module, _, name = self._target.partition(":")
                self._object = getattr(importlib.import_module(module), name)(**self._arguments)
                self._arguments = {}  # a model may be among them
            return True, getattr(self._object, method)(*arguments)
        except Exception as error:
            return False, failure_of(error)


def failure_of(error: Exception) -> Failure:
    """What is told of an error that a worker's object raised."""
    if isinstance(error, Failure):
        return error
    if isinstance(error, MachineError) or is_out_of_memory(error):
        return RunnerFailedError(one_line(error), Verdict.CRASHED, machine=True)
    if isinstance(error, BisectError):
        return RunnerFailedError(str(error), Verdict.BUILD_FAILED)
    # Whatever a native library's binding raises.
    return RunnerFailedError(f"{type(error).__name__}: {one_line(error)}", Verdict.CRASHED)


def must_end(failure: Failure) -> bool:
    """Whether a worker must not be asked again: it lost its GPU, or keeps memory."""
    return isinstance(failure, RunnerUnavailableError) or failure.lost


def serve(descriptor: int) -> None:
    """Answer the calls that come through a connection until the other end is closed."""
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
    """A started process.

    Its connection is closed with its last user: one may wait for an answer in another thread.
    """

    process: subprocess.Popen[bytes]
    connection: Connection
    log: IO[bytes]

    def obituary(self) -> str:
        """How it ended; one whose connection broke alone is killed."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(EXIT_TIMEOUT_S)
        self.process.kill()
        code = self.process.wait()
        if code == -signal.SIGKILL:
            return "the process was killed from outside (out of memory?)"
        if code < 0:
            named = next((s.name for s in signal.Signals if s == -code), f"signal {-code}")
            return f"the process crashed ({named})"
        return f"the process ended with exit code {code}"

    def last_lines(self) -> tuple[str, ...]:
        """The end of what it printed."""
        if self.log.closed:
            return ()
        size = os.fstat(self.log.fileno()).st_size
        text = os.pread(self.log.fileno(), LOG_BYTES, max(0, size - LOG_BYTES))
        lines = [line.strip() for line in text.decode(errors="replace").splitlines()]
        return tuple(line for line in lines if line)[-LOG_LINES:]

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()
        self.log.close()


@contextmanager
def _watched(process: subprocess.Popen[bytes], timeout_s: float | None) -> Iterator[Event]:
    """Kill ``process`` where the block takes too long or the command is to stop.

    The event given is set where it took too long.
    """
    ended, timed_out = Event(), Event()
    deadline = None if timeout_s is None else time.monotonic() + timeout_s

    def watch() -> None:
        wait_s = 0.0
        while not ended.wait(wait_s):
            left_s = LOOK_INTERVAL_S if deadline is None else deadline - time.monotonic()
            if left_s <= 0.0:
                timed_out.set()
            if timed_out.is_set() or STOPPING.is_set():
                process.kill()
                return
            wait_s = min(left_s, LOOK_INTERVAL_S)

    watcher = Thread(target=watch, name="bisect-trt-watch", daemon=True)
    watcher.start()
    try:
        yield timed_out
    finally:
        ended.set()
        watcher.join()


class IsolatedWorker:
    """Calls methods of ``target`` (``module:Class``), made with ``arguments`` in a child process.

    Both must be plain data. A process that was lost is replaced at the next call.
    """

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
            succeeded, value = self._ask((method, arguments), timeout_s)
        except BaseException:  # after Ctrl-C an answer nobody waits for may still come
            self.close()
            raise
        if succeeded:
            return value
        if must_end(value):
            self.close()
        raise value

    @property
    def pid(self) -> int | None:
        """The child's process id, None while there is no child."""
        return self._child.process.pid if self._child is not None else None

    def close(self) -> None:
        """End the child, if there is one."""
        child, self._child = self._child, None
        if child is not None:
            child.end()

    def __enter__(self) -> IsolatedWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, request: tuple[str, Sequence[Any]], timeout_s: float | None) -> Answer:
        child = self._child
        messages: list[tuple[str, Any]] = [request]
        if child is None or child.process.poll() is not None:
            self.close()
            child = self._child = _start(self._environment)
            messages.insert(0, (self._target, self._arguments))
        timed_out = Event()
        try:
            with _watched(child.process, timeout_s) as timed_out:
                for message in messages:
                    child.connection.send(message)
                answer: Answer = child.connection.recv()
            if timed_out.is_set():  # it was killed at the last moment
                raise EOFError
        except (EOFError, OSError):
            if STOPPING.is_set():  # a crash would be an engine's verdict
                raise KeyboardInterrupt from None
            words, verdict = child.obituary(), Verdict.CRASHED
            if timed_out.is_set():
                words = f"no answer in {timeout_s:g} s: the process was killed"
                verdict = Verdict.TIMED_OUT
            return False, RunnerFailedError(words, verdict, child.last_lines(), lost=True)
        return answer


def _start(environment: Mapping[str, str]) -> _Child:
    log = tempfile.TemporaryFile(prefix="bisect-trt-log-")  # noqa: SIM115 (until the child ends)
    ours, theirs = Pipe()
    package_root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(p for p in (package_root, os.environ.get("PYTHONPATH", "")) if p)
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # the driver's tool counts GPUs so
    process = subprocess.Popen(
        [sys.executable, "-c", f"from {__name__} import serve; serve({theirs.fileno()})"],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=[theirs.fileno()],
        env={**order, **os.environ, **environment, "PYTHONPATH": path},
        start_new_session=True,  # Ctrl-C is the parent's to handle
    )
    theirs.close()
    return _Child(process, ours, log)


class WorkerPool:
    """A :class:`Remote` over several: each call is answered by one that is free.

    A worker that crashed is asked again, or another one, up to ``attempts`` times; one that timed
    out only with ``retry_timeouts``.
    """

    def __init__(
        self, members: Sequence[Remote], attempts: int = 2, *, retry_timeouts: bool = False
    ) -> None:
        self._members = list(members)
        self._attempts = attempts
        self._retry_timeouts = retry_timeouts
        self._closed = False
        # The last one that became free is asked first: it has started, and holds its model.
        self._free: LifoQueue[Remote] = LifoQueue()
        for member in reversed(self._members):
            self._free.put(member)

    def __len__(self) -> int:
        return len(self._members)

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """As :meth:`Remote.call`, by a free member; waits while there is none."""
        for attempt in range(1, self._attempts + 1):
            member = self._free.get()
            try:
                if self._closed:  # a thread still at work must not start a process nobody ends
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
        """End all members, for good."""
        self._closed = True
        for member in self._members:
            member.close()
