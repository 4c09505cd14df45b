"""A worker in a child process that lives across probes: what kills it is a verdict, never the end
of the run.

Engine builders and GPU runtimes can segfault, be killed for memory or hang. The child is a fresh
interpreter (a fork would share a broken CUDA context) that serves calls over a pipe; it is started
when first needed and replaced when it dies.
"""

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
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from bisect_trt.core.errors import RunnerFailedError
from bisect_trt.core.machine.stop import STOPPING
from bisect_trt.core.verdict import Verdict
from bisect_trt.runners.workers.failures import must_end, raise_failure
from bisect_trt.runners.workers.pulse import Pulse

_LOG_LINES = 8
_PIECE = 1 << 20
_LOOK_S = 1.0
"""How often a silent child is looked at."""

HEADER = struct.Struct("<Q")


class IsolatedWorker:
    """Calls methods of ``target`` (``module:Class``), made with ``arguments`` in a child process.

    Both must be plain data, as everything that is passed and returned.

    Args:
        target: ``module:Class``.
        arguments: of the class.
        environment: added to the child's.
        stall_s: seconds without any use of the processor after which the child counts as hung; None
            where it may wait for a device. Known on Linux alone.
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

        Args:
            method: its name.
            arguments: anything that pickles.
            timeout_s: seconds to wait; None for ever. A child that gave no answer is killed.

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
            [sys.executable, "-m", "bisect_trt.runners.workers.child"],
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

    Args:
        stream: to the child.
        message: anything that pickles.
        deadline: on the monotonic clock, None for ever.
        pulse: of the child.

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
                    left = left[os.write(number, left[:_PIECE]) :]


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

    Args:
        stream: read from.
        size: in bytes.
        deadline: on the monotonic clock, None for ever.
        pulse: of whoever writes.

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
            part = os.read(stream.fileno(), min(missing, _PIECE))
            if not part:
                raise EOFError
            parts.append(part)
            missing -= len(part)
    return b"".join(parts)
