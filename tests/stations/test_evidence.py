"""What FP32 as a whole misses too is no evidence against pins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bisect_trt.core.holds import InputKind
from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.core.sample import Sample
from bisect_trt.core.verdict import Verdict
from bisect_trt.probe.result import PanelResult, SampleResult
from bisect_trt.stations.draws.evidence import evidence_of, left_over
from bisect_trt.stations.draws.holds import Refusal
from bisect_trt.stations.draws.panel import Panel, PanelSamples

LOW = PrecisionPlan("fp16")
EVERY = LOW.with_pins(("a", "b"))
SAMPLES = [Sample(f"s{k}", {"x": np.float32([k])}) for k in range(6)]


class Judge:
    """Misses the samples of these numbers, by plan; of a set of them together if any."""

    def __init__(self, lowered: set[int], every: set[int]) -> None:
        self.misses = {LOW: lowered, EVERY: every}
        self.asked: list[tuple[int, int]] = []

    def judge(self, plan: PrecisionPlan, samples: Any, size: int = 1, **_: Any) -> PanelResult:
        numbers = [int(s.arrays["x"][0]) for s in samples]
        self.asked += [(len(plan.pinned), n) for n in numbers]
        results = []
        for first in range(0, len(numbers), size):
            missed = self.misses[plan] & set(numbers[first : first + size])
            verdict, score = (Verdict.FAIL, 2.0) if missed else (Verdict.PASS, 0.5)
            results.append(SampleResult(verdict, score, (score,), {}, 0.0))
        return PanelResult(plan, tuple(s.name for s in samples), tuple(results))


def bench_of(first: Judge, second: Judge) -> Any:
    noted: list[str] = []
    return SimpleNamespace(
        prober=first, second=second, noted=noted, note=lambda f: noted.append(f.kind)
    )


def case_of(size: int = 1) -> Any:
    return SimpleNamespace(requirements=SimpleNamespace(of_sets=size > 1), samples=[0] * size)


def refusal(numbers: list[int], kind: InputKind = InputKind.VARIANTS) -> Refusal:
    return Refusal(kind, tuple(SAMPLES[n] for n in numbers), 9, 2.0)


@pytest.mark.parametrize(
    ("first", "second", "left"),
    [
        (({1, 2}, set()), (set(), set()), [1, 2]),  # pins mend both
        (({1, 2}, {2}), (set(), set()), [1]),
        (({1, 2}, {1, 2, 3}), (set(), set()), None),
        (({1}, set()), ({2}, {2}), [1]),  # the second one's misses are held against its own FP32
        ((set(), {1, 2}), ({1, 2}, set()), [1, 2]),
    ],
)
def test_a_draw_that_all_pins_miss_refuses_nothing(
    first: tuple[set[int], set[int]], second: tuple[set[int], set[int]], left: list[int] | None
) -> None:
    bench = bench_of(Judge(*first), Judge(*second))
    found = evidence_of(case_of(), bench, LOW, EVERY, refusal([1, 2]))
    assert (found and [s.name for s in found.samples]) == (left and [f"s{n}" for n in left])
    assert bench.noted == ([] if left == [1, 2] else ["fp32-misses"])


def test_sets_are_judged_together_and_given_inputs_always_speak() -> None:
    bench = bench_of(Judge({0, 2}, {2}), Judge(set(), set()))
    found = evidence_of(case_of(2), bench, LOW, EVERY, refusal([0, 1, 2, 3]))
    assert found is not None and [s.name for s in found.samples] == ["s0", "s1"]
    given = refusal([2], InputKind.GIVEN)
    assert evidence_of(case_of(), bench, LOW, EVERY, given) is given


def test_a_panel_sets_such_draws_aside_and_keeps_the_given_inputs() -> None:
    first, second = Judge(set(), {0, 3}), Judge(set(), {4})
    bench = bench_of(first, second)
    bench.engine = None
    case = case_of()
    case.settings = SimpleNamespace(pick=None)
    given, drawn = tuple(SAMPLES[:2]), tuple(SAMPLES[2:])
    panel = Panel(case, bench, LOW, PanelSamples(given, drawn, ()))
    assert panel.set_aside(frozenset(("a", "b"))) and not panel.set_aside(frozenset(("a", "b")))
    kept = {kind: [s.name for s in samples] for kind, samples in panel._samples.items()}
    assert kept == {InputKind.GIVEN: ["s0", "s1"], InputKind.REDRAWN: ["s2", "s5"]}
    assert (2, 3) not in second.asked, "what one judge misses the next is not asked"
    assert left_over(bench, [first], EVERY, SAMPLES[:2], 1) == SAMPLES[1:2]
