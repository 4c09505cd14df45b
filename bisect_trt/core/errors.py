"""The errors a user can cause, each with the exit code it ends the command with.

Every message is one line: what is wrong, where, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Sequence

from bisect_trt.core.verdict import Verdict

EXIT_OK = 0
EXIT_NOT_MET = 1
EXIT_BAD_INPUT = 2
EXIT_NO_RUNNER = 3
EXIT_INTERNAL = 70
EXIT_INTERRUPTED = 130


class BisectError(Exception):
    """Base of the errors that are reported as one line."""

    exit_code = EXIT_BAD_INPUT


class BadInputError(BisectError):
    """A model, input, requirement or option that cannot be used."""


class RunnerUnavailableError(BisectError):
    """The runner asked for cannot work on this machine."""

    exit_code = EXIT_NO_RUNNER


class RunnerFailedError(BisectError):
    """A runner broke on a model that was expected to run: ``verdict`` says how, ``log`` holds the
    runner's last lines.
    """

    def __init__(
        self, message: str, verdict: Verdict = Verdict.CRASHED, log: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.verdict = verdict
        self.log = tuple(log)


def one_line(error: BaseException, limit: int = 300) -> str:
    """The message of ``error`` on one line, shortened to ``limit`` characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"
