"""Commands about runs that are over, and a search that begins at an older plan."""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from markdown_it import MarkdownIt

import bisect_trt
from bisect_trt import pipeline
from bisect_trt.base.errors import BadInputError
from bisect_trt.base.interrupt import Observer, StoppedError
from bisect_trt.base.outcomes import PLAN, Tally
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.graph import list_layers
from bisect_trt.metrics.time_limits import JudgedLimit, PlanSpeed, parse_time_limits
from bisect_trt.report.choices import Choice, Passes
from bisect_trt.report.diff import diff_record, diff_runs
from bisect_trt.report.gate import limits_held
from bisect_trt.report.record import read_run
from bisect_trt.settings import Settings
from bisect_trt.steps.context import open_context
from bisect_trt.steps.problem import Problem, load
from bisect_trt.steps.samples import augmented, perturbs
from fixtures.encoders import encoder_decomposed, encoder_layernorm
from fixtures.fixture import Fixture
from fixtures.models import healthy, residual
from fixtures.subgraphs import branch
from tests.command import call, run_of
from tests.conftest import Finished, forbid_inferences
from tests.report.synthetic import synthetic_result

run = partial(run_of, robust=0)


def settings(fixture: Fixture, out: Path) -> Settings:
    return Settings(model=fixture.model, inputs=[fixture.inputs], runner="emulated", out=out)


@pytest.fixture(scope="module")
def folders(finished: Finished, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model in two forms, and a requirement that it cannot meet."""
    missed = tmp_path_factory.mktemp("runs") / "missed"
    run(encoder_layernorm(), missed, require="max_abs<=1e-12")
    runs = {"pins": finished(encoder_decomposed), "fused": finished(encoder_layernorm)}
    return {name: result.folder for name, result in runs.items()} | {"missed": missed}


def test_report_is_written_again_from_the_folder(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "moved"
    shutil.copytree(folders["pins"], copy)
    before = {n: (copy / n).read_text() for n in ("report.html", "report.md", "junit.xml")}
    kept = {p.name: p.read_bytes() for p in copy.iterdir() if p.name not in before}
    for name in before:
        (copy / name).unlink()
    forbid_inferences(monkeypatch)
    assert call("report", copy).exit_code == 0
    assert {n: (copy / n).read_text() for n in before} == before
    assert {p.name: p.read_bytes() for p in copy.iterdir() if p.name not in before} == kept
    assert call("report", tmp_path).exit_code == 2


def test_the_time_of_a_run_is_rounded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2.94996 s are 2.9, and 3.0 where the 2.950 of run.json are rounded again."""
    summarise = pipeline.summarise
    monkeypatch.setattr(
        pipeline, "summarise", lambda k, run_statistics, _: summarise(k, run_statistics, 2.94996)
    )
    run(healthy(), tmp_path / "run")
    before = (tmp_path / "run" / "report.html").read_text()
    assert call("report", tmp_path / "run").exit_code == 0
    assert (tmp_path / "run" / "report.html").read_text() == before


def test_a_run_beside_itself_shows_no_change(folders: dict[str, Path]) -> None:
    found = json.loads(call("diff", folders["pins"], folders["pins"], "--json").stdout)
    assert found["worse"] == found["pins_gained"] == found["pins_lost"] == found["layers"] == []
    assert found["matched"] == 75 and found["unmatched_before"] == found["unmatched_after"] == []


def test_a_model_with_other_nodes_is_matched_by_name(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "diff"
    ended = call("diff", folders["pins"], folders["fused"], "--out", out)
    assert ended.exit_code == 0 and "Not worse" in ended.output
    found = json.loads((out / "diff.json").read_text())
    old, new = (list(read_run(folders[n]).layers["layer"]) for n in ("pins", "fused"))
    assert found["unmatched_before"] == [n for n in old if n not in new]
    assert found["unmatched_after"] == [n for n in new if n not in old]
    assert found["matched"] == len(set(old) & set(new)) == 30
    assert set(found["pins_lost"]) == set(read_run(folders["pins"]).pinned)
    changes = {row["layer"]: row for row in found["layers"]}
    assert changes["/head/MatMul"]["change"] == "better"
    assert changes["/head/MatMul"]["after"] < changes["/head/MatMul"]["before"]
    page = (out / "diff.md").read_text()
    assert "could not be matched" in page and not (out / "diff.html").exists()
    tokens = MarkdownIt("commonmark").enable("table").parse(page)
    assert [t.type for t in tokens].count("table_open") == 6


def test_what_is_worse_is_said_and_exits_1(folders: dict[str, Path]) -> None:
    ended = call("diff", folders["fused"], folders["missed"])
    assert ended.exit_code == 1 and "Worse: A plan met the requirements" in ended.output
    back = diff_runs(read_run(folders["fused"]), read_run(folders["pins"]))
    changes = set(back.layers["change"])
    assert changes == {"worse"} and back.gained == read_run(folders["pins"]).pinned
    assert list(back.layers["ratio"]) == sorted(back.layers["ratio"], reverse=True)


def test_what_was_not_asked_of_both_is_not_compared(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    ended = call("diff", folders["missed"], folders["fused"])
    first = ended.output.splitlines()[0]
    assert ended.exit_code == 1 and first.startswith("cannot be compared: ")
    assert "max_abs<=1e-12 is missed before, and not asked in" in first
    both = tmp_path / "both"
    run(encoder_layernorm(), both, require=[encoder_layernorm().require, "max_abs<=1e9"])
    for pair, code in (((folders["fused"], both), 0), ((both, folders["fused"]), 1)):
        ended = call("diff", *pair)
        first = ended.output.splitlines()[0]
        assert ended.exit_code == code and "Not worse" not in ended.output
        assert first.startswith("cannot be compared: max_abs<=1e9 is met") and "not asked" in first


def test_what_was_asked_of_more_inputs_is_no_plain_success(tmp_path: Path) -> None:
    """A plan that may miss on some of the inputs is not as good for being asked less."""
    strict = synthetic_result(20)
    assert strict.validation is not None
    loose = replace(
        strict,
        given_share=0.9,
        validation=replace(
            strict.validation,
            wanted=0.9,
            wanted_of_given=0.9,
            perturbed=Tally(57, 60, 0.91, 1.2, "x"),
        ),
    )
    found = diff_runs(strict, loose)
    assert found.may_be_worse and not found.worse and len(found.not_compared) == 1
    assert found.not_compared[0].startswith("95 % of unseen inputs had to pass before, and 90 % in")
    assert {"of the given inputs", "of unseen inputs"} <= set(found.changed["what"])
    missed = replace(loose.validation, given=Tally(9, 10))
    assert len(diff_runs(strict, replace(loose, validation=missed)).not_compared) == 2
    both = replace(strict, validation=replace(strict.validation, given=Tally(9, 10)))
    assert not diff_runs(both, both).not_compared, "the same was asked of both"
    fitted = replace(strict, validation=replace(loose.validation, fitted=True, wanted=0.95))
    assert not diff_runs(fitted, loose).not_compared, "nothing was asked of unseen inputs before"
    (said,) = diff_runs(strict, fitted).not_compared
    assert said.startswith("95 % of unseen inputs had to pass before, and none in")
    assert not diff_runs(loose, strict).may_be_worse, (
        "who asks for more answers the old question too"
    )
    held = replace(
        loose.validation,
        perturbed=strict.validation.perturbed,
        augmented=strict.validation.augmented,
    )
    assert not diff_runs(strict, replace(loose, validation=held)).may_be_worse


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("max_abs<=2e-3", "max_abs<=0.002", True),
        ("atol=1e-3,rtol=1e-2@p95", "atol=.001, rtol=0.01@p95", True),
        ("out=1:cosine@mean>=.99", "out=1:cosine@mean>=0.990", True),
        ("out=1:cosine>=0.99", "out=1.0:cosine>=0.99", False),
        ("max_abs<=2e-3", "max_abs<=2.1e-3", False),
    ],
)
def test_a_bound_is_the_same_however_it_is_written(one: str, other: str, same: bool) -> None:
    before, after = (
        replace(
            synthetic_result(4),
            requirements=[text],
            by_requirement=pd.DataFrame(
                {"requirement": [text], "plan_score": [0.5], "reduced_score": [3.0]}
            ),
        )
        for text in (one, other)
    )
    found = diff_runs(before, after).requirements
    assert list(found["requirement"]) == ([other] if same else [one, other])
    assert (set(found["before"]) | set(found["after"]) == {"met"}) is same


def test_strict_alone_makes_no_run_worse() -> None:
    few = synthetic_result(4)
    assert few.validation is not None
    unsure = replace(few.validation, holdout=Tally(11, 12, 0.66, 1.2, "x"))
    before = replace(few, validation=unsure)
    after = replace(before, strict=True)
    assert (before.exit_code, after.exit_code) == (0, 1) and not diff_runs(before, after).worse


def in_gate(folder: Path, *limits: JudgedLimit) -> Path:
    """The folder of a run in a gate that held it to ``limits``."""
    held = [limit.as_json() for limit in limits]
    models = [{"name": "a", "folder": "a", "hold": held}, {"name": "b", "folder": "b"}]
    (folder / "a").mkdir(parents=True)
    record = {"kind": "bisect-trt gate", "models": models}
    (folder / "gate.json").write_text(json.dumps(record))
    return folder / "a"


def test_the_times_of_both_runs_and_the_limit_that_a_gate_missed(tmp_path: Path) -> None:
    row = Choice(
        *(PLAN, PrecisionPlan("fp16"), (), False, 0.5, Passes.VALIDATED),
        recommended=True,
        latency_ms=4.0,
        saving_kept=0.95,
        is_estimated=False,
    )
    before = replace(synthetic_result(20), choice_rows=[row])
    slower = replace(row, latency_ms=4.25, saving_kept=0.5, is_estimated=True)
    after = replace(before, choice_rows=[slower])
    found = diff_runs(before, after)
    assert found.speed.to_numpy().tolist() == [
        ["recommended", "plan", "plan", ""],
        ["latency, ms", "4.000", "4.250", "+6.2 %"],
        ["saving kept", "95 %", "~50 %", ""],
    ]
    assert not found.worse and not found.may_be_worse, "nothing held the times"
    assert diff_record(found)["time_after"] == {
        "recommended": "plan",
        "latency_ms": 4.25,
        "saving_kept": 0.5,
        "estimated_latency": True,
    }
    (limit,) = parse_time_limits(["latency_ms<=4.1"])
    judged = [limit.judged(PlanSpeed(ms)) for ms in (4.0, 4.25, None)]
    met, missed, not_judged = (
        limits_held(in_gate(tmp_path / str(place), one)) for place, one in enumerate(judged)
    )
    assert met == (judged[0],)
    worse = diff_runs(before, after, met, missed)
    assert worse.worse == ("latency_ms<=4.1 was met and is missed.",)
    assert not diff_runs(before, after, missed, met).worse
    open_ = diff_runs(before, after, met, not_judged)
    assert open_.may_be_worse and "could not be judged after" in open_.not_compared[0]
    assert diff_runs(before, after, met, ()).may_be_worse
    assert diff_runs(before, after, (), missed).may_be_worse


def test_limits_are_those_of_a_gate_that_can_be_read(tmp_path: Path) -> None:
    assert limits_held(tmp_path / "run") == ()
    folder = in_gate(tmp_path / "gate")
    assert limits_held(folder.with_name("b")) == limits_held(folder.with_name("c")) == ()
    record = {"kind": "bisect-trt gate", "models": [{"folder": "a", "hold": [{}]}]}
    (folder.parent / "gate.json").write_text(json.dumps(record))
    with pytest.raises(BadInputError, match=r"gate\.json: cannot be read"):
        limits_held(folder)
    (folder.parent / "gate.json").write_text('{"kind": "of another"}')
    assert limits_held(folder) == ()


def test_two_models_are_not_compared(folders: dict[str, Path], finished: Finished) -> None:
    ended = call("diff", folders["pins"], finished(residual).folder)
    assert ended.exit_code == 2 and len(ended.output.splitlines()) == 1
    assert "cannot be compared: of " in ended.output


def test_what_is_no_run_is_told_in_one_line(folders: dict[str, Path], tmp_path: Path) -> None:
    for pair in ((tmp_path, folders["pins"]), (folders["pins"], tmp_path / "absent")):
        ended = call("diff", *pair)
        assert ended.exit_code == 2 and len(ended.output.splitlines()) == 1
    (tmp_path / "mine.txt").write_text("x")
    ended = call("diff", folders["pins"], folders["pins"], "--out", tmp_path)
    assert ended.exit_code == 2 and "holds mine.txt" in ended.output


def test_a_search_begun_at_an_older_plan_saves_its_evaluations(
    finished: Finished, tmp_path: Path
) -> None:
    fresh = finished(residual)
    begun = run(residual(), tmp_path / "begun", start_from=fresh.folder / "plan.json")
    assert begun.pinned == fresh.pinned and begun.pins["proved"].all()
    # The set, each removal by the first emulator, some by the second, and the baselines.
    assert begun.new_evaluations <= 2 * len(fresh.pinned) + 8 < fresh.new_evaluations


def test_a_robust_search_drops_what_an_older_plan_pins_for_nothing(tmp_path: Path) -> None:
    fixture = branch()
    assert fixture.pins is not None
    names = [layer.name for layer in list_layers(fixture.model)]
    plan = {"base": "fp16", "pinned": [*names, "gone"]}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    options = {"robust": 0.5, "augmented": "none", "start_from": tmp_path / "plan.json"}
    result = run(fixture, tmp_path / "out", **options)
    assert set(result.pinned) == fixture.pins and result.validation is not None
    (told,) = (f.message for f in result.findings if f.kind == "start-from")
    assert told.startswith(f"of the {len(names) + 1} pins") and told.endswith("here: gone")


def test_a_plan_of_another_model_is_no_start(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"base": "fp16", "pinned": ["nowhere"]}')
    with pytest.raises(BadInputError, match="none of its pins is a layer"):
        run(residual(), tmp_path / "out", start_from=tmp_path / "plan.json")
    assert not (tmp_path / "out").exists()


def test_compare_does_not_take_the_place_of_an_answer(finished: Finished, tmp_path: Path) -> None:
    fixture, out = healthy(), tmp_path / "out"
    shutil.copytree(finished(healthy).folder, out)
    before = {path.name for path in out.iterdir()}
    with pytest.raises(BadInputError, match="holds a run's answer"):
        pipeline.compare(settings(fixture, out))
    assert {path.name for path in out.iterdir()} == before
    tables = tmp_path / "tables"
    for _ in range(2):  # its own tables it does take the place of
        pipeline.compare(settings(fixture, tables))
    assert (tables / "layers.csv").is_file()


def test_a_folder_on_another_disk_than_the_temporary_one(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files cannot be moved from one to the other; the machine's two are one here."""
    copy = tmp_path / "moved"
    shutil.copytree(folders["pins"], copy)
    move = os.replace

    def within_one(source: Path, target: Path) -> None:
        if not Path(source).is_relative_to(copy):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        move(source, target)

    monkeypatch.setattr(os, "replace", within_one)
    assert call("report", copy).exit_code == 0


def test_what_is_known_is_written_though_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is there, and exit code 130 promises that it is on disk."""
    write, times = pipeline.write_report, iter(range(9))

    def interrupted(result: bisect_trt.Result, problem: Problem) -> None:
        if next(times) == 0:
            raise KeyboardInterrupt
        write(result, problem)

    monkeypatch.setattr(pipeline, "write_report", interrupted)
    with pytest.raises(StoppedError, match="the answer is in"):
        run(healthy(), tmp_path / "run")
    found = read_run(tmp_path / "run")
    assert found.passed and not found.interrupted
    assert (tmp_path / "run" / "model.typed.onnx").exists()


@pytest.mark.slow
def test_a_looser_requirement_takes_pins_from_an_older_plan(tmp_path: Path) -> None:
    fixture = residual()
    options = {"robust": 0.95, "augmented": "none"}
    strict = run(fixture, tmp_path / "strict", **options)
    plan = tmp_path / "strict" / "plan.json"
    loose = replace(fixture, require="max_abs<=1")
    begun = run(loose, tmp_path / "begun", start_from=plan, **options)
    same = run(fixture, tmp_path / "same", start_from=plan, **options)
    # Of the same requirement the search copies other copies: it ends near where it began.
    assert len(strict.pinned) > len(begun.pinned)
    assert len(same.pinned) <= 1.25 * len(strict.pinned)
    assert begun.passed and same.passed


def test_a_search_begun_at_an_older_plan_is_tested_on_other_draws(tmp_path: Path) -> None:
    fixture = residual()
    older = {"base": "fp16", "pinned": [list_layers(fixture.model)[3].name]}
    (tmp_path / "plan.json").write_text(json.dumps(older))
    copies, varied = [], []
    for begin in (None, tmp_path / "plan.json"):
        problem = load(replace(settings(fixture, tmp_path / "out"), start_from=begin), Observer())
        with open_context(problem, Observer()) as context:
            made = (
                perturbs(problem, context, 1, 20, emulated=True),
                augmented(problem, context, 1, 20),
            )
            for digests, copied in zip((copies, varied), made, strict=True):
                digests.append({sample.digest for sample in copied})
    assert len(copies[0]) == len(copies[1]) == 20 and not copies[0] & copies[1]
    # There are few flips and shifts of one input: these are the same, however they are drawn.
    assert len(varied[0] & varied[1]) <= 4 < 20 == len(varied[0]) == len(varied[1])


@pytest.mark.slow
def test_a_search_begun_at_an_older_plan_keeps_nothing_apart_that_chose_its_pins(
    tmp_path: Path,
) -> None:
    """Of twenty-one inputs four were kept apart, three of which the plan was searched with."""
    fixture = residual()
    (name,) = fixture.inputs
    given = [{name: fixture.inputs[name] * np.float32(1.0 - i / 99)} for i in range(30)]

    def found(out: str, count: int, **more: Any) -> bisect_trt.Result:
        options = {"require": fixture.require, "runner": "emulated", "augmented": "none", **more}
        return bisect_trt.bisect(fixture.model, given[:count], out=tmp_path / out, **options)

    first = found("first", 19)
    plan = tmp_path / "first" / "plan.json"
    second = found("second", 21, start_from=plan)
    assert second.validation.holdout.tested == 1 and second.validation.given.tested == 20
    third = found("third", 30, start_from=tmp_path / "second" / "plan.json")
    assert third.validation.holdout.tested == 5 and third.validation.given.tested == 25
    named = found("named", 19, start_from=plan, holdout=given[17:21])
    assert named.validation.holdout.tested == 2  # of the others each is a given one too
    seen = found("seen", 10, start_from=plan, holdout=given[17:21])
    said = "2 of 4 inputs are not kept apart to test on: the plan of --start-from was searched"
    assert seen.validation.holdout.tested == 2 and any(said in f.message for f in seen.findings)
    chances = [
        json.loads((tmp_path / out / "plan.json").read_text())["searched"]["chance"]
        for out in ("first", "second", "third")
    ]
    assert len(set(chances)) == 3, "no two draw the same copies, be the pins the same"
    assert first.passed
