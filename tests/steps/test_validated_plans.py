"""Plans that hold on inputs nobody has shown, judged on copies that no search has seen."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pandas as pd
import pytest
from numpy.typing import NDArray

import bisect_trt
from bisect_trt import PrecisionPlan, Result
from bisect_trt.base.errors import BadInputError, RunnerFailedError
from bisect_trt.base.interrupt import Observer, StoppedError
from bisect_trt.base.sample import Sample
from bisect_trt.inputs.augmentations import augmented_input
from bisect_trt.inputs.perturbations import perturbed
from bisect_trt.metrics.parser import parse_requirements
from bisect_trt.runners.emulator import EmulatedRunner
from bisect_trt.settings import Settings
from bisect_trt.steps import failing_inputs
from bisect_trt.steps.context import open_context
from bisect_trt.steps.problem import load
from bisect_trt.steps.samples import SEARCH_STREAM, augmented, perturbs, wants_augmented
from bisect_trt.steps.validation_inputs import TRADEOFF, wanted_of_augmented
from fixtures.build import GraphBuilder
from fixtures.encoders import encoder_decomposed
from fixtures.fixture import Fixture
from fixtures.models import healthy, residual, tf32_victim
from fixtures.tokens import sentence, token_encoder
from tests.command import run_of as run
from tests.conftest import Finished, forbid_inferences, run_model
from tests.copies import FEW


def scores(
    fixture: Fixture, plan: PrecisionPlan, inputs: list[Mapping[str, NDArray[Any]]], require: str
) -> list[float]:
    """Each input's score under ``plan``, apart from the tool's own way."""
    requirements = parse_requirements([require], [o.name for o in fixture.model.graph.output], {})
    runner, found = EmulatedRunner(fixture.model), []
    names = [o.name for o in fixture.model.graph.output]
    for arrays in inputs:
        reference = dict(zip(names, run_model(fixture.model, arrays), strict=True))
        outputs = next(runner.outputs(plan, [Sample("s", arrays)]))
        found.append(requirements.score(reference, outputs))
    return found


def fresh(fixture: Fixture, count: int) -> list[Mapping[str, NDArray[Any]]]:
    """Perturbed copies by another seed than any of the tool's."""
    return [perturbed(fixture.inputs, np.random.default_rng([7777, i])) for i in range(count)]


@pytest.mark.slow
def test_a_robust_plan_holds_on_fresh_draws_and_a_fitted_one_does_not(tmp_path: Path) -> None:
    fixture = residual()
    fitted = run(fixture, tmp_path / "fitted", robust=0)
    robust = run(fixture, tmp_path / "validated", limits=FEW)
    assert fitted.passed and robust.passed
    assert robust.validation is not None and robust.validation.given.passed == 1
    assert (
        min(robust.validation.perturbed.lower_bound, robust.validation.augmented.lower_bound)
        >= 0.95
    )
    # One input: whether others hold too cannot be told where the worst copy is far from the usual.
    assert (
        robust.validation.word.value == "inconclusive" and robust.validation.prediction_limit > 1.0
    )
    assert fitted.validation is not None and fitted.validation.fitted
    copies = fresh(fixture, 60)
    shares = [
        np.mean(np.asarray(scores(fixture, found.plan, copies, fixture.require)) <= 1.0)
        for found in (fitted, robust)
    ]
    assert shares[1] >= 0.95 and len(robust.pinned) > len(fitted.pinned)
    assert shares[0] < shares[1] and fitted.validation.word.value != "validated"


def test_nothing_to_pin_is_a_claim_like_any_other(tmp_path: Path) -> None:
    """A tolerance that everything reduced just meets on the given input, and not on others."""
    fixture = residual()
    outputs = run_model(fixture.model, fixture.inputs)[0]
    reduced = next(
        EmulatedRunner(fixture.model).outputs(PrecisionPlan("fp16"), [Sample("s", fixture.inputs)])
    )["y"]
    require = f"max_abs<={float(np.abs(reduced - outputs).max()) * 1.02:.6g}"
    overfitted = run(fixture, tmp_path / "overfitted", robust=0, require=require)
    assert overfitted.cause.value == "none" and overfitted.validation is not None
    assert overfitted.validation.word.value != "validated" and overfitted.exit_code == 0
    robust = run(fixture, tmp_path / "validated", require=require, limits=FEW)
    assert robust.cause.value == "accumulation" and "The given inputs pass, but" in robust.sentence
    assert robust.pinned and robust.validation is not None
    assert (
        min(robust.validation.perturbed.lower_bound, robust.validation.augmented.lower_bound)
        >= 0.95
    )


def test_what_is_robust_without_pins_is_said_so(tmp_path: Path) -> None:
    fixture = healthy()
    inputs = [
        {n: np.float32(np.roll(a, 5 * k, -1)) for n, a in fixture.inputs.items()} for k in range(8)
    ]
    result = bisect_trt.bisect(
        fixture.model, inputs, require=fixture.require, runner="emulated", out=tmp_path, limits=FEW
    )
    assert result.cause.value == "none" and result.pinned == []
    # The trade-off curve has the answer's row, as the test counted it.
    (row,) = result.tradeoff.to_dict(orient="records")
    assert (row["pins"], row["set"], row["perturbed_tested"]) == (0, "answer", 67)
    assert row["perturbed_lower_bound"] == result.validation.perturbed.lower_bound
    assert result.validation is not None and result.validation.word.value == "validated"
    saved = json.loads((tmp_path / "run.json").read_text())
    assert saved["verdict"] == "validated"
    assert set(saved["validation"]) == {"given", "perturbed", "augmented", "holdout"}
    for kind in saved["validation"].values():
        assert set(kind) == {"passed", "tested", "lower_bound", "worst_score", "worst"}
    assert (
        saved["validation"]["perturbed"]["passed"]
        == saved["validation"]["perturbed"]["tested"]
        >= 59
    )
    assert "Validated: 8 of 8 inputs" in (tmp_path / "report.md").read_text()


def test_no_search_set_is_made_where_nothing_is_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything reduced is good enough: a few samples of each kind tell."""
    fixture, copied = healthy(), []
    search_samples = failing_inputs.search_samples

    def counted(problem: Any, context: Any, first: int | None = None) -> Any:
        copied.append(first)
        return search_samples(problem, context, first)

    monkeypatch.setattr(failing_inputs, "search_samples", counted)
    run(fixture, tmp_path, limits=FEW)
    assert copied == [4]


def test_clear_culprits_are_found_and_proved_as_ever(finished: Finished) -> None:
    fixture, result = encoder_decomposed(), finished(encoder_decomposed, 0.95)
    assert set(result.pinned) == fixture.pins and result.complete and not result.ranked
    assert result.validation is not None and result.validation.word.value == "inconclusive"
    assert result.pins["proved"].all() and (result.pins["tolerance_share"] < 1.0).all()


def test_the_same_command_again_asks_nothing(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = finished(residual, 0.95)
    shutil.copytree(first.folder, tmp_path / "run")
    forbid_inferences(monkeypatch)
    again = run(residual(), tmp_path / "run", limits=FEW)
    assert again.pinned == first.pinned and again.validation == first.validation
    assert again.new_evaluations == 0


@pytest.mark.slow
def test_inputs_kept_apart_are_judged_at_the_end_only(tmp_path: Path) -> None:
    fixture = encoder_decomposed()
    make = np.random.default_rng
    inputs = [augmented_input("noise", fixture.inputs, [], make([5, i])) for i in range(25)]
    result = bisect_trt.bisect(
        fixture.model,
        inputs,
        require=fixture.require,
        runner="emulated",
        weights="nearest",
        out=tmp_path / "auto",
        limits=FEW,
    )
    assert len(result.samples) == 20 and result.validation is not None
    assert (result.validation.holdout.passed, result.validation.holdout.tested) == (5, 5)
    assert result.validation.augmented.tested == 0, "twenty inputs need no stand-ins"
    named = run(fixture, tmp_path / "named", holdout=inputs[:3], limits=FEW)
    assert named.validation is not None and named.validation.holdout.tested == 3
    none = bisect_trt.bisect(
        fixture.model,
        inputs,
        require=fixture.require,
        runner="emulated",
        weights="nearest",
        holdout="none",
        augmented="none",
        out=tmp_path / "none",
        limits=FEW,
    )
    assert (
        len(none.samples) == 25
        and none.validation is not None
        and none.validation.holdout.tested == 0
    )


@pytest.mark.parametrize(("given", "tested"), [(20, True), (23, True), (24, False)])
def test_variants_stand_in_where_few_are_searched_with(
    tmp_path: Path, given: int, tested: bool
) -> None:
    fixture = residual()
    inputs = fresh(fixture, given)
    problem = load(Settings(fixture.model, inputs, out=tmp_path), Observer())
    assert (len(problem.samples) < given) and wants_augmented(problem) == tested


def test_what_overflows_is_counted_and_ends_nothing(tmp_path: Path) -> None:
    fixture = healthy()
    kept = [{"x": fixture.inputs["x"] * scale} for scale in (1e6, 0.5, 0.25)]
    result = run(fixture, tmp_path, holdout=kept, limits=FEW)
    assert result.validation is not None
    assert (result.validation.holdout.passed, result.validation.holdout.tested) == (2, 3)
    assert result.validation.holdout.worst_score == np.inf
    assert result.validation.word.value == "inconclusive"


def test_what_the_model_cannot_be_run_on_is_no_fault_of_a_plan(tmp_path: Path) -> None:
    """Kept apart and beyond the table of places: refused before the search, not called
    overfitted."""
    model, require = token_encoder(), ["max_abs<=1"]
    far = {name: np.tile(ids, 50) for name, ids in sentence(1).items()}
    common: dict[str, Any] = {"require": require, "runner": "emulated", "holdout": [far]}
    with pytest.raises(RunnerFailedError, match="ONNX Runtime failed"):
        bisect_trt.bisect(model, [sentence(0)], out=tmp_path / "run", **common)
    plan = PrecisionPlan("fp16")
    with pytest.raises(BadInputError, match="ONNX Runtime failed"):
        bisect_trt.verify(model, [sentence(0)], plan, out=tmp_path / "verify", **common)


def test_tf32_that_passes_by_luck_is_no_case_for_pins(tmp_path: Path) -> None:
    fixture = tf32_victim()
    exact = run(fixture, tmp_path / "exact", precision="tf32", limits=FEW)
    error = exact.outputs[exact.outputs["baseline"] == "tf32"]["max_abs"].iloc[0]
    require = f"max_abs<={float(error) * 1.02:.6g}"
    overfitted = run(fixture, tmp_path / "overfitted", precision="tf32", require=require, robust=0)
    assert overfitted.cause.value == "none"
    robust = run(fixture, tmp_path / "validated", precision="tf32", require=require, limits=FEW)
    assert robust.cause.value == "tf32" and robust.pinned == [] and robust.passed
    assert robust.plan.base.value == "fp32"


@pytest.mark.parametrize("workers", [1, 2])
def test_token_ids_are_perturbed_by_what_they_look_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    model = token_encoder(1)

    def run_it() -> Result:
        return bisect_trt.bisect(
            model,
            [sentence(n) for n in range(2)],
            require="max_abs<=2e-3",
            runner="emulated",
            weights="nearest",
            workers=workers,
            out=tmp_path,
            limits=FEW,
        )

    first = run_it()
    assert first.passed and first.pinned and first.validation is not None
    assert (
        first.validation.perturbed.tested >= 59 and first.validation.perturbed.lower_bound >= 0.95
    )
    assert first.validation.augmented.lower_bound >= 0.95
    # Two sentences are too few for a word on others.
    assert first.validation.word.value == "inconclusive" and first.validation.prediction_limit > 1.0
    assert "perturbed" in first.validation.perturbed.worst
    forbid_inferences(monkeypatch)
    again = run_it()
    assert (
        again.new_evaluations == 0
        and again.validation == first.validation
        and again.pinned == first.pinned
    )


def test_a_float_input_that_can_be_moved_is_moved_and_no_table(tmp_path: Path) -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        g (int64[4] ids, float[4, 2] x) => (float[4, 2] y)
        <float[4, 2] table = {0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5}> {
            e = Gather(table, ids)
            y = Add(e, x)
        }
    """)
    inputs = {"ids": np.arange(4), "x": np.float32([[1, 2], [3, 4], [5, 6], [7, 8]])}
    problem = load(Settings(model, [inputs], out=tmp_path), Observer())
    assert problem.graph.lookups and problem.moves_inputs and not problem.moves_lookups
    with open_context(problem, Observer()) as context:
        for emulated in (True, False):
            copies = list(perturbs(problem, context, 1, 3, emulated=emulated))
            assert [set(c.arrays) for c in copies] == [{"ids", "x"}] * 3


def test_an_engine_is_given_no_copies_that_only_emulators_take(tmp_path: Path) -> None:
    problem = load(Settings(token_encoder(1), [sentence(0)], out=tmp_path), Observer())
    with open_context(problem, Observer()) as context:
        emulated = list(perturbs(problem, context, 1, 3, emulated=True))
        assert len({s.digest for s in emulated}) == 3
        assert all(set(s.arrays) > {"ids", "mask"} for s in emulated)
        assert list(perturbs(problem, context, 1, 3, emulated=False)) == []
    assert wanted_of_augmented(problem) == 0.95, (
        "without perturbed copies the augmented inputs make the bound"
    )


def test_where_only_token_ids_vary_the_variants_make_the_bound(tmp_path: Path) -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        g (int64[1, 12] ids) => (float[1, 12, 4] y)
        <int64 depth = {16}, float[2] values = {0, 1}, float[16, 4] table = {0}> {
            e = OneHot(ids, depth, values)
            f = MatMul(e, table)
            y = Tanh(f)
        }
    """)
    values = np.sin(np.arange(64, dtype=np.float32)).reshape(16, 4)
    model.graph.initializer[2].CopyFrom(onnx.numpy_helper.from_array(values, "table"))
    inputs = [{"ids": (np.arange(12).reshape(1, 12) + i) % 16} for i in range(10)]
    result = bisect_trt.bisect(
        model, inputs, require="max_abs<=1e-2", runner="emulated", out=tmp_path, limits=FEW
    )
    assert result.validation is not None and result.validation.perturbed.tested == 0
    assert (
        result.validation.wanted_of_augmented == 0.95 and result.validation.augmented.tested >= 59
    )
    assert result.validation.word.value == "validated"


def test_an_interruption_of_the_last_test_keeps_the_set_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixture = encoder_decomposed()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bisect_trt.pipeline.validation_of_answer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(fixture, tmp_path, limits=FEW)
    saved = json.loads((tmp_path / "run.json").read_text())
    assert saved["passed"] and set(saved["pinned"]) == fixture.pins


@pytest.mark.parametrize("robust", [0.95, 0.0])
def test_an_interruption_of_the_search_leaves_the_smallest_set_that_it_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, robust: float
) -> None:
    """Nothing is run for it, and nothing is said that was not tested."""
    fixture, told = residual(), []

    class Impatient(Observer):
        def best(self, count: int) -> None:
            told.append(count)
            monkeypatch.setattr("bisect_trt.evaluate.evaluator.Execution.run", forbidden)
            raise KeyboardInterrupt

    def forbidden(*_: object, **__: object) -> Iterator[None]:
        raise AssertionError("an inference after Ctrl-C")
        yield

    with pytest.raises(StoppedError, match=f"best plan so far is in {tmp_path}"):
        run(
            fixture,
            tmp_path,
            require="rel_range<=5e-5",
            robust=robust,
            observer=Impatient(),
            limits=FEW,
        )
    saved = json.loads((tmp_path / "run.json").read_text())
    assert saved["passed"] and not saved["complete"] and len(saved["pinned"]) == told[-1] < 120
    validation = saved["validation"]
    assert validation["given"]["passed"] == validation["given"]["tested"] == 1
    assert validation["perturbed"]["tested"] == validation["augmented"]["tested"] == 0
    assert saved["verdict"] != "validated" and saved["interrupted"]
    assert "run the same command again: it goes on" in (tmp_path / "report.md").read_text()
    assert scores(fixture, plan_of(tmp_path), [fixture.inputs], "rel_range<=5e-5")[0] <= 1.0


def test_an_interruption_after_the_test_keeps_what_it_showed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the answer is put beside others everything that matters is known."""

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bisect_trt.pipeline.with_tables", stopped)
    with pytest.raises(StoppedError, match="best plan so far"):
        run(residual(), tmp_path, require="rel_range<=5e-5", robust=0.0)
    validation = json.loads((tmp_path / "run.json").read_text())["validation"]
    assert validation["perturbed"]["tested"] > 0 and validation["given"]["passed"] == 1
    assert "plan_score_emulated" in (tmp_path / "inputs.csv").read_text()


def plan_of(folder: Path) -> PrecisionPlan:
    return PrecisionPlan.from_json((folder / "plan.json").read_text())


def test_layers_are_ranked_on_the_given_inputs_that_do_worst(tmp_path: Path) -> None:
    """Of twelve inputs the last is disturbed; on the others no effect is to be seen."""
    fixture = residual()
    calm = {name: np.zeros_like(array) for name, array in fixture.inputs.items()}
    options: dict[str, Any] = {
        "require": fixture.require,
        "runner": "emulated",
        "augmented": "none",
    }
    alone = bisect_trt.bisect(
        fixture.model, fixture.inputs, out=tmp_path / "a", robust=0, **options
    )
    among = bisect_trt.bisect(
        fixture.model, [*[calm] * 11, fixture.inputs], out=tmp_path / "b", **options, limits=FEW
    )
    seen = [r.layers.set_index("layer")["sensitivity"] for r in (alone, among)]
    assert (seen[1] >= 0.999 * seen[0]).all() and seen[0].max() > 0.1


def test_variants_are_tested_where_no_copy_can_be_redrawn(tmp_path: Path) -> None:
    """Bytes that no table looks up: else nothing would be known of other inputs, however many."""
    b = GraphBuilder(0)
    marked = b.op("OneHot", "x", b.weight(9, np.int64), b.weight([0.0, 1.0]))
    b.rename_output(b.op("MatMul", marked, b.normal(9, 2)), "y")
    model = b.model({"x": [1, 8]}, {"y": [1, 8, 2]}, elem_type=onnx.TensorProto.INT64)
    random = np.random.default_rng(0)
    inputs = [{"x": random.integers(0, 9, (1, 8))} for _ in range(40)]
    problem = load(Settings(model, inputs, out=tmp_path), Observer())
    assert len(problem.samples) > 20 and wants_augmented(problem)


def test_ctrl_c_before_a_set_is_in_hand_says_what_all_pins_hold_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where what comes out of a library is another error, of a lock that it held."""

    def interrupted(*_: object) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise RuntimeError("cannot release un-acquired lock") from error

    monkeypatch.setattr("bisect_trt.pipeline.bisect", interrupted)
    with pytest.raises(StoppedError):
        run(encoder_decomposed(), tmp_path, limits=FEW)
    saved = json.loads((tmp_path / "run.json").read_text())
    assert saved["passed"] and saved["interrupted"] and saved["verdict"] == "inconclusive"
    assert (saved["validation"]["given"]["passed"], saved["validation"]["given"]["tested"]) == (
        1,
        1,
    )


def test_ctrl_c_never_leaves_a_set_that_copies_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything reduced passes the given input and misses on copies of it, then Ctrl-C comes."""
    fixture = residual()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bisect_trt.pipeline.bisect", interrupted)
    with pytest.raises(StoppedError, match=r".*before the plan was validated"):
        run(fixture, tmp_path, require="rel_range<=3.2e-4", limits=FEW)
    evaluations = pd.read_csv(tmp_path / "search.csv")
    refused = evaluations[(evaluations["runner"] == "emulated") & (evaluations["pins"] == 0)]
    assert set(refused["outcome"]) == {"pass", "fail"}, "the given input does not tell"
    saved = json.loads((tmp_path / "run.json").read_text())
    assert saved["passed"] and len(saved["pinned"]) == saved["layers"]
    assert (
        saved["validation_settings"]["unfinished"] and saved["validation"]["given"]["passed"] == 1
    )


def test_an_engine_takes_no_moved_tables_and_is_tested_on_variants(tmp_path: Path) -> None:
    """However many sentences are given: their copies are the emulators' alone."""
    inputs = [sentence(n) for n in range(30)]
    problem = load(Settings(token_encoder(1), inputs, out=tmp_path), Observer())
    assert len(problem.samples) == 24 and not wants_augmented(problem)
    assert wants_augmented(replace(problem, on_engine=True))


def negated(inputs: Mapping[str, NDArray[Any]], _: np.random.Generator) -> dict[str, NDArray[Any]]:
    return {name: -array for name, array in inputs.items()}


def run_with_negated(fixture: Fixture, require: str, out: Path, **options: Any) -> Result:
    """Eight inputs, of each of which there is one augmented input."""
    return bisect_trt.bisect(
        fixture.model,
        fresh(fixture, 8),
        require=require,
        runner="emulated",
        weights="nearest",
        out=out,
        **{"augmented": f"{__name__}:negated", **options},
        limits=FEW,
    )


def test_variants_that_the_search_has_seen_test_nothing(tmp_path: Path) -> None:
    """A function without chance makes one of each input; four of the eight were searched with."""
    result = run_with_negated(healthy(), "rel_range<=0.1", tmp_path)
    assert result.validation is not None
    assert (result.validation.augmented.passed, result.validation.augmented.tested) == (4, 4)
    assert (
        result.validation.augmented.lower_bound < 0.5
        and result.validation.word.value == "inconclusive"
    )
    messages = [finding.message for finding in result.findings]
    assert any("no more than 4 augmented inputs could be made" in m for m in messages), messages


@pytest.mark.parametrize("count", [1, 4])
def test_no_two_tests_and_no_search_share_a_variant(tmp_path: Path, count: int) -> None:
    """Of sixteen token ids a second test had 66 of its 100 from the search and the first."""
    inputs = [sentence(n) for n in range(count)]
    problem = load(Settings(token_encoder(1), inputs, out=tmp_path), Observer())
    streams = (SEARCH_STREAM, 1, 2, 3, TRADEOFF)
    with open_context(problem, Observer()) as context:
        seen = list[set[str]]()
        for stream in streams:
            made = [s.digest for s in augmented(problem, context, stream, 60)]
            assert stream == SEARCH_STREAM or len(set(made)) == len(made)
            seen.append(set(made))
        again = {s.digest for s in augmented(problem, context, 2, 60)}
    assert seen[2] == again, "what comes later changes no test"
    for place, one in enumerate(seen):
        assert one and not any(one & other for other in seen[:place])


def rolled(
    inputs: Mapping[str, NDArray[Any]], random: np.random.Generator
) -> dict[str, NDArray[Any]]:
    """Of eight inputs of width 48 there are 376."""
    by = int(random.integers(1, 48))
    return {name: np.roll(array, by, -1) for name, array in inputs.items()}


@pytest.mark.parametrize("options", [{"allow_misses": 0.5}, {"robust": 0.5}])
def test_a_share_is_asked_of_as_many_variants_as_there_are(
    tmp_path: Path, options: dict[str, float]
) -> None:
    """Few of them, where a test would make two hundred: some may miss here, too."""
    result = run_with_negated(
        residual(), "rel_range<=6e-5", tmp_path, augmented=f"{__name__}:rolled", **options
    )
    assert result.passed and result.validation is not None
    assert (
        0 < result.validation.augmented.tested <= 376 and result.validation.augmented.share >= 0.5
    )
