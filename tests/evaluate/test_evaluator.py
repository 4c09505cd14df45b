"""Evaluations of plans: what is run, judged, logged and recalled."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from bisect_trt.base.errors import RunnerFailedError
from bisect_trt.base.interrupt import Observer
from bisect_trt.base.outcomes import Verdict
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.evaluate.cache import Cache
from bisect_trt.evaluate.evaluator import Criteria, Evaluator, Execution
from bisect_trt.evaluate.references import References
from bisect_trt.evaluate.result import Evaluation, SampleResult
from bisect_trt.metrics.errors import tensor_error
from bisect_trt.metrics.parser import parse_requirements
from bisect_trt.model.graph import Graph
from bisect_trt.runners.base import Repeated
from bisect_trt.runners.emulator import EmulatedRunner
from bisect_trt.runners.reference import Reference
from bisect_trt.settings import Settings
from bisect_trt.steps.context import open_context
from bisect_trt.steps.problem import load
from fixtures.models import residual

MODEL = """<ir_version: 8, opset_import: ["": 17]>
g (float[4] x) => (float[4] y) { [relu] y = Relu (x) }"""
PLAN = PrecisionPlan("fp16")


class DoublingRunner:
    """Off by what the sample holds."""

    name = "emulated"
    versions: Mapping[str, str] = {}

    def facts(self, plan: PrecisionPlan) -> Mapping[str, Any]:
        return {}

    def outputs(self, plan: PrecisionPlan, samples: Sequence[Sample]) -> Iterator[Any]:
        return ({"y": 2 * sample.arrays["x"]} for sample in samples)


def samples(*errors: float) -> list[Sample]:
    return [Sample(f"x{k}", {"x": np.full(4, e, np.float32)}) for k, e in enumerate(errors)]


@pytest.fixture
def evaluator(tmp_path: Path) -> Evaluator:
    references = References(Reference(Graph(onnx.parser.parse_model(MODEL)), "m"), tmp_path / "r")
    criteria = Criteria(references, parse_requirements(["max_abs<=1"], ["y"], {}, {}))
    return Evaluator(DoublingRunner(), [], criteria, Cache(tmp_path), "run")


def test_what_is_asked_again_is_no_other_evaluation(evaluator: Evaluator) -> None:
    told: list[Evaluation] = []
    evaluator.on_evaluation = told.append
    first = evaluator.judge(PLAN, samples(0.5, 2.0, 3.0)).logged
    assert evaluator.judge(PLAN, samples(0.5, 2.0, 3.0)).logged is first
    assert evaluator.log == told == [first]
    assert evaluator.judge(PLAN, samples(0.5)).logged is not first  # it ended sooner
    assert len(evaluator.log) == 2
    assert evaluator.judge(PLAN, []).logged is None and len(evaluator.log) == 2


def test_the_note_counts_misses_as_the_columns_say(evaluator: Evaluator) -> None:
    entry = evaluator.judge(PLAN, samples(0.5, 2.0, 3.0)).logged
    assert entry is not None and entry.note == "2 of 3 samples miss; worst x2"


PAIR = [Sample(n, {"x": np.full(4, i + 1, np.float32)}) for i, n in enumerate("AB")]


def farthest(wanted: Sequence[Any], found: Sequence[Any]) -> float:
    return max(float(abs(f["y"] - w["y"]).max()) for w, f in zip(wanted, found, strict=True))


class RepeatingRunner:
    """Off by 0.1 in four runs of six and by 0.2 in two; ``B`` may give no answer."""

    name = "engine"
    versions: Mapping[str, str] = {}

    def __init__(self, *, breaks: bool, timeout_s: float = 1.0) -> None:
        self._breaks, self.timeout_s = breaks, timeout_s

    def facts(self, plan: PrecisionPlan) -> Mapping[str, Any]:
        return {}

    def outputs(self, plan: PrecisionPlan, samples: Sequence[Sample]) -> Iterator[Any]:
        for sample in samples:
            if sample.name == "B" and self._breaks:
                raise RunnerFailedError("no answer", Verdict.TIMED_OUT)
            off = {by: sample.arrays["x"] + np.float32(by) for by in (0.1, 0.2)}
            yield Repeated({"y": off[0.1]}, 6, [({"y": off[0.2]}, 2)])


@pytest.fixture
def evaluator_of(tmp_path: Path) -> Callable[[RepeatingRunner], Evaluator]:
    graph, cache = Graph(onnx.parser.parse_model(MODEL)), Cache(tmp_path)
    asked = parse_requirements(["far<=1"], ["y"], {}, {"far": farthest})

    def made(runner: RepeatingRunner) -> Evaluator:
        references = References(Reference(graph, "m"), tmp_path / "references")
        return Evaluator(runner, PAIR, Criteria(references, asked), cache, "run")

    return made


def test_a_sample_that_breaks_beside_one_whose_runs_differ(
    evaluator_of: Callable[[RepeatingRunner], Evaluator],
) -> None:
    result = evaluator_of(RepeatingRunner(breaks=True)).evaluate(PLAN)
    assert result.verdict is Verdict.TIMED_OUT and math.isinf(result.score)


def test_a_set_is_judged_again_where_one_of_it_is_waited_for_longer(
    evaluator_of: Callable[[RepeatingRunner], Evaluator],
) -> None:
    (impatient,) = evaluator_of(RepeatingRunner(breaks=True)).judge(PLAN, PAIR, size=2).results
    assert math.isinf(impatient.score)
    (patient,) = (
        evaluator_of(RepeatingRunner(breaks=False, timeout_s=9.0)).judge(PLAN, PAIR, size=2).results
    )
    assert patient.verdict is Verdict.PASS and patient.score == pytest.approx(0.2)


def test_the_worst_and_the_best_runs_of_all_are_judged(
    evaluator_of: Callable[[RepeatingRunner], Evaluator],
) -> None:
    for _ in range(2):  # made, and recalled
        result = evaluator_of(RepeatingRunner(breaks=False)).evaluate(PLAN)
        assert result.score == pytest.approx(0.2) and result.best_score == pytest.approx(0.1)
        assert result.reproducibility is not None and result.reproducibility.passed == 12


OUTPUTS = {"y": np.zeros(2, np.float32)}
COUNT = 20


class ZeroReferences:
    def make_ready(self, *_: object) -> None:
        pass

    def of(self, sample: Sample) -> Mapping[str, NDArray[Any]]:
        return OUTPUTS


class BreakingRunner:
    """Breaks on the samples named ``bad``: while it answers one by one, or before any answer."""

    name = "runner"
    versions: Mapping[str, str] = {}

    def __init__(self, bad: Sequence[int], *, streams: bool, verdict: Verdict) -> None:
        self._bad, self._streams, self._verdict = {str(n) for n in bad}, streams, verdict
        self.calls: list[int] = []

    def outputs(
        self, plan: PrecisionPlan, samples: Sequence[Sample]
    ) -> Iterator[Mapping[str, NDArray[Any]]]:
        self.calls.append(len(samples))
        for asked in ([s] for s in samples) if self._streams else [samples]:
            if any(sample.name in self._bad for sample in asked):
                raise RunnerFailedError("it broke", self._verdict)
            yield from (OUTPUTS for _ in asked)

    def facts(self, plan: PrecisionPlan) -> Mapping[str, Any]:
        return {}


def answered(runner: BreakingRunner) -> str:
    """A point for each sample that was answered, a cross for each that was not."""
    asked = parse_requirements(["max_abs<=1"], ["y"], {}, {})
    execution = Execution(runner, Criteria(ZeroReferences(), asked))  # type: ignore[arg-type]
    samples = [Sample(str(number), {}) for number in range(COUNT)]
    found = execution.run(PrecisionPlan("fp16"), samples)
    return "".join("." if result.errors else "X" for result in found)


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("bad", [[], [0], [5], [5, 9], [19]])
def test_the_others_keep_their_answers(bad: list[int], streams: bool) -> None:
    runner = BreakingRunner(bad, streams=streams, verdict=Verdict.CRASHED)
    expected = "".join("X" if number in bad else "." for number in range(COUNT))
    assert answered(runner) == expected
    if streams and 0 not in bad:
        assert len(runner.calls) <= 1 + len(bad), "who answers one by one is asked together"


@pytest.mark.parametrize("streams", [True, False])
def test_what_breaks_again_and_again_is_given_up(streams: bool) -> None:
    runner = BreakingRunner([5, 9, 13], streams=streams, verdict=Verdict.CRASHED)
    assert answered(runner) == ".....X...X...XXXXXXX"


@pytest.mark.parametrize("verdict", [Verdict.BUILD_FAILED, Verdict.TIMED_OUT])
def test_what_is_not_built_or_hangs_is_not_asked_one_by_one(verdict: Verdict) -> None:
    runner = BreakingRunner([5], streams=False, verdict=verdict)
    assert answered(runner) == "X" * COUNT and len(runner.calls) <= 3


Outputs = Mapping[str, NDArray[Any]]


def largest(references: Sequence[Outputs], candidates: Sequence[Outputs]) -> float:
    """Of all inputs together."""
    return max(
        float(np.abs(r[name] - c[name]).max())
        for r, c in zip(references, candidates, strict=True)
        for name in r
    )


@pytest.mark.parametrize(("size", "runs"), [(1, [["b"], ["a", "c"], []]), (2, [])])
def test_equal_samples_are_run_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, runs: list[list[str]]
) -> None:
    fixture = residual()
    asked: list[list[str]] = []
    outputs = EmulatedRunner.outputs

    def counted(
        self: EmulatedRunner, plan: PrecisionPlan, samples: Sequence[Sample]
    ) -> Iterator[Outputs]:
        asked.append([s.name for s in samples])
        return outputs(self, plan, samples)

    def sample(name: str, scale: float) -> Sample:
        arrays = {n: np.float32(a * scale) for n, a in fixture.inputs.items()}
        return Sample(name, arrays, True)

    a, b, c = sample("a", 1.0), sample("b", 0.7), sample("c", 0.3)
    same = sample("a too", 1.0)
    collective = {"metric": [f"{__name__}:largest@all"], "require": "largest<=1"}
    settings = Settings(
        fixture.model,
        [fixture.inputs] * size,
        out=tmp_path,
        **(collective if size > 1 else {"require": fixture.require}),  # type: ignore[arg-type]
    )
    problem = load(settings, Observer())
    with open_context(problem, Observer()) as context:
        alone = [context.evaluator.judge(problem.base, [s] * size, size=size) for s in (a, b, c)]
    with open_context(problem, Observer()) as context:
        monkeypatch.setattr(EmulatedRunner, "outputs", counted)
        plan = problem.base.with_pins(problem.names[:1])
        if size == 1:
            context.evaluator.judge(plan, [b])
            found = context.evaluator.judge(plan, [a, b, same, c, a])
            again = context.evaluator.judge(plan, [same, c])
            assert [n for n in asked if n] == [n for n in runs if n]
            scores = [r.score for r in found.results]
            assert scores[0] == scores[2] == scores[4] == again.results[0].score
            assert len({scores[0], scores[1], scores[3]}) == 3
            assert found.names == ("a", "b", "a too", "c", "a")
        else:  # of a set that is known nothing is run, and the order is that of those that are
            context.evaluator.judge(problem.base, [a, b], size=2)
            found = context.evaluator.judge(problem.base, [a, b, c, same], size=2)
            each = [r.results[0].score for r in alone]
            assert [r.score for r in found.results] == [max(each[:2]), max(each[0], each[2])]
            assert asked[-1] == ["c", "a too"]


def test_errors_are_those_of_each_given_input_and_are_not_kept(tmp_path: Path) -> None:
    fixture = residual()
    inputs = [{n: np.float32(a * s) for n, a in fixture.inputs.items()} for s in (1.0, 0.5)]
    settings = Settings(fixture.model, inputs, require=fixture.require, robust=0.0, out=tmp_path)
    problem = load(settings, Observer())
    plans = [problem.base.with_pins(problem.names[:count]) for count in (0, 1, 2)]
    with open_context(problem, Observer()) as context:
        context.evaluator.evaluate_many(plans[:2])
        for plan in plans[:2]:
            outputs = context.emulator.outputs(plan, problem.samples)
            expected = [
                context.error_sample(s).errors(o)
                for s, o in zip(problem.samples, outputs, strict=True)
            ]
            found = context.evaluator.vector(plan)
            assert found is not None
            np.testing.assert_array_equal(found, np.concatenate(expected))
            assert np.abs(found).max() > 0
        assert context.evaluator.vector(plans[2]) is None
        kept = [*context.evaluator.done.values(), *context.log]
        assert len(kept) == 4
        assert not [p for p in kept if any(isinstance(v, np.ndarray) for v in vars(p).values())]


@pytest.mark.parametrize(("score", "name"), [(None, "a"), (2.0, "b"), (4.2, "")])
def test_a_spared_sample_is_not_named_and_a_set_has_none(score: float | None, name: str) -> None:
    errors = {"y": tensor_error(np.ones(4), np.ones(4) * 1.1)}
    samples = [SampleResult(Verdict.FAIL, s, (s,), errors, 0.1, "") for s in (9.0, 2.0, 1.5)]
    plan, names = PrecisionPlan("fp16"), ["a", "b", "c"]
    assert Evaluation.over(plan, "r", samples, score=score, names=names).worst_on == name
