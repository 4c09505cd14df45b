"""What an engine's outputs show beside emulated ones: pure functions of arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bisect_trt.metrics.arrays import Arrays
from bisect_trt.metrics.errors import farthest_apart
from bisect_trt.metrics.requirements import Requirements
from bisect_trt.runners.tensorrt.execute import Counted, same_bits

SAME, OTHER_PLACES = "same", "other places"
ENGINE_FINITE, EMULATOR_FINITE = "engine finite", "emulator finite"
PLACES = (SAME, OTHER_PLACES, ENGINE_FINITE, EMULATOR_FINITE)
"""How the non-finite outputs of an engine lie beside the emulated ones."""

OWN_ERROR = 1e-3
"""Up to this score an error is that of FP32 itself: 100 dB under a requirement of 40 dB."""


FAR_ERROR = 0.1
"""Only from this score on can an error be far beyond those of the perturbed copies."""


@dataclass(frozen=True)
class Scored:
    """One input: the ``engine``'s score, the ``emulated`` one and the ``largest`` of its perturbed
    copies.

    ``largest`` is None where nothing can be perturbed. ``nonfinite`` is one of :data:`PLACES`.
    """

    nonfinite: str
    engine: float
    emulated: float
    largest: float | None

    @property
    def exceeds(self) -> bool:
        """Whether the engine errs more than every perturbed copy."""
        return self.largest is not None and self.engine > self.largest

    @property
    def clearly_exceeds(self) -> bool:
        """Whether it does by more than a tenth, and by more than FP32's own error."""
        return self.exceeds and self.engine > max(1.1 * (self.largest or 0.0), OWN_ERROR)

    @property
    def far_exceeds(self) -> bool:
        """Whether it errs by more than ten times the largest, which no rounding explains."""
        return self.exceeds and self.engine > max(10.0 * (self.largest or 0.0), FAR_ERROR)


def scored(
    requirements: Requirements,
    reference: Arrays,
    engine: Arrays,
    emulated: Arrays,
    perturbed: Sequence[float],
) -> Scored:
    """Judges one input's outputs of an engine; ``perturbed`` are scores of emulated copies."""
    engine = as_floats(engine)
    return Scored(
        nonfinite_places(engine, emulated),
        requirements.score(reference, engine),
        requirements.score(reference, emulated),
        max(perturbed, default=None),
    )


def nonfinite_places(engine: Arrays, emulated: Arrays) -> str:
    """Compares where outputs are NaN or infinite; one of :data:`PLACES`."""
    pairs = [
        (~np.isfinite(engine[name]), ~np.isfinite(array))
        for name, array in emulated.items()
        if array.dtype.kind == "f"
    ]
    if all(np.array_equal(one, other) for one, other in pairs):
        return SAME
    if not any(one.any() for one, _ in pairs):
        return ENGINE_FINITE
    if not any(other.any() for _, other in pairs):
        return EMULATOR_FINITE
    return OTHER_PLACES


def as_floats(arrays: Arrays) -> Arrays:
    """Widens FP16 and BF16 to FP32; other types stay."""
    return {
        name: array.astype(np.float32)
        if array.dtype.kind in "fV" and array.dtype.itemsize == 2
        else array
        for name, array in arrays.items()
    }


@dataclass(frozen=True)
class Repetition:
    """The answers of ``processes`` to the same inputs.

    ``within`` and ``between`` say whether they are bit-equal inside each process and from one to
    the next. ``apart`` is the largest difference over an output's range.
    """

    processes: int
    within: bool
    between: bool
    apart: float


def repetition(references: Sequence[Arrays], processes: Sequence[Sequence[Counted]]) -> Repetition:
    """Compares the answers of several processes, each with one :data:`Counted` an input."""
    within = all(len(counted) == 1 for answers in processes for counted in answers)
    between, apart = True, 0.0
    for place, reference in enumerate(references):
        counted = [answers[place] for answers in processes]
        first = counted[0][0][0]
        between = between and all(same_bits(first, other[0][0]) for other in counted[1:])
        found = [as_floats(answer) for one in counted for answer, _ in one]
        apart = max(apart, farthest_apart(reference, found)[1])
    return Repetition(len(processes), within, between, apart)
