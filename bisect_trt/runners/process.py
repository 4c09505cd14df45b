"""Work in a process of its own, whose end harms no other."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import selectors
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from queue import LifoQueue
from types import TracebackType
from typing import IO, Any, NoReturn, Protocol

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

_USER_TIME, _SYSTEM_TIME = 11, 12
"""Places in /proc/PID/stat behind the command's name (proc(5): fields 14 and 15)."""


class Pulse:
    """The processor time of process ``pid``, watched from now on."""

    def __init__(self, pid: int, stall_s: float | None) -> None:
        self._stat = Path(f"/proc/{pid}/stat")
        self._stall_s = stall_s
        self._used = -1
        self._since = time.monotonic()

    def check(self) -> None:
        """Look whether the process has used the processor since the last time.

        Raises:
            TimeoutError: not for too long.
        """
        if self._stall_s is None:
            return
        used, now = self._ticks(), time.monotonic()
        if used is None or used != self._used:
            self._used, self._since = used or 0, now
        elif now - self._since > self._stall_s:
            raise TimeoutError(f"it used no processor for {self._stall_s:g} s")

    def _ticks(self) -> int | None:
        try:
            fields = (
                self._stat.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
            )
            return int(fields[_USER_TIME]) + int(fields[_SYSTEM_TIME])
        except (OSError, ValueError, IndexError):
            return None  # no Linux, or it has just died: the pipe tells


def failure_of(error: Exception) -> tuple[str, Any]:
    """(kind, value) of an error that a worker's object raised."""
    if isinstance(error, RunnerUnavailableError):
        return "unavailable", str(error)
    if isinstance(error, RunnerFailedError):
        more = {"lost": error.lost, "machine": error.machine, "node": error.node}
        return "failed", (str(error), error.verdict, error.log, more)
    if isinstance(error, MachineError) or is_out_of_memory(error):
        return "failed", (one_line(error), Verdict.CRASHED, (), {"lost": True, "machine": True})
    if isinstance(error, BisectError):
        return "failed", (str(error), Verdict.BUILD_FAILED, (), {})
    # Whatever a native library's binding raises.
    return "failed", (f"{type(error).__name__}: {one_line(error)}", Verdict.CRASHED, (), {})


def must_end(kind: str, value: Any) -> bool:
    """Whether the process that gave this answer is not to be asked again: it would answer for
    others what became of one, as a GPU does on which a kernel broke, or keeps memory.
    """
    return kind == "unavailable" or (kind == "failed" and bool(value[3].get("lost")))


def raise_failure(kind: str, value: Any) -> NoReturn:
    """The error that :func:`failure_of` took apart.

    Raises:
        RunnerUnavailableError: of the kind "unavailable".
        RunnerFailedError: of the others.
    """
    if kind == "unavailable":
        raise RunnerUnavailableError(value)
    message, verdict, log, more = value
    raise RunnerFailedError(message, verdict, log, **more)


_LOG_LINES = 8
_SUBGRAPH = 1 << 20
_LOOK_S = 1.0
"""How often a silent child is looked at."""

HEADER = struct.Struct("<Q")


class IsolatedWorker:
    """Calls methods of ``target`` (``module:Class``), made with ``arguments`` in a child process.

    Both must be plain data, as everything that is passed and returned.
    """

    def __init__(
        self,
        target: str,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str] | None = None,
        stall_s: float | None = None,
    ) -> None:
        self._target = target
        self._arguments = dict(arguments)
        self._environment = dict(environment or {})
        self._stall_s = stall_s
        self._child: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """What ``method`` of the target returns.

        Raises:
            RunnerFailedError: with the verdict the target chose; lost, with CRASHED if the child
                died, or TIMED_OUT.
            RunnerUnavailableError: the target could not be made at all.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            child = self._started(deadline)
            pulse = Pulse(child.pid, self._stall_s)
            _send(child.stdin, (method, arguments), deadline, pulse)
            kind, value = self._receive(child, deadline, pulse)
        except (EOFError, BrokenPipeError):
            raise RunnerFailedError(
                self._obituary(), Verdict.CRASHED, self._last_lines(), lost=True
            ) from None
        except TimeoutError as error:
            lines = self._last_lines()
            self.close()
            words = str(error) or f"no answer in {timeout_s:g} s"
            raise RunnerFailedError(
                f"{words}: the process was killed", Verdict.TIMED_OUT, lines, lost=True
            ) from None
        except (
            BaseException
        ):  # Ctrl-C in the middle of an answer: what is left in the pipe belongs to nobody
            self.close()
            raise
        if kind == "result":
            return value
        if must_end(kind, value):
            self.close()
        raise_failure(kind, value)

    @property
    def pid(self) -> int | None:
        """The child's process id, None while there is no child."""
        return self._child.pid if self._child is not None else None

    def kill(self) -> None:
        """End the child while another thread waits for its answer, which hears of it."""
        child = self._child
        if child is not None:
            child.kill()

    def close(self) -> None:
        """End the child, if there is one."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            for stream in (self._child.stdin, self._child.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
            self._child = None
        if self._log is not None:
            self._log.close()
            self._log = None

    def __enter__(self) -> IsolatedWorker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _started(self, deadline: float | None) -> subprocess.Popen[bytes]:
        if self._child is not None and self._child.poll() is None:
            return self._child
        self.close()
        self._log = tempfile.TemporaryFile(prefix="bisect-trt-log-")  # noqa: SIM115 (it lives as long as the child)
        package_root = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join(p for p in (package_root, os.environ.get("PYTHONPATH", "")) if p)
        order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # the driver's tool counts GPUs so
        environment = {**order, **os.environ, **self._environment, "PYTHONPATH": path}
        self._child = subprocess.Popen(
            [sys.executable, "-m", "bisect_trt.runners.worker_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            start_new_session=True,  # Ctrl-C is the parent's to handle
        )
        pulse = Pulse(self._child.pid, self._stall_s)
        _send(self._child.stdin, (self._target, self._arguments), deadline, pulse)
        return self._child

    @staticmethod
    def _receive(child: subprocess.Popen[bytes], deadline: float | None, pulse: Pulse) -> Any:
        size = HEADER.unpack(_read(child.stdout, HEADER.size, deadline, pulse))[0]
        return pickle.loads(_read(child.stdout, size, deadline, pulse))

    def _obituary(self) -> str:
        assert self._child is not None
        code = self._child.wait()
        if code == -signal.SIGKILL:
            return "the process was killed from outside (out of memory?)"
        if code < 0:
            named = next((s.name for s in signal.Signals if s == -code), f"signal {-code}")
            return f"the process crashed ({named})"
        return f"the process ended with exit code {code}"

    def _last_lines(self) -> tuple[str, ...]:
        if self._log is None:
            return ()
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - 8192))
        lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines()]
        return tuple(line for line in lines if line)[-_LOG_LINES:]


def _send(stream: IO[bytes] | None, message: object, deadline: float | None, pulse: Pulse) -> None:
    """Write ``message`` piece by piece: a child that hangs does not read, and a pipe holds little.

    Raises:
        BrokenPipeError: the child has gone.
        TimeoutError: the deadline passed, or the child hangs.
    """
    assert stream is not None
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    number = stream.fileno()
    os.set_blocking(number, False)
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_WRITE)
        for part in (memoryview(HEADER.pack(len(data))), memoryview(data)):
            left = part
            while left:
                _wait(selector, deadline, pulse)
                with contextlib.suppress(BlockingIOError):
                    left = left[os.write(number, left[:_SUBGRAPH]) :]


def _wait(selector: selectors.BaseSelector, deadline: float | None, pulse: Pulse) -> None:
    """Until the stream of ``selector`` is ready. Raises TimeoutError as its callers do, and
    KeyboardInterrupt in any thread once the command is to stop.
    """
    while True:
        left = math.inf if deadline is None else deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        if STOPPING.is_set():
            raise KeyboardInterrupt  # a time-out would be an engine's verdict
        if selector.select(min(left, _LOOK_S)):
            return
        pulse.check()


def _read(stream: IO[bytes] | None, size: int, deadline: float | None, pulse: Pulse) -> bytes:
    """Exactly ``size`` bytes.

    Raises:
        EOFError: the stream ended.
        TimeoutError: the deadline passed, or the writer hangs.
    """
    assert stream is not None
    parts, missing = [], size
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while missing:
            _wait(selector, deadline, pulse)
            part = os.read(stream.fileno(), min(missing, _SUBGRAPH))
            if not part:
                raise EOFError
            parts.append(part)
            missing -= len(part)
    return b"".join(parts)


class Remote(Protocol):
    """Calls methods of one object elsewhere; arguments and answers are plain data."""

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """What ``method`` returns.

        Raises:
            RunnerFailedError: with a verdict, CRASHED if the object was lost.
        """
        ...

    def close(self) -> None:
        """Let the object go."""
        ...


_ENDS = (Verdict.CRASHED, Verdict.TIMED_OUT)


class WorkerPool:
    """A :class:`~bisect_trt.runners.process.Remote` over ``members``."""

    def __init__(
        self, members: Sequence[Remote], attempts: int = 2, ends: Collection[Verdict] = _ENDS
    ) -> None:
        self._members = list(members)
        self._attempts = attempts
        self._ends = frozenset(ends)
        self._closed = False
        # Who was free last: it has started, and its model is loaded. What calls come one after the
        # other are so of one process, and their times those of inferences.
        self._free: LifoQueue[Remote] = LifoQueue()
        for member in reversed(self._members):
            self._free.put(member)

    def __len__(self) -> int:
        return len(self._members)

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """The answer of a free member; waits while there is none.

        Raises:
            RunnerFailedError: the member's, or the crew was closed: a thread that is still at work
                must not start a process that nobody ends.
        """
        for attempt in range(1, self._attempts + 1):
            member = self._free.get()
            try:
                if self._closed:
                    raise RunnerFailedError("the runner was closed", Verdict.CRASHED)
                return member.call(method, *arguments, timeout_s=timeout_s)
            except RunnerFailedError as error:
                again = error.lost and (error.machine or error.verdict in self._ends)
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
