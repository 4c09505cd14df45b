"""What kind of problem it is: a cause for machines and a sentence for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Cause(StrEnum):
    """Triage's word, as run.json holds it."""

    NONE = "none"
    GOLDEN_MISMATCH = "golden-mismatch"
    NOT_PRECISION = "not-precision"
    UNSTEADY = "unsteady"
    ENGINE_FAILED = "engine-failed"
    TF32 = "tf32"
    OVERFLOW = "overflow"
    UNDERFLOW = "underflow"
    ROUNDING = "rounding"
    ACCUMULATION = "accumulation"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class CauseFound:
    """One of several causes: its ``name``, the ``layers`` that it is seen in, and a sentence."""

    name: Cause
    layers: tuple[str, ...]
    sentence: str


@dataclass(frozen=True)
class Diagnosis:
    """A station that returns a bare one settles the case: nothing is searched. ``causes`` are all
    that were found, the largest first; empty where the sentence says all.
    """

    cause: Cause
    sentence: str
    causes: tuple[CauseFound, ...] = ()

    @property
    def all_causes(self) -> tuple[CauseFound, ...]:
        """The causes, also where there is one and nothing more is known of it."""
        if self.causes or self.cause is Cause.NONE:
            return self.causes
        return (CauseFound(self.cause, (), self.sentence),)

    @staticmethod
    def of(causes: Sequence[CauseFound]) -> Diagnosis:
        """The diagnosis of ``causes``, the largest first, one at least."""
        return Diagnosis(causes[0].name, " ".join(c.sentence for c in causes), tuple(causes))
