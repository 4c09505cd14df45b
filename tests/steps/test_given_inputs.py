"""What is counted, kept apart or left out is said, and nothing else is claimed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import bisect_trt
from bisect_trt.base.errors import BadInputError
from bisect_trt.base.interrupt import BudgetSpentError, Observer
from bisect_trt.base.outcomes import Finding, InputKind, Verdict
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.evaluate.result import Evaluation
from bisect_trt.inputs.samples import load_inputs, short_digest
from bisect_trt.metrics.arrays import Arrays
from bisect_trt.model.inputs import input_specs
from bisect_trt.runners.emulator import EmulatedRunner
from bisect_trt.settings import Settings
from bisect_trt.steps.context import RunStatistics, open_context
from bisect_trt.steps.problem import load
from fixtures.fixture import Fixture
from fixtures.models import healthy, residual
from tests.conftest import run_model
from tests.copies import FEW

FP16 = PrecisionPlan(Precision.FP16)


def run(fixture: Fixture, inputs: Any, out: Path, **options: Any) -> bisect_trt.Result:
    options.setdefault("require", fixture.require)
    return bisect_trt.bisect(
        fixture.model, inputs, runner="emulated", out=out, **options, limits=FEW
    )


def several(fixture: Fixture, count: int) -> list[dict[str, Any]]:
    return [
        {n: np.float32(np.roll(a, 5 * i, -1) * (1.0 - 0.01 * i)) for n, a in fixture.inputs.items()}
        for i in range(count)
    ]


def error_of(fixture: Fixture, arrays: Arrays) -> float:
    """The largest error of everything in FP16."""
    outputs = next(EmulatedRunner(fixture.model).outputs(FP16, [Sample("s", arrays)]))
    exact = run_model(fixture.model, arrays)
    return max(float(np.abs(a - b).max()) for a, b in zip(outputs.values(), exact, strict=True))


def messages(result: bisect_trt.Result) -> str:
    return "\n".join(f.message for f in result.findings)


def unchanged(arrays: Arrays, generator: np.random.Generator) -> Arrays:
    return arrays


def without_end(arrays: Arrays, generator: np.random.Generator) -> Arrays:
    return {name: np.full_like(a, np.nan) for name, a in arrays.items()}


def cut_off(arrays: Arrays, generator: np.random.Generator) -> Arrays:
    return {name: a[..., :1] for name, a in arrays.items()}


def test_copies_count_once_and_a_fifth_is_said_to_be_kept_apart(tmp_path: Path) -> None:
    fixture = healthy()
    inputs = several(fixture, 20)
    result = run(fixture, [inputs[0], *inputs, inputs[3]], tmp_path)
    assert result.validation.given.tested == 16 and result.validation.holdout.tested == 4
    assert "2 of the inputs are copies of others: they were counted once" in messages(result)
    assert "4 of 20 inputs, a fifth, are kept apart to test on" in messages(result)
    one = run(fixture, [inputs[0], inputs[0]], tmp_path / "one")
    assert one.validation.of_one and "1 of the inputs is a copy of another" in messages(one)


def test_what_is_to_be_kept_apart_is_not_searched_with(tmp_path: Path) -> None:
    """Whether it is among the given inputs or not: so the option says."""
    fixture = healthy()
    inputs = several(fixture, 6)
    result = run(fixture, inputs, tmp_path, holdout=[*inputs[4:], inputs[5]])
    assert result.validation.given.tested == 4 and result.validation.holdout.tested == 2
    assert "2 of 6 given inputs are those of --holdout" in messages(result)
    assert "1 of the inputs kept apart is a copy of another" in messages(result)
    with pytest.raises(BadInputError, match=r"^holdout names every given input"):
        run(fixture, inputs, tmp_path / "all", holdout=inputs)


def checked(fixture: Fixture, inputs: Any, out: Path, **options: Any) -> Any:
    """As :func:`run`, of a plan that was found."""
    plan = PrecisionPlan(Precision.FP16)
    return bisect_trt.verify(
        fixture.model, inputs, plan, runner="emulated", out=out, **options, limits=FEW
    )


def unseeded(arrays: Arrays, generator: np.random.Generator) -> Arrays:
    noise = np.random.default_rng()
    return {n: a + noise.normal(size=a.shape).astype(a.dtype) for n, a in arrays.items()}


def nothing(arrays: Arrays, generator: np.random.Generator) -> None:
    """Gives no inputs."""


def of_more_dimensions(arrays: Arrays, generator: np.random.Generator) -> Arrays:
    return {name: a[None] for name, a in arrays.items()}


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("rotate", "changes none of these inputs"),
        (f"{__name__}:unchanged", "were copies of a given input"),
        (f"{__name__}:without_end", "holds 64 NaN or infinite values"),
        (f"{__name__}:cut_off", "the model takes"),
        (f"{__name__}:unseeded", "not deterministic"),
        (f"{__name__}:nothing", "it gave NoneType; let it"),
        (f"{__name__}:of_more_dimensions", "other names, dtypes or dimensions"),
        ("no_such:thing", "no_such"),
    ],
)
@pytest.mark.parametrize("command", [run, checked])
def test_augmented_inputs_that_are_none_are_refused(
    tmp_path: Path, command: Callable[..., Any], kind: str, words: str
) -> None:
    """They were asked for: a verdict without them would be another than the one asked for."""
    fixture = healthy()
    with pytest.raises(BadInputError, match=f"augmented='?{re.escape(kind)}'?: .*{words}"):
        command(fixture, fixture.inputs, tmp_path, augmented=kind)


def test_what_an_older_search_saw_stays_among_the_given(tmp_path: Path) -> None:
    """It can test nothing, and would vanish if it were kept apart."""
    fixture = healthy()
    inputs = several(fixture, 6)
    settings = Settings(fixture.model, inputs, holdout=inputs[4:], out=tmp_path)
    specs = input_specs(fixture.model)
    every, _, _ = load_inputs(Settings(fixture.model, inputs, out=tmp_path), specs, Observer())
    seen = frozenset(short_digest(sample) for sample in every[:5])
    given, apart, said = load_inputs(settings, specs, Observer(), seen)
    assert (len(given), len(apart)) == (5, 1)
    told = " ".join(finding.message for finding in said)
    assert "1 of 6 given inputs are those of --holdout" in told
    assert "1 of 2 inputs are not kept apart" in told


def test_samples_from_a_function_or_a_generator(tmp_path: Path) -> None:
    fixture = healthy()

    def generator() -> Iterator[Arrays]:
        yield from several(fixture, 3)

    names = [
        list(run(fixture, source, tmp_path, robust=0).inputs["input"])
        for source in (generator, generator())
    ]
    assert names[0] == names[1] and len(names[0]) == 3
    for source, words in (
        (lambda: iter(()), "gives no sample"),
        (lambda: fixture.inputs, "gives one mapping"),
        (lambda: [1.0], "not a mapping but float"),
    ):
        with pytest.raises(BadInputError, match=words):
            run(fixture, source, tmp_path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"robust": 0, "max_cost": 5}, "--max-cost 5: with --robust 0"),
        ({"budget": float("nan")}, "--budget nan: not a number"),
        ({"budget": float("inf")}, "--budget inf: not a number"),
        ({"evaluation_timeout": float("nan")}, "--evaluation-timeout nan: not a number"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInputError, match=words):
        Settings("m.onnx", [], **options)


def test_where_some_inputs_may_miss_the_first_line_says_on_how_many(tmp_path: Path) -> None:
    fixture = healthy()
    inputs = [
        {n: np.float32(a * by) for n, a in fixture.inputs.items()} for by in (1.0, 0.9, 0.8, 16.0)
    ]
    small, *_, large = (error_of(fixture, arrays) for arrays in inputs)
    between = f"max_abs<={np.sqrt(small * large):g}"
    result = run(fixture, inputs, tmp_path, require=between, allow_misses=0.8, augmented="none")
    given = result.validation.given
    assert given.passed < given.tested, "one of them is let miss"
    assert f"on {given.passed} of the 4 given inputs" in result._repr_markdown_()
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()
    properties = {p.get("name"): p.get("value") for p in suite.iter("property")}
    assert f"{given.passed} of 4 inputs" in (properties["validation"] or "")
    assert properties["robustness"] == json.loads((tmp_path / "run.json").read_text())["verdict"]
    shown = {c.get("name"): c.findtext("system-out") for c in suite.iter("testcase")}
    assert f"{given.passed} of 4 meet" in (shown["holds on given inputs"] or "")
    assert "with 95 % confidence" in (shown["holds on perturbed inputs"] or "")


def test_a_word_for_less_than_usual_says_for_what(tmp_path: Path) -> None:
    fixture = healthy()
    inputs = several(fixture, 2)
    result = run(fixture, inputs, tmp_path, allow_misses=0.5)
    assert (
        "(at least 50 % of such inputs, 95 % confidence)" in result._repr_markdown_()
        and "VALIDATED in FP16 as it is" in result._repr_markdown_()
    )


def spent(*_: object) -> None:
    raise BudgetSpentError


def test_a_spent_budget_says_what_the_plan_was_run_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it ended the run before the baselines, in what is left all pins are asked about."""
    fixture = residual()
    monkeypatch.setattr("bisect_trt.pipeline.measure_baselines", spent)
    result = run(fixture, fixture.inputs, tmp_path, budget=5.0)
    assert result.passed and result.out_of_time
    assert (result.validation.given.passed, result.validation.perturbed.tested) == (1, 0)


def test_a_spent_budget_and_nothing_pinned_is_no_unknown_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ "Keep 0 of 13 layers", it said, and that they were not yet proved to be minimal."""
    fixture = healthy()
    monkeypatch.setattr("bisect_trt.pipeline.look_beyond", spent)
    result = run(fixture, fixture.inputs, tmp_path, budget=5.0)
    assert result.passed and result.out_of_time and not result.pinned
    assert result.cause.value == "none" and result.exit_code == 0
    assert "minimal" not in result._repr_markdown_()


@pytest.mark.slow
@pytest.mark.parametrize("robust", [0.0, 0.95])
def test_verify_says_fitted_of_a_plan_that_was(tmp_path: Path, robust: float) -> None:
    fixture = residual()
    run(fixture, fixture.inputs, tmp_path, robust=robust)
    for asked in (None, 0.0):
        found = bisect_trt.verify(
            fixture.model,
            fixture.inputs,
            tmp_path / "plan.json",
            runner="emulated",
            robust=asked,
            out=tmp_path / "v",
            limits=FEW,
        )
        assert found.validation is not None and found.validation.fitted is (robust == 0.0)


def test_a_set_that_an_emulator_refused_is_not_held() -> None:
    base = PrecisionPlan(Precision.FP16)

    def probe(pins: str, runner: str, verdict: Verdict) -> Evaluation:
        return Evaluation(
            base.with_pins(pins), runner, verdict, 0.5, {}, {}, 0.0, on=InputKind.GIVEN
        )

    log = (
        probe("ab", "one", Verdict.PASS),
        probe("ab", "two", Verdict.FAIL),
        probe("abc", "one", Verdict.PASS),
        probe("abcd", "one", Verdict.PASS),
        probe("abcd", "two", Verdict.PASS),
        probe("a", "engine", Verdict.PASS),
        probe("a", "one", Verdict.FAIL),
    )
    run_statistics = RunStatistics(Path(), log, ("one", "two"), "one", {}, 0, (), {})
    assert run_statistics.smallest_passing(base, ("one",)) == frozenset("abc")
    assert run_statistics.smallest_passing(base, ("one", "two")) == frozenset("abcd")
    assert run_statistics.smallest_passing(base, ("engine",)) == frozenset("a"), (
        "it has its own word"
    )


def test_a_note_is_kept_once(tmp_path: Path) -> None:
    fixture = healthy()
    problem = load(Settings(fixture.model, [fixture.inputs], out=tmp_path), Observer())
    told = Finding("copies", "", "no more were made")
    with open_context(problem, Observer()) as context:
        for _ in range(2):
            context.note(told)
        assert list(context.run_statistics().findings) == [told]


def test_a_decision_s_margin_is_not_told_by_the_error_beside_it(tmp_path: Path) -> None:
    fixture = healthy()
    given = [{n: np.float32(a * by) for n, a in fixture.inputs.items()} for by in (1.0, 0.9, 0.8)]
    words = [
        run(replace(fixture, require=require), given, tmp_path / str(k)).validation.word.value
        for k, require in enumerate([("top1>=1",), ("top1>=1", "max_abs<=1")])
    ]
    assert words == ["inconclusive", "inconclusive"]
