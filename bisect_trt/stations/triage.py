"""What kind of problem it is, before anything is searched: a cause for machines and a sentence for
people.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import pandas as pd

from bisect_trt.core.precision import Precision
from bisect_trt.probe.prober import ProbeResult
from bisect_trt.stations.golden import Explanation
from bisect_trt.stations.sensitivity import Sensitivity


class Cause(str, Enum):
    """Triage's word, as run.json holds it."""

    NONE = "none"
    GOLDEN_MISMATCH = "golden-mismatch"
    NOT_PRECISION = "not-precision"
    TF32 = "tf32"
    OVERFLOW = "overflow"
    ROUNDING = "rounding"
    ACCUMULATION = "accumulation"
    UNKNOWN = "unknown"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Diagnosis:
    """``searchable`` says whether pinning layers can help; ``layers`` are those the sentence
    names.
    """

    cause: Cause
    sentence: str
    searchable: bool = False
    layers: tuple[str, ...] = ()


def times(score: float) -> str:
    """A score in words."""
    if math.isnan(score):
        return "not measured"
    if math.isinf(score):
        return "NaN or infinite values"
    # A miss by a hair must not read as "1 times".
    return (
        f"{score:.3g} times the tolerance"
        if abs(score - 1.0) >= 5e-3
        else f"{score:.6g} times the tolerance"
    )


def diagnose_golden(score: float, explain: Callable[[], Explanation | None]) -> Diagnosis | None:
    """The end of the run if the reference itself misses the golden outputs; ``explain`` then tries
    the usual suspects.
    """
    if score <= 1.0:
        return None
    found = explain()
    why = (
        "none of the usual mistakes of preprocessing explains it: look at the export, or at what "
        "else the framework does to its input."
        if found is None
        else f"they are those of input {found.input!r} {found.words} ({times(found.score)}): mend the preprocessing, not the engine."
    )
    return Diagnosis(
        Cause.GOLDEN_MISMATCH,
        f"The reference itself differs from the golden outputs ({times(score)}); {why}",
    )


def diagnose_baselines(
    fp32: ProbeResult, tf32: ProbeResult, base: ProbeResult, precision: Precision
) -> Diagnosis | None:
    """What the whole-network runs already settle; None if the reduced precision is to blame."""
    if not fp32.verdict.passed:
        return Diagnosis(
            Cause.NOT_PRECISION,
            f"Strict FP32 already misses the requirement ({times(fp32.score)}): not a precision "
            "problem, and no pin can "
            "help. The model is random or ill-conditioned, or the runner computes it differently.",
        )
    if base.verdict.passed:
        return Diagnosis(
            Cause.NONE,
            f"Everything in {precision.value.upper()} meets the requirement ({times(base.score)}); "
            "nothing needs to be pinned.",
        )
    if precision is Precision.TF32:
        return Diagnosis(
            Cause.TF32,
            f"TF32 misses the requirement ({times(tf32.score)}) and strict FP32 meets it. TF32 is "
            "a switch of the whole "
            "engine that no pin can cure: turn it off (clear_flag(BuilderFlag.TF32), trtexec "
            "--noTF32).",
        )
    return None


def diagnose_reduced(
    base: ProbeResult,
    table: pd.DataFrame,
    sensitivity: Sensitivity,
    probe: Callable[[frozenset[str]], ProbeResult],
    precision: Precision,
    overflowing_weights: frozenset[str] = frozenset(),
) -> Diagnosis:
    """Overflow, rounding in a few layers, or accumulation over many: told apart by measured
    effects.

    Overflow is the cause if the layers that turn finite inputs into infinities, or hold a constant
    that does not fit (``overflowing_weights``), account for at least half of the error (one probe);
    rounding, if some layer misses the requirement alone; else no single layer does, and the error
    accumulates.
    """
    name = precision.value.upper()
    overflows = ~table["introduced_finite"].astype(bool) | table["layer"].isin(overflowing_weights)
    overflowing = tuple(str(n) for n in table.loc[overflows, "layer"])
    if overflowing:
        without = probe(frozenset(overflowing))
        if without.score <= base.score / 2.0 or (
            math.isinf(base.score) and math.isfinite(without.score)
        ):
            return Diagnosis(
                Cause.OVERFLOW,
                f"{name} overflows in {_named(overflowing)}: values or constants beyond its range "
                "become infinite there.",
                True,
                overflowing,
            )
    guilty = [n for n in sensitivity.scores if n in sensitivity.must_pin]
    if guilty:
        guilty.sort(key=lambda n: -sensitivity.scores[n])
        return Diagnosis(
            Cause.ROUNDING,
            f"{name} rounding in {_named(guilty)} alone misses the requirement "
            f"({times(sensitivity.scores[guilty[0]])}).",
            True,
            tuple(guilty),
        )
    return Diagnosis(
        Cause.ACCUMULATION,
        f"The {name} error accumulates over many layers ({times(base.score)}): none of the "
        f"{len(sensitivity.scores)} measured layers misses the requirement alone.",
        True,
    )


def _named(layers: Sequence[str]) -> str:
    shown = ", ".join(layers[:4])
    return f"{shown} and {len(layers) - 4} more layers" if len(layers) > 4 else shown
