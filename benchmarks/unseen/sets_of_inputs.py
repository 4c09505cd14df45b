"""What copies of a set of inputs say of other sets: ``python -m benchmarks.unseen.sets_of_inputs
[--repeats 6] [--first 0]``.

The small models of :mod:`benchmarks.unseen.few_inputs` with a requirement on all inputs together,
each searched with one set; every plan is judged on 200 other sets of as many inputs, drawn from
2,000 that no search saw. A row counts the plans of which as many copies of the set held as were
asked for, and those called validated; of either, how many hold on less than 93 % of the other sets.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import bisect_trt
from benchmarks.unseen.few_inputs import (
    UNSEEN_FROM,
    begun,
    classifier,
    image,
    loud,
    told_few,
)
from bisect_trt.base.outcomes import ValidationVerdict
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.metrics.arrays import Arrays
from bisect_trt.metrics.requirements import aggregate
from bisect_trt.runners.emulator import EmulatedRunner

COUNTS, OTHERS, SETS = (8, 24, 64), 2000, 200
_LIMIT = {"mean": 6e-4, "p95": 1e-3}


def rare(number: int) -> Arrays:
    """Images of which one in eight is four times as strong."""
    strength = 4.0 if np.random.default_rng([number, 9]).random() < 0.125 else 1.0
    return {name: np.float32(array * strength) for name, array in image(number).items()}


KINDS = {"images": image, "images of any strength": loud, "images, one in eight strong": rare}


def row(name: str, kind: str, count: int, repeats: range, folder: Path) -> str:
    """A row of the table: a plan a repeat, each searched with a set of ``count`` inputs."""
    model, make = classifier(), KINDS[name]
    limit = _LIMIT[kind] * (1.0 if make is image else 2.0)
    others = [make(UNSEEN_FROM + i) for i in range(OTHERS)]
    kept: dict[frozenset[str], float] = {}
    asked, robust, pins = [], [], []
    for repeat in repeats:
        given = [make(1000 * repeat + i) for i in range(count)]
        found = bisect_trt.bisect(
            model,
            given,
            require=f"max_abs@{kind}<={limit:g}",
            holdout="none",
            runner="emulated",
            out=folder / "run",
        )
        validation = found.validation
        if not found.passed or validation is None:
            continue
        if (chosen := frozenset(found.pinned)) not in kept:
            errors = _errors(chosen, others)
            random = np.random.default_rng(0)
            sets = np.stack([random.choice(errors, count, replace=False) for _ in range(SETS)])
            at = [aggregate(kind, errors.tolist(), at_least=False) for errors in sets]
            kept[chosen] = float(np.mean(np.asarray(at) <= limit))
        pins.append(len(chosen))
        if min(
            validation.perturbed.lower_bound, validation.augmented.lower_bound
        ) >= validation.wanted or (
            count >= 20 and validation.perturbed.lower_bound >= validation.wanted
        ):
            asked.append(kept[chosen])
        robust += [kept[chosen]] if validation.word is ValidationVerdict.VALIDATED else []
    counted = " | ".join(f"{len(some)} | {told_few(some)}" for some in (asked, robust))
    return f"| {name} | {kind} of {count} | {min(pins)} to {max(pins)} | {counted} |"


def _errors(pins: frozenset[str], others: list[Arrays]) -> NDArray[np.float64]:
    """The largest error of each of ``others`` under a plan."""
    runner = EmulatedRunner(classifier())
    samples = [Sample(f"{i}", arrays) for i, arrays in enumerate(others)]
    plans = PrecisionPlan(Precision.FP32), PrecisionPlan(Precision.FP16, pins)
    exact, found = ([o["logits"] for o in runner.outputs(plan, samples)] for plan in plans)
    return np.asarray([np.abs(a - b).max() for a, b in zip(exact, found, strict=True)])


def main() -> None:
    """Print the table."""
    repeats = begun(__doc__, 6, "a set")
    for name in KINDS:
        for kind in _LIMIT:
            for count in COUNTS:
                with tempfile.TemporaryDirectory() as folder:
                    print(row(name, kind, count, repeats, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
