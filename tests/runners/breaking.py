"""A worker that breaks in the ways native code does."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from typing import Any

from bisect_trt.base.errors import RunnerFailedError, RunnerUnavailableError
from bisect_trt.base.outcomes import Verdict


class Breaking:
    def __init__(self, available: bool = True) -> None:
        if not available:
            raise RunnerUnavailableError("no such library; install it")
        self.calls = 0

    def count(self, step: int) -> int:
        self.calls += step
        return self.calls

    def pid(self) -> int:
        return os.getpid()

    def noisy(self) -> str:
        os.write(1, b"a native library prints to standard output\n")
        print("and Python too", flush=True)
        return "fine"

    def segfault(self) -> None:
        print("about to touch address 0", file=sys.stderr, flush=True)
        ctypes.string_at(0)

    def killed(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def hang(self) -> None:
        time.sleep(3600)

    def refuse(self) -> None:
        raise RunnerFailedError(
            "layer 'x' does not build", Verdict.BUILD_FAILED, ["[E] no implementation for x"]
        )

    def lose_device(self) -> None:
        raise RunnerFailedError("CUDA failed: cudaErrorIllegalAddress", lost=True)

    def exhaust(self) -> None:
        raise MemoryError

    def blunder(self) -> None:
        raise KeyError("tensor")


class KilledServer:
    """An emulator's worker that is killed by whatever it is asked."""

    def __init__(self, **_: object) -> None: ...

    def outputs(self, *_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    sensitivities = outputs


class GreedyServer(KilledServer):
    """An emulator's worker for which there is never enough memory."""

    def outputs(self, *_: object) -> None:
        raise MemoryError("Failed to allocate memory for requested buffer of size 1")

    sensitivities = outputs


class Seer:
    """A worker that says which GPU it sees, and what it was told to compute on."""

    def __init__(self, device: Any, **_: object) -> None:
        self._device = device

    def sensitivities(self, *_: object) -> list[tuple[str | None, str]]:
        time.sleep(0.5)  # no worker answers twice
        return [(os.environ.get("CUDA_VISIBLE_DEVICES"), self._device.name)]
