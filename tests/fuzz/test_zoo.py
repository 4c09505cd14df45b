"""Every operator: the relations hold of it, reduced and kept."""

from __future__ import annotations

import numpy as np
import pytest

from bisect_trt.base.plan import Precision, PrecisionPlan
from tests.execute import run
from tests.fuzz.relations import Case, failures, typed_is_emulated
from tests.fuzz.zoo import ZOO, model_of, opsets

OPERATORS = sorted({entry.op for entry in ZOO})

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("operator", OPERATORS)
def test_relations_hold_of_each_operator(operator: str) -> None:
    for number, entry in enumerate(ZOO):
        for opset in opsets(entry) if entry.op == operator else ():
            model, feed = model_of(entry, opset)
            assert run(model, feed)
            for base in (Precision.FP16, Precision.BF16):
                for pinned in ((), ("judged",)):
                    plan = PrecisionPlan(base, pinned)
                    found = failures(Case(model, (feed,), plan, number))
                    assert found == [], f"opset {opset}, {plan.to_json()}"


def test_the_zoo_is_large() -> None:
    assert len(OPERATORS) >= 110
    assert any(entry.outputs == 4 for entry in ZOO)


KERNELS_DIFFER = {"DeformConv", "DynamicQuantizeLinear", "Hardmax", "LRN", "LpPool", "Resize"}
"""Operators whose kernels spread or ignore one NaN otherwise than the formula."""


@pytest.mark.parametrize("operator", sorted(set(OPERATORS) - KERNELS_DIFFER))
def test_one_nan_and_one_overflow_are_where_they_belong(operator: str) -> None:
    for entry in ZOO:
        model, feed = model_of(entry, entry.until) if entry.op == operator else (None, {})
        if model is None or "x0" not in feed:
            continue
        broken = {name: array.copy() for name, array in feed.items()}
        broken["x0"].reshape(-1)[[0, -1]] = np.nan, 1e6
        for pinned in ((), ("judged",)):
            case = Case(model, (broken,), PrecisionPlan(Precision.FP16, pinned))
            assert list(typed_is_emulated(case)) == [], pinned
