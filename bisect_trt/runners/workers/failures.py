"""How a failure travels from a worker to the run: as plain data, since exception classes lose what
they carry on the way.
"""

from __future__ import annotations

from typing import Any, NoReturn

from bisect_trt.core.errors import (
    BisectError,
    MachineError,
    RunnerFailedError,
    RunnerUnavailableError,
    is_out_of_memory,
    one_line,
)
from bisect_trt.core.verdict import Verdict


def failure_of(error: Exception) -> tuple[str, Any]:
    """(kind, value) of an error that a worker's object raised."""
    if isinstance(error, RunnerUnavailableError):
        return "unavailable", str(error)
    if isinstance(error, RunnerFailedError):
        return "failed", (str(error), error.verdict, error.log, error.lost, error.machine)
    if isinstance(error, MachineError) or is_out_of_memory(error):
        return "failed", (one_line(error), Verdict.CRASHED, (), True, True)
    if isinstance(error, BisectError):
        return "failed", (str(error), Verdict.BUILD_FAILED, (), False, False)
    # Whatever a native library's binding raises.
    said = f"{type(error).__name__}: {one_line(error)}"
    return "failed", (said, Verdict.CRASHED, (), False, False)


def must_end(kind: str, value: Any) -> bool:
    """Whether the process that gave this answer is not to be asked again: it would answer for
    others what became of one, as a GPU does on which a kernel broke, or keeps memory.
    """
    return kind == "unavailable" or (kind == "failed" and bool(value[3]))


def raise_failure(kind: str, value: Any) -> NoReturn:
    """The error that :func:`failure_of` took apart.

    Raises:
        RunnerUnavailableError: of the kind "unavailable".
        RunnerFailedError: of the others.
    """
    if kind == "unavailable":
        raise RunnerUnavailableError(value)
    message, verdict, log, lost, machine = value
    raise RunnerFailedError(message, verdict, log, lost=lost, machine=machine)
