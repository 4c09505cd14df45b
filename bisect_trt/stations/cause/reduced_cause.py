"""What is wrong with the reduced precision, as measured: overflow, rounding or accumulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence

import pandas as pd

from bisect_trt.core.diagnosis import Cause, Diagnosis
from bisect_trt.core.precision import Precision
from bisect_trt.numerics.scores import times
from bisect_trt.probe.result import ProbeResult
from bisect_trt.stations.cause.sensitivity import Sensitivity

_SHOWN, _MOST_PROBED = 4, 16

_TELLING = 8
"""Of fewer layers that were measured alone it is not said that the error is spread over many."""


def diagnose_reduced(
    base: ProbeResult,
    table: pd.DataFrame,
    sensitivity: Sensitivity,
    pinned: Callable[[frozenset[str]], tuple[float, float]],
    precision: Precision,
    overflowing_weights: frozenset[str] = frozenset(),
    where: str = "",
    *,
    layers: int,
    alone: Callable[[str], ProbeResult] | None = None,
    together: bool = False,
) -> Diagnosis:
    """Overflow, rounding in a few layers, or accumulation over many: told apart by measured
    effects.

    Overflow is the cause if the layers that turn finite inputs into infinities, or hold a constant
    that does not fit, account for at least half of the error (one probe); rounding, if some layer
    misses the requirement alone; else no single layer does, and the error accumulates. It is
    unknown where too few layers were measured to tell, or not on what is missed.

    Args:
        base: the probe of everything lowered.
        table: a row a layer, with ``introduced_finite`` and ``underflows``.
        sensitivity: what each layer does alone.
        pinned: the scores without a set of pins and with it, of the same inputs.
        precision: for the sentence.
        overflowing_weights: layers with a constant that does not fit.
        where: what the scores are the worst of, where these are not the given inputs alone.
        layers: how many are searched.
        alone: everything pinned but one layer, on the given inputs; where what they are asked
            together is missed, of which one input's score says nothing.
        together: whether such a thing is missed on draws only, of which ``alone`` tells nothing.
    """
    name = precision.value.upper()
    overflow = _overflow(name, table, pinned, overflowing_weights, sensitivity.must_pin)
    if overflow is not None:
        return overflow
    scores = sensitivity.scores
    suspects = sorted(sensitivity.must_pin, key=lambda n: (-scores[n], n))
    if together and alone is None and (suspects or not scores):
        return Diagnosis(
            Cause.UNKNOWN,
            f"Whether few layers make the {name} error, or many, was not measured: what is asked "
            "of several inputs together cannot be asked of each of them.",
        )
    if not suspects and not scores:
        suspects = sorted(sensitivity.strength, key=lambda n: (-sensitivity.strength[n], n))
    asked = suspects[:_MOST_PROBED] if alone is not None else []
    guilty = _guilty({n: scores[n] for n in suspects} if alone is None else _probed(asked, alone))
    over = _beyond_range(table, overflowing_weights).intersection(guilty)
    if guilty and next(iter(guilty)) in over:  # what it does to the outputs is no rounding
        under = _underflowing(table) - overflowing_weights
        return _not_finite(name, [n for n in guilty if n in over], under)
    if guilty:
        on = where if alone is None else ""
        return Diagnosis(
            Cause.ROUNDING,
            f"{name} rounding in {_named(list(guilty))} alone misses the requirement "
            f"({times(max(guilty.values()))}{on}).",
        )
    probed = len(asked) if len(asked) < len(suspects) else 0
    return _spread(name, base, table, sensitivity, layers, probed, where)


def _overflow(
    name: str,
    table: pd.DataFrame,
    pinned: Callable[[frozenset[str]], tuple[float, float]],
    overflowing_weights: frozenset[str],
    guilty: frozenset[str],
) -> Diagnosis | None:
    """Where layers that are not finite make half of the error or more; first those that are
    ``guilty`` of a miss alone, as the pins are.
    """
    beyond = _beyond_range(table, overflowing_weights)
    in_order = [str(n) for n in table["layer"] if n in beyond]
    not_finite = tuple(sorted(in_order, key=lambda n: n not in guilty))
    if not not_finite:
        return None
    before, after = pinned(frozenset(not_finite))
    cured = math.isinf(before) and math.isfinite(after)
    if not (cured or (1.0 < before < math.inf and after <= before / 2.0)):
        return None
    return _not_finite(name, not_finite, _underflowing(table) - overflowing_weights)


def _beyond_range(table: pd.DataFrame, overflowing_weights: frozenset[str]) -> frozenset[str]:
    """The layers that turn finite inputs into values that are not, or hold such a constant."""
    finite = table["introduced_finite"].astype(bool)
    return overflowing_weights.intersection(table["layer"]).union(table.loc[~finite, "layer"])


def _underflowing(table: pd.DataFrame) -> frozenset[str]:
    return frozenset(table.loc[table["underflows"].astype(bool), "layer"])


def _breaks_first(table: pd.DataFrame) -> str | None:
    """The first layer that gives values which are not finite with everything lowered, where it does
    not alone: small errors may meet in it, as zeros in a quotient.
    """
    if "finite" not in table:
        return None
    broken = table[~table["finite"].astype(bool) & table["ref_max"].notna()]  # and was computed
    if broken.empty or not broken["introduced_finite"].iloc[0]:
        return None
    return str(broken["layer"].iloc[0])


def _spread(
    name: str,
    base: ProbeResult,
    table: pd.DataFrame,
    sensitivity: Sensitivity,
    every: int,
    probed: int,
    where: str,
) -> Diagnosis:
    """What is said where no layer is seen to miss the requirement alone: of those of ``every`` that
    were measured, or of the first ``probed`` on all given inputs, where these were asked and not
    all suspects.
    """
    seen = "" if base.verdict.passed else f" ({times(base.score)}{where})"
    begins = _breaks_first(table) if math.isinf(base.score) else None
    more = f" What is not finite begins in {begins!r}." if begins is not None else ""
    count = len(sensitivity.effects)
    if count < min(every, _TELLING):
        return Diagnosis(
            Cause.UNKNOWN,
            f"The {name} error{seen} is that of a few layers or of many: there was time to measure "
            f"{count} of {every} alone.{more}",
        )
    samples = len(sensitivity.samples)
    on = f", on the {samples} inputs and draws where each was run alone" if where else ""
    which = f"{count}{f' of {every}' if count < every else ''} measured layers"
    if probed:
        which, on = f"{probed} layers that do most to one input", ""
    return Diagnosis(
        Cause.ACCUMULATION,
        f"The {name} error accumulates{seen}: none of the {which} misses the requirement alone"
        f"{on}.{more}",
    )


def _probed(suspects: Sequence[str], alone: Callable[[str], ProbeResult]) -> dict[str, float]:
    """What each of ``suspects`` scores by itself, until as many miss as are named."""
    found: dict[str, float] = {}
    for name in suspects:
        found[name] = alone(name).score
        if len(_guilty(found)) == _SHOWN:
            break
    return found


def _guilty(scores: Mapping[str, float]) -> dict[str, float]:
    return {name: score for name, score in scores.items() if not score <= 1.0}


def _not_finite(name: str, layers: Sequence[str], underflowing: Container[str]) -> Diagnosis:
    """Layers whose values are not finite: beyond the range, or divided by what became zero."""
    under = tuple(n for n in layers if n in underflowing)
    over = tuple(n for n in layers if n not in underflowing)
    why = f"in {_named(under)}: small values become zero there, and what divides by them is lost"
    if not over:
        return Diagnosis(Cause.ROUNDING, f"{name} underflows {why}.")
    beside = f" It underflows {why}." if under else ""
    return Diagnosis(
        Cause.OVERFLOW,
        f"{name} overflows in {_named(over)}: values or constants beyond its range become infinite "
        f"there.{beside}",
    )


def _named(layers: Sequence[str]) -> str:
    shown, more = ", ".join(layers[:_SHOWN]), len(layers) - _SHOWN
    if more <= 0:
        return shown
    return f"{shown} and {more} more layers" if more > 1 else f"{shown} and one more layer"
