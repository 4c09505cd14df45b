"""What is wrong with the reduced precision, as measured: overflow, underflow, rounding or
accumulation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import pandas as pd

from bisect_trt.core.diagnosis import Cause, CauseFound, Diagnosis
from bisect_trt.core.precision import Precision
from bisect_trt.numerics.rounding import LARGEST, SMALLEST_SUBNORMAL
from bisect_trt.numerics.scores import times
from bisect_trt.probe.result import ProbeResult
from bisect_trt.stations.cause.sensitivity import Sensitivity

_SHOWN, _MOST_PROBED = 4, 16

_SMALL = 50.0
"""Smallest steps: values no larger are known to one in a hundred at best."""

_NUMBERS = 2
"""Constants that a sentence names."""

_TELLING = 8
"""Of fewer layers that were measured alone it is not said that the error is spread over many."""


@dataclass(frozen=True)
class Suspects:
    """What the model says of its layers: ``heavy`` maps those with a constant beyond the range, and
    ``lost`` those with one that the precision hardly holds, to words with the number; ``movers``
    maps a layer to those that read what it gives and only move it.
    """

    heavy: Mapping[str, str] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)
    movers: Mapping[str, Sequence[str]] = field(default_factory=dict)


def diagnose_reduced(
    base: ProbeResult,
    table: pd.DataFrame,
    sensitivity: Sensitivity,
    pinned: Callable[[frozenset[str]], tuple[float, float]],
    precision: Precision,
    suspects: Suspects,
    where: str = "",
    *,
    misses_within: Callable[[], bool] = lambda: False,
    layers: int,
    alone: Callable[[str], ProbeResult] | None = None,
    together: bool = False,
) -> Diagnosis:
    """Overflow, underflow, rounding in a few layers, or accumulation over many: told apart by
    measured effects.

    Overflow and underflow are causes if the layers that leave the range, at its upper or its lower
    end, account for at least half of the error that the other's leave; rounding, if some layer
    misses the requirement alone; else no single layer does, and the error accumulates. It is
    unknown where too few layers were measured to tell, or not on what is missed.

    Args:
        base: the probe of everything lowered.
        table: a row a layer, with ``overflows`` and ``underflows``.
        sensitivity: what each layer does alone.
        pinned: the scores without a set of pins and with it, of the same inputs.
        precision: for the sentence.
        suspects: layers whose constants leave the range.
        where: what the scores are the worst of, where these are not the given inputs alone.
        misses_within: whether an input misses on which no layer exceeds the range.
        layers: how many are searched.
        alone: everything pinned but one layer, on the given inputs; where what they are asked
            together is missed, of which one input's score says nothing.
        together: whether such a thing is missed on draws only, of which ``alone`` tells nothing.
    """
    name = precision.value.upper()
    ends = _Ends(table, suspects, precision)
    found = _beyond_an_end(ends, pinned, sensitivity.must_pin, misses_within)
    if found:
        return Diagnosis.of(found)
    scores = sensitivity.scores
    in_order = [str(n) for n in table["layer"]]
    missed = sensitivity.must_pin
    guilty_first = sorted((n for n in in_order if n in missed), key=lambda n: -scores[n])
    if together and alone is None and (guilty_first or not scores):
        return Diagnosis(
            Cause.UNKNOWN,
            f"Whether few layers make the {name} error, or many, was not measured: what is asked "
            "of several inputs together cannot be asked of each of them.",
        )
    if not guilty_first and not scores:
        strength = sensitivity.strength
        guilty_first = sorted((n for n in in_order if n in strength), key=lambda n: -strength[n])
    asked = guilty_first[:_MOST_PROBED] if alone is not None else []
    guilty = _guilty(
        {n: scores[n] for n in guilty_first} if alone is None else _probed(asked, alone)
    )
    if guilty:
        on = where if alone is None else ""
        return _rounding(ends, guilty, on)
    probed = len(asked) if len(asked) < len(guilty_first) else 0
    return _spread(name, base, table, sensitivity, layers, probed, where)


def _rounding(ends: _Ends, guilty: Mapping[str, float], on: str) -> Diagnosis:
    """Layers that miss the requirement alone; what leaves the range among them is no rounding."""
    first = next(iter(guilty))
    found = []
    for cause, those in ((Cause.OVERFLOW, ends.over), (Cause.UNDERFLOW, ends.under)):
        if first in those:
            found.append(ends.cause(cause, [n for n in guilty if n in those]))
    if found:
        return Diagnosis.of(found)
    name = ends.precision.value.upper()
    missed = times(max(guilty.values()))
    return Diagnosis.of(
        [
            CauseFound(
                Cause.ROUNDING,
                tuple(guilty),
                f"{name} rounding in {_named(list(guilty))} alone misses the requirement "
                f"({missed}{on}).",
            )
        ]
    )


class _Ends:
    """Layers whose values leave the range of ``precision``: ``over`` its upper end, ``under`` its
    lower one.
    """

    def __init__(self, table: pd.DataFrame, suspects: Suspects, precision: Precision) -> None:
        self.precision = precision
        self._suspects = suspects
        self._rows = table.set_index("layer")
        names = [str(n) for n in self._rows.index]
        beyond = {str(n) for n in self._rows.index[self._rows["overflows"].astype(bool)]}
        divides = {str(n) for n in self._rows.index[self._rows["underflows"].astype(bool)]}
        self.divides = divides - set(suspects.heavy)
        self.over = [n for n in names if n in beyond or n in suspects.heavy]
        tiny = self._tiny()
        lost = self._with_movers(divides | set(suspects.lost) | tiny)
        self.under = [n for n in names if n in lost and n not in self.over]
        # Loud inputs break them at the one end, quiet ones at the other: no pins tell these apart.
        self.both = [n for n in names if n in divides & beyond]
        self.lost = [n for n in names if n in suspects.lost]

    def _with_movers(self, layers: Set[str]) -> set[str]:
        """``layers`` and those that only move on what they give: rounded there, it is as lost."""
        found, left = set(layers), list(layers)
        while left:
            new = set(self._suspects.movers.get(left.pop(), ())) - found
            found |= new
            left += new
        return found

    def _tiny(self) -> frozenset[str]:
        """The layers whose every value loses bits by its size."""
        if self.precision not in SMALLEST_SUBNORMAL:
            return frozenset()
        size = self._size()
        few_bits = (size > 0.0) & (size <= _SMALL * SMALLEST_SUBNORMAL[self.precision])
        return frozenset(str(n) for n in self._rows.index[few_bits])

    def _size(self) -> pd.Series[float]:
        """The largest magnitude that each layer gives in FP32."""
        found = self._rows[["ref_min", "ref_max"]].abs().max(axis=1)
        return found.fillna(0.0)

    def cause(self, cause: Cause, layers: Sequence[str]) -> CauseFound:
        """``cause`` in ``layers``, with the number that matters."""
        said = self._overflow(layers) if cause is Cause.OVERFLOW else self._underflow(layers)
        return CauseFound(cause, tuple(layers), said)

    def _overflow(self, layers: Sequence[str]) -> str:
        name, largest = self.precision.value.upper(), f"{LARGEST[self.precision]:,.6g}"
        held = next((self._suspects.heavy[n] for n in layers if n in self._suspects.heavy), "")
        size = self._size()
        largest_of = max(layers, key=lambda n: size.get(n, 0.0))
        if held:
            why = f"{held} exceeds {name}'s {largest}"
        elif size.get(largest_of, 0.0) > LARGEST[self.precision]:
            why = f"values of {largest_of} reach {size[largest_of]:.3g}, beyond {name}'s {largest}"
        else:
            why = f"values or constants beyond {name}'s {largest} become infinite there"
        return f"{name} overflows in {_named(layers)}: {why}."

    def _underflow(self, layers: Sequence[str]) -> str:
        name, size = self.precision.value.upper(), self._size()
        held = [self._suspects.lost[n] for n in layers if n in self._suspects.lost]
        tiny = [n for n in layers if n in self._tiny()]
        if held:
            why = "; ".join(held[:_NUMBERS])
        elif tiny:
            why = f"values of {tiny[0]} are {size[tiny[0]]:.3g} at most and lose their bits"
        else:
            why = "small values become zero there, and what divides by them is lost"
        return f"{name} underflows in {_named(layers)}: {why}."


def _beyond_an_end(
    ends: _Ends,
    pinned: Callable[[frozenset[str]], tuple[float, float]],
    guilty: frozenset[str],
    misses_within: Callable[[], bool],
) -> list[CauseFound]:
    """Overflow and underflow, where what leaves that end of the range makes half of the error or
    more of what is left without the other; the larger first. Layers that are ``guilty`` of a miss
    alone are named first, and where there are such, they alone are named of underflow.
    """
    if not ends.over and not ends.under:
        return []
    over, under = frozenset(ends.over), frozenset(ends.under)
    before, neither = pinned(over | under)
    if math.isnan(before) or before <= 1.0:
        return []
    without_over = pinned(over)[1] if over and under else (neither if over else before)
    without_under = pinned(under)[1] if over and under else (neither if under else before)
    found: list[tuple[float, CauseFound]] = []
    if over and _accounts_for(without_under, neither):
        named = sorted(ends.over, key=lambda n: n not in guilty)
        found.append((without_under, ends.cause(Cause.OVERFLOW, named)))
    if under and _accounts_for(without_over, neither):
        named = [n for n in ends.under if n in guilty or n in ends.divides] or ends.under
        found.append((without_over, ends.cause(Cause.UNDERFLOW, named)))
    if (ends.both or ends.lost) and [its.name for _, its in found] == [Cause.OVERFLOW]:
        also = [*ends.both, *(ends.lost if ends.both or misses_within() else [])]
        if also:
            found.append((0.0, ends.cause(Cause.UNDERFLOW, list(dict.fromkeys(also)))))
    return [cause for _, cause in sorted(found, key=lambda one: -one[0])]


def _accounts_for(left: float, neither: float) -> bool:
    """Whether the error goes, or is halved at least, from what is ``left`` without these pins."""
    cured = math.isinf(left) and math.isfinite(neither)
    return cured or (1.0 < left < math.inf and neither <= left / 2.0)


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
    seen = "" if base.verdict.passed else f" ({times(base.score, base.verdict)}{where})"
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


def _named(layers: Sequence[str]) -> str:
    shown, more = ", ".join(layers[:_SHOWN]), len(layers) - _SHOWN
    if more <= 0:
        return shown
    return f"{shown} and {more} more layers" if more > 1 else f"{shown} and one more layer"
