"""What TensorRT says where it does not do what it was asked, as an error."""

from __future__ import annotations

from typing import Any

from bisect_trt.core.errors import RunnerFailedError
from bisect_trt.core.verdict import Verdict
from bisect_trt.runners.tensorrt.cuda import Cuda

_MOST_LINES = 8
_NO_MEMORY = (
    "out of memory",
    "outofmemory",
    "memoryallocation",
    "could not be allocated",
    "allocator error",
    "allocation failed",
    "memory is insufficient",
)
"""What its errors say, in small letters, where the GPU's memory does not suffice."""


_ROOM = 256 << 20
"""Bytes that the libraries under TensorRT take for themselves: where less is left their errors are
of other things ("CUDNN_STATUS_INTERNAL_ERROR" on an H100 that had 700 MB for a process)."""


def refusal(
    message: str, verdict: Verdict, logger: Any, cuda: Cuda | None = None
) -> RunnerFailedError:
    """The error to raise, with the last of what ``logger`` heard. Where TensorRT could run or load
    nothing the process may have lost its device.

    Args:
        message: what it does not do.
        verdict: on the plan.
        logger: of :func:`~bisect_trt.runners.tensorrt.build.make_logger`.
        cuda: the device, where one was used.
    """
    errors = [text.lower() for severity, text in logger.messages if "ERROR" in severity]
    told = any(words in text for text in errors for words in _NO_MEMORY)
    scarce = told or (cuda is not None and _is_full(cuda))
    if scarce:
        message = f"{message}: the GPU's memory does not suffice"
    lost = verdict is not Verdict.BUILD_FAILED
    return RunnerFailedError(message, verdict, last_lines(logger), lost=lost, machine=scarce)


def _is_full(cuda: Cuda) -> bool:
    try:
        return cuda.free_bytes() < _ROOM
    except RunnerFailedError:  # the device is lost
        return False


def last_lines(logger: Any) -> list[str]:
    """The last of what ``logger`` heard."""
    return [f"[{severity}] {text}" for severity, text in logger.messages][-_MOST_LINES:]
