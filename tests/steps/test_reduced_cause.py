"""The cause by what layers were measured to do, and what is said of those that were not."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import bisect_trt
from bisect_trt.base.outcomes import Cause, Verdict
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.evaluate.result import Evaluation
from bisect_trt.steps.diagnosis import Suspects, diagnose_reduced
from bisect_trt.steps.sensitivity import Sensitivity
from fixtures.models import bf16_victim, residual
from tests.copies import FEW

FP16 = PrecisionPlan(Precision.FP16)


def evaluated(score: float) -> Evaluation:
    verdict = Verdict.PASS if score <= 1.0 else Verdict.FAIL
    return Evaluation(FP16, "emulated", verdict, score, {}, {}, 0.0)


def measured(scores: dict[str, float]) -> Sensitivity:
    rows = {name: np.zeros(1, np.float32) for name in scores}
    return Sensitivity(rows, scores, np.zeros(1, np.float32), 2.0, dict(scores), 0)


def cause(
    scores: dict[str, float],
    layers: int,
    overflows: tuple[str, ...] = (),
    alone: Callable[[str], Evaluation] | None = None,
    without: float = 0.5,
    together: bool = False,
) -> tuple[Cause, str]:
    names = [*scores, *(f"other{i}" for i in range(layers - len(scores)))]
    broken = [name in overflows for name in names]
    table = pd.DataFrame({"layer": names, "overflows": broken, "underflows": False})
    table = table.assign(introduced_finite=~table["overflows"])
    table = table.assign(ref_min=-1.0, ref_max=1.0)
    found = diagnose_reduced(
        evaluated(3.0),
        table,
        measured(scores),
        lambda _: (3.0, without),
        Precision.FP16,
        Suspects(),
        layers=layers,
        alone=alone,
        together=together,
    )
    return found.cause, found.sentence


SMALL = {f"l{i}": 0.1 for i in range(8)}


def test_what_breaks_the_requirement_alone_is_named_the_worst_first() -> None:
    found, said = cause({"a": 1.5, "b": 2.5, "c": 0.2}, 3)
    assert found is Cause.ROUNDING
    assert said.startswith("FP16 rounding in b, a alone misses the requirement (2.5 times")
    found, said = cause({f"l{i}": 9.0 - i for i in range(6)}, 6)
    assert "l0, l1, l2, l3 and 2 more layers alone" in said
    assert "l3 and one more layer alone" in cause({f"l{i}": 9.0 - i for i in range(5)}, 5)[1]


@pytest.mark.parametrize(
    ("count", "layers", "found", "said"),
    [
        (8, 8, Cause.ACCUMULATION, "none of the 8 measured layers misses"),
        (8, 900, Cause.ACCUMULATION, "none of the 8 of 900 measured layers misses"),
        (3, 3, Cause.ACCUMULATION, "none of the 3 measured layers misses"),
        (3, 120, Cause.UNKNOWN, "there was time to measure 3 of 120 alone"),
        (0, 120, Cause.UNKNOWN, "there was time to measure 0 of 120 alone"),
    ],
)
def test_of_layers_that_were_not_measured_nothing_is_said(
    count: int, layers: int, found: Cause, said: str
) -> None:
    told = cause(dict(list(SMALL.items())[:count]), layers)
    assert told[0] is found and said in told[1]


def test_overflow_is_the_cause_where_it_is_half_of_the_error() -> None:
    assert cause(SMALL, 8, ("l3",))[0] is Cause.OVERFLOW
    assert cause(SMALL, 8, ("l3",), without=2.9)[0] is Cause.ACCUMULATION


def test_of_what_overflows_those_that_miss_alone_are_named_first() -> None:
    """The pins are among them; what overflows and is not seen may be most of it."""
    scores = {"hidden": 0.1, "also hidden": 0.2, "seen": 2.5}
    _, said = cause(scores, 3, overflows=tuple(scores))
    assert said.startswith("FP16 overflows in seen, hidden, also hidden: ")


def test_what_overflows_and_misses_alone_is_called_no_rounding() -> None:
    """On another input than the layers' table shows something else overflows: without these the
    score was still more than half.
    """
    found, said = cause(SMALL | {"l3": 5.0, "l5": 2.0}, 8, ("l3",), without=2.9)
    assert found is Cause.OVERFLOW and "overflows in l3:" in said
    assert "FP16 rounding in l5 alone misses" in said
    found, said = cause(SMALL | {"l3": 2.0, "l5": 5.0}, 8, ("l3",), without=2.9)
    assert found is Cause.ROUNDING and "l5" in said


def test_what_misses_alone_beside_an_overflow_is_named_too() -> None:
    """Only where the requirement is missed without the overflow."""
    scores = SMALL | {"l3": 5.0, "l5": 1.4}
    found, said = cause(scores, 8, ("l3",), without=1.4)
    assert found is Cause.OVERFLOW and said.startswith("FP16 overflows in l3:")
    assert "FP16 rounding in l5 alone misses the requirement (1.4 times" in said
    assert "rounding" not in cause(scores, 8, ("l3",), without=0.9)[1]
    # What leaves the range on other inputs than the table's belongs to the same cause.
    joined = SMALL | {"l3": 5.0, "l5": math.inf}
    assert cause(joined, 8, ("l3",), without=1.4)[1].startswith("FP16 overflows in l3, l5:")
    # Of many inputs a layer's score on one is no verdict.
    assert "rounding" not in cause(scores, 8, ("l3",), without=1.4, together=True)[1]


def test_where_inputs_count_together_one_s_score_is_no_verdict() -> None:
    """A layer that misses on one of fifty inputs meets a mean over them."""
    scores = {"a": 29.0, "b": 28.0, **SMALL}
    assert cause(scores, 10, alone=lambda _: evaluated(0.9))[0] is Cause.ACCUMULATION
    found, said = cause(scores, 10, alone=lambda n: evaluated(1.5 if n == "b" else 0.9))
    assert found is Cause.ROUNDING and "rounding in b alone misses the requirement (1.5" in said
    assert cause(scores, 10, alone=lambda _: evaluated(math.nan))[0] is Cause.ROUNDING
    assert cause(scores, 10, together=True)[0] is Cause.UNKNOWN, "and where only copies miss"
    assert cause(SMALL, 8, together=True)[0] is Cause.ACCUMULATION


@pytest.mark.parametrize("count", [1, 3])
def test_where_one_input_has_no_score_what_does_most_is_asked_of_all(
    tmp_path: Path, count: int
) -> None:
    """Of a metric of all inputs each layer's score was 0, and none missed it alone."""
    fixture = bf16_victim()
    inputs = [{n: a * np.float32(f) for n, a in fixture.inputs.items()} for f in (1.0, 0.7, 0.5)]

    code = tmp_path / "far.py"
    code.write_text(
        "def furthest(reference, candidate):\n"
        "    pairs = zip(reference, candidate)\n"
        "    return max(float(abs(r['y'] - c['y']).max()) for r, c in pairs)\n"
    )
    result = bisect_trt.bisect(
        fixture.model,
        inputs[:count],
        precision="bf16",
        require="furthest<=1e-2",
        metric=[f"{code}:furthest@all"],
        runner="emulated",
        out=tmp_path / "out",
        limits=FEW,
    )
    assert result.cause is Cause.ROUNDING and "/offset/Add" in result.sentence
    assert result.layers["sensitivity"].isna().all()


def test_suspects_are_asked_one_by_one_until_one_misses() -> None:
    scores = {f"l{i:02}": 40.0 - i for i in range(20)}
    found, said = cause(scores, 20, alone=lambda n: evaluated(5.0 if n == "l04" else 0.5))
    assert found is Cause.ROUNDING and "rounding in l04 alone misses" in said
    asked: list[str] = []

    def none_misses(name: str) -> Evaluation:
        asked.append(name)
        return evaluated(0.5)

    found, said = cause(scores, 20, alone=none_misses)
    assert found is Cause.ACCUMULATION and asked == [f"l{i:02}" for i in range(16)]
    assert "none of the 16 layers that do most to one input misses" in said


@pytest.mark.slow
def test_a_mean_over_inputs_blames_no_layer_that_meets_it_alone(tmp_path: Path) -> None:
    """Of twelve inputs one is so loud that many a layer misses on it alone."""
    fixture = residual()
    (name,) = fixture.inputs
    given = [
        {name: fixture.inputs[name] * np.float32(1e-5 * (i + 1) + 2.0 * (i == 3))}
        for i in range(12)
    ]
    single = bisect_trt.bisect(
        fixture.model,
        given,
        require="max_abs<=2e-3",
        out=tmp_path / "one",
        runner="emulated",
        limits=FEW,
    )
    result = bisect_trt.bisect(
        fixture.model,
        given,
        require="max_abs@mean<=2e-3",
        out=tmp_path / "all",
        runner="emulated",
        limits=FEW,
    )
    assert single.cause is Cause.ROUNDING and result.cause is Cause.ACCUMULATION
