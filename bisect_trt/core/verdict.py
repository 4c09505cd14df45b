"""The outcome of a probe. Never a bare bool: an engine that does not build is neither right nor
wrong.
"""

from __future__ import annotations

from enum import StrEnum


class Verdict(StrEnum):
    """What trying one plan showed."""

    PASS = "pass"
    FAIL = "fail"
    NON_FINITE = "non-finite"
    BUILD_FAILED = "build-failed"
    CRASHED = "crashed"
    TIMED_OUT = "timed-out"
    UNSURE = "unsure"

    @property
    def passed(self) -> bool:
        """Only a clear pass passes; an unsure or broken probe never makes a pin look
        superfluous.
        """
        return self is Verdict.PASS
