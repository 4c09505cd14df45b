"""What kind of problem it is: a cause for machines and a sentence for people."""

from __future__ import annotations

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
    ROUNDING = "rounding"
    ACCUMULATION = "accumulation"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Diagnosis:
    """A station that returns a bare one settles the case: nothing is searched."""

    cause: Cause
    sentence: str
