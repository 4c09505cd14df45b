"""The loop between emulator and engine, with engines that err in known ways, and how many builds it
spends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bisect_trt.base.limits import Limits
from bisect_trt.base.outcomes import Verdict
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.evaluate.result import Evaluation
from bisect_trt.metrics.errors import tensor_error
from bisect_trt.search.minimise import tightened
from bisect_trt.steps import answer, confirm, validation_inputs
from bisect_trt.steps.confirm import EngineJudge
from bisect_trt.steps.engine_diagnosis import Fp32, what_fp32_is
from bisect_trt.steps.engine_layer_errors import EngineTable
from bisect_trt.steps.search_set import Refusal
from fixtures.encoders import encoder_decomposed
from fixtures.models import residual, tf32_victim
from tests.engines import Engine, Judged, WorseOnDraws


@pytest.mark.parametrize("gain", [0.8, 1.0, 1.5, 3.0])
def test_an_engine_that_errs_more_gets_a_plan_in_few_builds(judged: Judged, gain: float) -> None:
    fixture = residual()
    result, engine = judged(fixture, Engine(fixture, gain))
    assert result.passed and result.runner == "engine" and result.score <= 1.0
    assert result.engine.builds_beyond_baselines <= 4
    assert len(engine.built) == 3 + result.engine.builds_beyond_baselines, (
        "FP32, TF32, FP16, then the plans"
    )
    assert (result.engine.tolerance_share < 1.0) == (gain > 1.0)
    assert frozenset(result.pinned) in {plan.pinned for plan in engine.built}
    assert result.complete == (not result.engine.pins_added_by_engine)


def test_an_engine_that_errs_less_gets_a_smaller_set(judged: Judged) -> None:
    fixture = replace(residual(), require="rel_range<=2.5e-4")
    few, engine = judged(fixture, Engine(fixture, 0.5))
    plans = [len(plan.pinned) for plan in engine.built[3:]]
    assert few.passed and few.complete and few.engine.tolerance_share > 1.2
    assert len(few.pinned) == min(plans) < plans[0], "the first set passed and left room"
    assert set(few.pins["tolerance_share"]) == {few.engine.tolerance_share}


@pytest.mark.parametrize(("gain", "builds"), [(1.0, 8), (3.0, 8), (3.0, 0)])
def test_no_engine_is_built_that_costs_more_than_asked(
    judged: Judged, gain: float, builds: int
) -> None:
    """What misses on the engine is the answer: with more layers it would cost more."""
    fixture = residual()
    options = {"robust": None, "max_cost": 3, "max_builds": builds}
    result, engine = judged(fixture, Engine(fixture, gain), **options)
    assert 0 < len(result.pinned) < result.layer_count
    assert {len(plan.pinned) for plan in engine.built} == {0, len(result.pinned)}
    assert result.passed == (gain == 1.0)


def test_certified_on_the_engine(judged: Judged) -> None:
    fixture = encoder_decomposed()
    result, _ = judged(fixture, Engine(fixture, 1.2), certify="engine")
    assert result.passed and result.complete and set(result.pins["proved_on"]) == {"engine"}
    assert set(result.pins["tolerance_share"]) == {1.0}


@pytest.mark.parametrize("robust", [0, 0.95])
def test_held_pins_are_held_on_the_engine_too(judged: Judged, robust: float) -> None:
    fixture = encoder_decomposed()
    held = "/encoder/layers.0/attention/MatMul_1"
    engine = Engine(fixture, 1.2)
    options = {"keep_fp32": f"^{held}$", "certify": "engine", "robust": robust}
    result, _ = judged(fixture, engine, **options)
    assert result.passed and held in result.pinned and result.complete
    assert all(held in p.pinned for p in engine.built if p.base is Precision.FP16)
    rows = result.pins.set_index("layer")
    assert rows.loc[held, "held"] and not rows.loc[held, "proved"]
    others = rows.drop(index=held)
    assert others["proved"].all() and set(others["proved_on"]) == {"engine"}


def test_held_lowered_layers_are_to_blame_on_the_engine_too(judged: Judged) -> None:
    fixture = encoder_decomposed()
    result, engine = judged(fixture, Engine(fixture), keep_reduced="MatMul|Pow|Add")
    assert (
        not result.passed
        and "With what --keep-reduced holds pinned too the requirement is met" in result.sentence
    )
    assert len(engine.built) == 4, "the baselines, and all pins but the held"


def test_no_builds_left_gives_the_closest(judged: Judged) -> None:
    fixture = residual()
    result, _ = judged(fixture, Engine(fixture, 3.0), max_builds=1)
    assert (
        not result.passed
        and result.engine.out_of_builds
        and result.score > 1.0
        and result.exit_code == 1
    )


def test_fp32_that_is_tf32_is_recognised_and_emulated(judged: Judged) -> None:
    fixture = residual()
    result, _ = judged(fixture, Engine(fixture, 1.1, tf32=True))
    assert result.engine.fp32_is == "tf32" and result.engine.pins_emulated_as == "tf32"
    assert result.passed and any("FP32 is TF32" in f.message for f in result.findings)


def test_no_plan_can_pass_where_tf32_fails(judged: Judged) -> None:
    fixture = tf32_victim()
    result, engine = judged(fixture, Engine(fixture, tf32=True))
    assert (
        result.cause.value == "tf32" and not result.passed and "no plan can pass" in result.sentence
    )
    assert len(engine.built) <= 3


def test_wrong_fp32_is_not_precision(judged: Judged) -> None:
    fixture = residual()
    result, _ = judged(fixture, Engine(fixture, offset=100.0))
    assert (
        result.cause.value == "not-precision"
        and result.exit_code == 1
        and result.engine.fp32_is == "other"
    )


def test_a_failed_build_is_a_verdict_and_not_the_end(judged: Judged) -> None:
    fixture = encoder_decomposed()
    result, _ = judged(
        fixture,
        Engine(fixture, breaks=lambda plan: plan.base is Precision.FP16 and len(plan.pinned) < 14),
    )
    assert "build-failed" in set(result.search["outcome"])
    assert any("no tactic" in f.message for f in result.findings)
    assert result.passed and len(result.pinned) >= 14


def test_tightened_scales_what_is_above_the_floor() -> None:
    assert tightened(1.0, 2.0, 1.0) == pytest.approx(0.45)
    assert tightened(1.0, 1.01, 1.0) == pytest.approx(0.7)
    assert tightened(1.0, math.inf, 0.3) == 0.5
    # Floors of 0.6 and 0.4: an excess of 0.3 became 1.2, and 0.6 is allowed.
    assert tightened(1.0, 1.6, 0.9, (0.6, 0.4)) == pytest.approx(0.6 + 0.9 * 0.3 * 0.6 / 1.2)


def test_what_fp32_is() -> None:
    def probe(scale: float) -> Evaluation:
        exact = np.linspace(-1.0, 1.0, 100)
        error = tensor_error(exact, exact + scale * np.cos(np.arange(100.0)))
        return Evaluation(
            PrecisionPlan("fp32"), "r", Verdict.PASS, scale, {"y": error}, {"y": error}, 0.0
        )

    strict, tf32 = probe(1e-7), probe(1e-3)
    assert what_fp32_is(probe(1.3e-3), strict, tf32) is Fp32.TF32
    assert what_fp32_is(probe(2e-7), strict, tf32) is Fp32.STRICT
    assert what_fp32_is(probe(0.5), strict, tf32) is Fp32.OTHER
    assert what_fp32_is(probe(2e-7), strict, strict) is Fp32.STRICT, (
        "without matrix products nothing is rounded"
    )


@pytest.mark.parametrize(
    ("unmarked", "marked", "matters"),
    [
        (9.7, 1121.0, True),
        (3.4, 2.15, True),
        (0.9, 1.1, True),
        (math.inf, 2.0, True),
        (602.0, 602.0, False),
        (0.01, 0.02, False),
        (2.0, math.nan, False),
    ],
)
def test_the_probe_effect_is_told_where_it_matters(
    unmarked: float, marked: float, matters: bool
) -> None:
    table = EngineTable({}, "marked outputs", marked, 1, "", unmarked)
    assert table.marking_effect_matters is matters
    assert [f.kind for f in table.findings()] == ["marking-effect"] * matters


def test_fresh_draws_on_the_engine_decide(judged: Judged) -> None:
    fixture = residual()
    result, engine = judged(fixture, Engine(fixture), robust=0.95)
    assert result.passed and result.runner == "engine" and result.validation is not None
    assert (
        result.validation.perturbed.lower_bound >= 0.95 and result.validation.perturbed.tested >= 59
    )
    assert set(result.search[result.search["runner"] == "engine"]["on"]) == {"given", "search_set"}
    assert len(engine.built) == 3 + result.engine.builds_beyond_baselines


def test_an_engine_that_passes_by_luck_is_searched_on(judged: Judged) -> None:
    """All layers reduced just pass the given input, on the engine too, and miss new copies."""
    fixture = residual()
    engine = Engine(fixture)
    given = [Sample("s", fixture.inputs)]
    reduced = next(engine.outputs(PrecisionPlan(Precision.FP16), given))["y"]
    exact = next(engine.outputs(PrecisionPlan(Precision.FP32), given))["y"]
    limit = float(np.abs(reduced - exact).max()) * 1.02
    fixture = replace(fixture, require=f"max_abs<={limit:.6g}")
    fitted, _ = judged(fixture, Engine(fixture))
    assert fitted.cause.value == "none" and not fitted.pinned
    result, _ = judged(fixture, Engine(fixture), robust=0.95)
    assert result.passed and result.pinned and result.cause.value == "accumulation"
    assert result.validation is not None and result.validation.perturbed.lower_bound >= 0.95


def test_no_set_is_built_that_is_no_larger_than_one_that_fresh_draws_refused(
    judged: Judged,
) -> None:
    """A search within a little less of the tolerance may end with fewer pins; on an H100 it did,
    with 202 after 208, for another build and 20 s.
    """
    fixture = residual()
    engine = WorseOnDraws(fixture)
    result, _ = judged(fixture, engine, robust=0.95, limits=Limits())
    asked = [len(p.pinned) for p in engine.built if p.base is Precision.FP16 and p.pinned]
    assert (
        result.passed
        and result.validation is not None
        and result.validation.perturbed.lower_bound >= 0.95
    )
    assert len(asked) >= 2 and len(result.pinned) == asked[-1], "the first set was refused"
    for before, after in pairwise(asked):
        assert after >= 1.1 * before


@pytest.mark.parametrize(
    ("proportional", "some", "every", "in_vain"),
    [
        (True, (1e-5, 2e-5), (0.0, 0.0), True),
        (True, (1e-5, 0.4), (0.0, 0.0), False),  # pins may still save one of them
        (True, (1.02, 0.9), (1.015, 0.9), True),  # TF32 alone uses as much
        (True, (math.inf, 0.9), (0.3, 0.9), False),
        (False, (1.0, 1.0), (1.0, 1.0), False),  # the same text, on the emulator
    ],
)
def test_what_draws_refuse_whatever_is_pinned_is_not_searched_on(
    proportional: bool,
    some: tuple[float, ...],
    every: tuple[float, ...],
    in_vain: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """RT-DETR's engines of 1,339 and 1,349 pins were built in vain: the copies that had refused it
    with 1,217 are ties, on which no pin makes a difference.
    """
    names = [f"layer{k}" for k in range(9)]

    def judge(plan: PrecisionPlan, _: Any, size: int) -> Any:
        scores = every if len(plan.pinned) == len(names) else some
        return SimpleNamespace(results=[SimpleNamespace(score=score) for score in scores])

    asked = SimpleNamespace(proportional=proportional, of_sets=False)
    problem: Any = SimpleNamespace(
        requirements=asked, names=names, samples=[0], begin=frozenset[str]()
    )
    triage: Any = SimpleNamespace(
        base=PrecisionPlan("fp16"),
        limit=1.0,
        ranking=names,
        sensitivity=SimpleNamespace(strength={}),
    )
    context: Any = SimpleNamespace(evaluator=SimpleNamespace(judge=judge))
    monkeypatch.setattr(confirm, "bisect", lambda *_, **__: "searched")
    emulators = confirm._Emulators(problem, context, None, triage, None)  # type: ignore[arg-type]
    emulators.hear_refused(frozenset(names[:4]), Refusal("augmented", (None, None), 9, 1.1))  # type: ignore[arg-type]
    assert (emulators.search(0.5) is None) is in_vain


def test_nothing_to_pin_is_tested_once(judged: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test that looks for luck is the answer's: another would spend risk and copies again."""
    made: list[int] = []
    planned = validation_inputs.planned_test

    def counted(problem: Any, number: int, *rest: Any, **options: Any) -> Any:
        made.append(number)
        return planned(problem, number, *rest, **options)

    monkeypatch.setattr(validation_inputs, "planned_test", counted)
    monkeypatch.setattr(answer, "planned_test", counted)
    fixture = replace(residual(), require="rel_range<=2e-2")
    result, _ = judged(fixture, Engine(fixture), robust=0.95)
    assert result.cause.value == "none" and not result.pinned and made == [0]
    assert result.validation is not None and result.validation.perturbed.lower_bound >= 0.95


LAYERS = [f"l{i}" for i in range(10)]


@dataclass(frozen=True)
class Found:
    """Of a search."""

    pinned: frozenset[str]
    limit: float


@dataclass(frozen=True)
class Said:
    """By the engine."""

    plan: PrecisionPlan
    score: float

    @property
    def verdict(self) -> Verdict:
        return Verdict.PASS if self.score <= 1.0 else Verdict.FAIL


class ScoredEngine:
    """Scores a set by its size, and counts what it is asked."""

    workers = 1

    def __init__(self, scores: dict[int, float]) -> None:
        self._scores, self.built = scores, list[int]()

    def evaluate(self, plan: PrecisionPlan) -> Any:
        count = len(plan.pinned)
        self.built.append(count)
        return Said(plan, self._scores[count])


def emulated(pins: frozenset[str]) -> float:
    return 1.5 - 0.1 * len(pins)


def searched(limit: float) -> Any:
    count = next(n for n in range(len(LAYERS) + 1) if 1.5 - 0.1 * n <= limit + 1e-9)
    return Found(frozenset(LAYERS[:count]), limit)


@pytest.mark.parametrize("best", [0.55, 0.62, 0.9])
def test_no_set_is_built_beyond_what_the_engine_refused(best: float) -> None:
    """An engine at its floor says nothing of how much wider a search may be: of 944 layers the
    next set had one pin, and cost a build and 25 s.
    """
    engine = ScoredEngine({5: 1.3, 7: 1.05, 8: best, 2: 2.0, 3: 1.9, 4: 1.8, 6: 1.1})
    judge = EngineJudge(
        engine=engine,  # type: ignore[arg-type]
        base=PrecisionPlan(Precision.FP16),
        ranked=LAYERS,
        search=searched,
        score=emulated,
        floors=(0.6, 0.6),
    )
    judgement = judge.decide(1.0)
    assert judgement.passed and len(judgement.plan.pinned) == 8
    assert engine.built == [5, 7, 8], "no fewer than 7 pins after 7 were refused"
