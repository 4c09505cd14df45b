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
