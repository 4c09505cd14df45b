"""How random networks on engines are judged, with emulated outputs in the place of an engine's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import helper

from bisect_trt.base.errors import RunnerFailedError
from bisect_trt.base.outcomes import Verdict
from bisect_trt.metrics.arrays import Arrays
from bisect_trt.metrics.parser import parse_requirements
from bisect_trt.runners.emulator import EmulatedRunner
from bisect_trt.runners.tensorrt.records import RTX, installed_module
from tests.fuzz.campaign import KINDS, recipe_for
from tests.fuzz.engine_table import alike, rarest, table
from tests.fuzz.engines import Judge, blamed, main, missing, processes_of, read_lines
from tests.fuzz.graphs import generate
from tests.fuzz.judging import (
    EMULATOR_FINITE,
    ENGINE_FINITE,
    OTHER_PLACES,
    SAME,
    Scored,
    nonfinite_places,
    repetition,
    scored,
)

SOUND = 14
"""A network in which nothing is planted."""


@pytest.mark.parametrize(
    ("engine", "emulated", "word"),
    [
        ([1.0, 2.0], [1.5, 2.5], SAME),
        ([np.nan, 2.0], [np.inf, 2.0], SAME),
        ([1.0, 2.0], [np.inf, 2.0], ENGINE_FINITE),
        ([np.nan, 2.0], [1.0, 2.0], EMULATOR_FINITE),
        ([np.nan, 2.0], [1.0, np.nan], OTHER_PLACES),
    ],
)
def test_non_finite_outputs_are_compared_by_place(
    engine: list[float], emulated: list[float], word: str
) -> None:
    one, other = np.float32(engine), np.float32(emulated)
    assert nonfinite_places({"y": one}, {"y": other}) == word


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge(generate(recipe_for(SOUND)))


@pytest.fixture(scope="module")
def as_emulated(judge: Judge) -> list[Arrays]:
    """The emulated outputs of everything in FP16."""
    return list(EmulatedRunner(judge.graph).outputs(judge.plans["FP16"], judge.samples))


def rows_of(judge: Judge, outputs: list[Arrays]) -> list[Scored]:
    return [Scored(**row) for row in judge.judged(judge.plans["FP16"], outputs)]


def test_an_engine_like_the_emulator_does_not_exceed_it(
    judge: Judge, as_emulated: list[Arrays]
) -> None:
    for row in rows_of(judge, as_emulated):
        assert row.nonfinite == SAME and row.engine == row.emulated > 0.0
        assert row.largest is not None and not row.clearly_exceeds


def test_an_engine_that_errs_ten_times_as_much_exceeds_it(
    judge: Judge, as_emulated: list[Arrays]
) -> None:
    worse: list[Arrays] = [
        {n: exact[n] + 10 * (a - exact[n]) for n, a in found.items()}
        for exact, found in zip(judge.references, as_emulated, strict=True)
    ]
    for row, before in zip(rows_of(judge, worse), rows_of(judge, as_emulated), strict=True):
        assert row.clearly_exceeds and row.engine == pytest.approx(10 * before.engine, rel=1e-3)


def test_an_engine_that_gives_nan_exceeds_it(judge: Judge, as_emulated: list[Arrays]) -> None:
    broken: list[Arrays] = [{n: a * np.float32(np.nan) for n, a in f.items()} for f in as_emulated]
    for row in rows_of(judge, broken):
        assert (row.nonfinite, row.engine, row.exceeds) == (EMULATOR_FINITE, np.inf, True)


def test_outputs_in_fp16_are_judged_too() -> None:
    reference = {"y": np.float32([1.0, 2.0])}
    engine = {"y": np.float16([1.0, 2.0])}
    requirements = parse_requirements((), ["y"])
    row = scored(requirements, reference, engine, reference, [])
    assert (row.engine, row.largest, row.exceeds) == (0.0, None, False)


def test_what_fp32_itself_errs_does_not_exceed_clearly() -> None:
    assert Scored(SAME, 1e-5, 0.0, 0.0).exceeds
    assert not Scored(SAME, 1e-5, 0.0, 0.0).clearly_exceeds
    assert not Scored(SAME, 1.05, 1.0, 1.0).clearly_exceeds
    assert Scored(SAME, 1.2, 1.0, 1.0).clearly_exceeds


def test_half_of_the_layers_are_kept(judge: Judge) -> None:
    names = {layer.name for layer in judge.graph.layers}
    plan = judge.plans["plan"]
    assert plan.pinned <= names and len(plan.pinned) == len(names) // 2
    assert plan == Judge(generate(recipe_for(SOUND))).plans["plan"]


def answer(*values: float) -> dict[str, NDArray[np.float32]]:
    return {"y": np.float32(values)}


def test_answers_are_compared_in_and_between_processes() -> None:
    exact, other = answer(0.0, 1.0), answer(0.5, 1.0)
    steady, changed = ((exact, 3),), ((other, 3),)
    mixed = ((exact, 2), (other, 1))
    found = repetition([exact], [[steady], [steady], [steady]])
    assert (found.processes, found.within, found.between, found.apart) == (3, True, True, 0.0)
    found = repetition([exact], [[steady], [steady], [changed]])
    assert (found.within, found.between, found.apart) == (True, False, 0.5)
    found = repetition([exact], [[steady], [mixed], [steady]])
    assert (found.within, found.between, found.apart) == (False, True, 0.5)


def model_of(*nodes: tuple[str, str]) -> onnx.ModelProto:
    made = [helper.make_node(op, ["x"], [f"{name}_output_0"], name=name) for op, name in nodes]
    return helper.make_model(helper.make_graph(made, "g", [], []))


def test_a_failure_is_put_down_to_the_longest_name_in_its_message() -> None:
    model = model_of(("Add", "/block1/Add"), ("Mul", "/block1/Add_1"), ("Tanh", "/block1/Tanh"))
    behind = RunnerFailedError("no shape for /block1/Add_1_output_0", Verdict.BUILD_FAILED)
    assert blamed(model, behind) == ["Mul"]
    logged = RunnerFailedError("it failed", Verdict.BUILD_FAILED, ["[ERROR] (/block1/Tanh): no"])
    assert blamed(model, logged) == ["Tanh"]
    named = RunnerFailedError("at /block1/Tanh", Verdict.BUILD_FAILED, node="/block1/Add")
    assert blamed(model, named) == ["Add"]
    assert blamed(model, RunnerFailedError("at /block1/Add_12", Verdict.BUILD_FAILED)) == ["Add"]
    assert blamed(model, RunnerFailedError("of no node", Verdict.BUILD_FAILED)) == []


def test_messages_of_one_kind_are_alike() -> None:
    one = alike("bad /block1/Add_1.2 [3,__mye1{min=1, max=2},8] at node 7")
    assert one == alike("bad /fault0/Mul [24,1,8] at node 12") == "bad … [#] at node #"


def line(number: int, **engines: dict[str, Any]) -> dict[str, Any]:
    operators = ["Add", "GRU"] if number % 2 else ["Add"]
    return {
        "number": number,
        "recipe": f"{number}:::",
        "operators": operators,
        "engines": engines,
        "seconds": 1.0,
        "runs": True,
        "on": "a GPU",
    }


def test_a_failure_that_names_no_node_is_put_down_to_what_is_rare() -> None:
    lines = [line(number) for number in range(4)]
    assert rarest(lines, [lines[1], lines[3]]) == "GRU"
    assert rarest(lines, lines) == "Add"


def test_the_table_counts_what_the_lines_say() -> None:
    ran = {
        "build_s": 0.3,
        "run_s": 1.0,
        "inputs": [
            {"nonfinite": SAME, "engine": 0.5, "emulated": 0.5, "largest": 0.6},
            {"nonfinite": ENGINE_FINITE, "engine": 3.0, "emulated": np.inf, "largest": 0.6},
        ],
        "repetition": {"processes": 3, "within": True, "between": False, "apart": 0.25},
    }
    broken = {"failed": "build", "message": "at node 3", "operators": []}
    lines = [line(1, FP16=ran, FP32=broken), {**line(2), "error": "ValueError: no"}]
    shown = list(table(json.loads(json.dumps(lines))))
    counts = "| 1 | 0 | 1 | 0 | 2 | 1 | 0 | 1 | 0 | 2 | 1 (50.0%) | 1 (50.0%) | 1 | 1 | 0 |"
    assert f"| FP16 {counts}" in shown
    assert "| build | none named; all have GRU | at node # | 1 | FP32 | 1::: |" in shown
    assert "| 1::: | FP16 | 1 | engine finite | 3 | inf |" in shown
    assert "| 1::: | FP16 | 1 | 3 | 0.6 | inf |" in shown
    assert "| 1::: | FP16 | yes | no | 0.25 |" in shown
    assert "| 2::: | ValueError: no |" in shown


@pytest.mark.parametrize(
    ("score", "largest", "is_wrong"),
    [
        (0.5, 0.04, True),
        (np.inf, 0.04, True),
        (0.5, 0.06, False),  # within ten times the largest
        (0.09, 0.0, False),  # within a tenth of the tolerance
        (0.5, None, False),  # nothing to compare with
    ],
)
def test_networks_that_are_wrong_in_fp32_are_counted_apart(
    score: float, largest: float | None, is_wrong: bool
) -> None:
    right = {"nonfinite": SAME, "engine": 0.03, "emulated": 0.03, "largest": 0.04}
    other = {**right, "engine": score, "largest": largest}
    repetition = {"processes": 1, "within": True, "between": True, "apart": 0.0}

    def ran(*inputs: dict[str, Any]) -> dict[str, Any]:
        return {"build_s": 0.3, "inputs": inputs, "repetition": repetition}

    lines = [
        line(1, FP16=ran(right, other), FP32=ran(right, other)),
        line(2, FP16=ran(right, other), FP32=ran(right, right)),
    ]
    shown = list(table(json.loads(json.dumps(lines))))
    alone = [row.split(" | ")[5] for row in shown if row.startswith("| FP16, not wrong in FP32 |")]
    assert alone == ["2" if is_wrong else "4"]
    assert (f"| 1::: | {score:.3g} |" in shown) == is_wrong


def test_a_second_run_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    assert read_lines(out) == []
    out.write_text(f'{json.dumps(line(4))}\n{{"number": 5, "rec', "utf-8")
    done = {found["number"] for found in read_lines(out)}
    assert missing(3, 4, done) == [3, 5, 6]


@pytest.mark.parametrize("content", [None, b"no JSON", b"\xff", b'{"seed": "1:::"}', b"[1]"])
def test_the_table_of_a_foreign_file_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    content: bytes | None,
) -> None:
    file = tmp_path / "lines.jsonl"
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setattr("sys.argv", ["engines", "--table", str(file)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr().out
    assert said.startswith(f"{file} has ") and said.count("\n") == 1


def test_a_share_of_the_networks_of_each_kind_runs_in_three_processes() -> None:
    assert {processes_of(number, 0) for number in range(50)} == {1}
    assert {processes_of(number, 1) for number in range(50)} == {3}
    thrice = [number for number in range(400) if processes_of(number, 4) == 3]
    assert 60 < len(thrice) < 140
    assert len({number % len(KINDS) for number in thrice}) == len(KINDS)


@pytest.mark.skipif(installed_module() != RTX, reason="only TensorRT for RTX builds without a GPU")
def test_engines_are_built_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is built, or says why it is not."""
    out = tmp_path / "lines.jsonl"
    command = f"engines --seed 6 --graphs 2 --processes 1 --build-only --out {out}"
    monkeypatch.setattr("sys.argv", command.split())
    main()
    lines = read_lines(out)
    assert [found["number"] for found in lines] == [6, 7]
    for found in lines:
        assert list(found["engines"]) == ["FP16", "FP32", "plan"]
        assert all("build_s" in e or e["message"] for e in found["engines"].values()), found
    assert any("build_s" in e for found in lines for e in found["engines"].values())
    main()
    assert "0 networks on tensorrt_rtx" in capsys.readouterr().out
    assert len(read_lines(out)) == 2
