"""Every operator: the relations hold of it, reduced and kept."""

from __future__ import annotations

import pytest

from bisect_trt.base.plan import Precision, PrecisionPlan
from tests.fuzz.relations import Case, failures
from tests.fuzz.zoo import ZOO, model_of, opsets
from tests.repair.graphs import run

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
