"""Of many nodes a test's copies are made before the reference gives way to the second emulator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bisect_trt.base.interrupt import Observer, TimeBudget
from bisect_trt.runners.reference import Reference
from bisect_trt.steps.context import open_context
from bisect_trt.steps.validation import put_to_test
from bisect_trt.steps.validation_inputs import make_copies_ahead, next_test
from tests.stations.draws.test_fresh_draws import MADE, case_of


@pytest.mark.parametrize(
    ("many", "fitted", "inputs", "minutes"),
    [
        (True, False, 1, None),
        (True, False, 40, None),  # of which others are drawn by how many copies there will be
        (False, False, 1, None),
        (True, True, 1, None),
        (True, False, 1, 5.0),  # a budget is the search's first
    ],
)
def test_the_reference_is_not_opened_again_for_the_next_test(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    many: bool,
    fitted: bool,
    inputs: int,
    minutes: float | None,
) -> None:
    if many:
        monkeypatch.setattr("bisect_trt.runners.concurrency.MANY_NODES", 1)
    opened: list[int] = []
    plain = Reference._open

    def counted(self: Reference, *arguments: Any) -> Any:
        opened.append(1)
        return plain(self, *arguments)

    monkeypatch.setattr(Reference, "_open", counted)
    more = {"robust": 0.0} if fitted else {}
    scales = [1.0 + 0.01 * number for number in range(inputs)]
    problem = case_of(tmp_path, scales, holdout=["none"], **more)
    MADE.clear()
    with open_context(problem, Observer(), time_budget=TimeBudget(minutes)) as context:
        context.evaluator.evaluate(problem.base)
        make_copies_ahead(problem, context)
        made = len(MADE)
        assert (made > 0) == (many and not fitted and minutes is None)
        context.second.evaluate(problem.base)
        if not made:
            return
        before = len(opened)
        make_copies_ahead(
            problem, context
        )  # as before the second emulator is asked about another set
        assert len(MADE) == made
        test = next_test(problem, context)
        assert made >= test.enough
        judges = [context.evaluator, context.second]
        refused, validation = put_to_test(problem, context, judges, problem.base, test, 1.0)
        assert refused is None and validation is not None
        assert validation.perturbed.tested == validation.augmented.tested == test.enough
    assert len(opened) == before, "all references were there"
