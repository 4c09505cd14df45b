"""What TensorRT says where it does not do what it was asked, as an error."""

from __future__ import annotations

from typing import Any

from bisect_trt.core.errors import RunnerFailedError
from bisect_trt.core.verdict import Verdict

_MOST_LINES = 8
_NO_MEMORY = ("out of memory", "outofmemory", "memoryallocation", "could not be allocated")
"""What its errors say, in small letters, where the GPU's memory does not suffice."""


def refusal(message: str, verdict: Verdict, logger: Any) -> RunnerFailedError:
    """The error to raise, with the last of what ``logger`` heard. Where TensorRT could run or load
    nothing the process may have lost its device.

    Args:
        message: what it does not do.
        verdict: on the plan.
        logger: of :func:`~bisect_trt.runners.tensorrt.build.make_logger`.
    """
    errors = [text.lower() for severity, text in logger.messages if "ERROR" in severity]
    scarce = any(words in text for text in errors for words in _NO_MEMORY)
    if scarce:
        message = f"{message}: the GPU's memory does not suffice"
    lost = verdict is not Verdict.BUILD_FAILED
    return RunnerFailedError(message, verdict, last_lines(logger), lost=lost, machine=scarce)


def last_lines(logger: Any) -> list[str]:
    """The last of what ``logger`` heard."""
    return [f"[{severity}] {text}" for severity, text in logger.messages][-_MOST_LINES:]
