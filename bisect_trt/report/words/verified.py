"""What ``verify`` found, in sentences."""

from __future__ import annotations

from bisect_trt.core.holds import Robustness
from bisect_trt.core.names import counted
from bisect_trt.numerics.scores import times
from bisect_trt.report.words.held_on import holds_sentences, of_one_input
from bisect_trt.stations.answer.verify import GOLDEN, Verification


def verdict(found: Verification) -> str:
    """Whether the plan holds; before anything else, whether by one input."""
    holds = found.holds
    failed = [check.what for check in found.checks if check.holds is False]
    does_hold = failed in ([], [GOLDEN])
    answer = "The plan holds." if does_hold else "The plan does not hold."
    if does_hold and holds is not None and holds.word is Robustness.LUCKY:
        answer = "The plan holds on the given inputs, by luck: on others it misses more than asked."
    if failed == [GOLDEN]:
        answer += " But the reference does not give the golden outputs."
    return of_one_input(answer, holds)


def holds_lines(found: Verification) -> list[str]:
    """On what the plan was tested, which of the given inputs misses by most, and the notes."""
    holds = found.holds
    lines = holds_sentences(holds)
    if holds is not None and holds.given.passed < holds.given.tested:
        given = holds.given
        lines.append(f"The worst of those given is {given.worst}: {times(given.worst_score)}.")
    return [*lines, *found.notes]


def plan_line(found: Verification) -> str:
    """What the plan is, and what was asked of it."""
    pins, base = len(found.plan.pinned), found.plan.base.value.upper()
    requirements = ", ".join(found.requirements)
    kept = f"{counted(pins, 'layer')} in FP32, the rest in {base}" if pins else f"all in {base}"
    return f"{kept}; requirement: {requirements}"
