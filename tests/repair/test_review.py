"""What a repaired or fitted answer must not lose: references, inputs, numbers, types, files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

import bisect_trt
from bisect_trt import pipeline
from bisect_trt.base.interrupt import BudgetSpentError, Observer
from bisect_trt.base.plan import Precision
from bisect_trt.repair.weights import neighbours
from bisect_trt.report.summarise import Result
from bisect_trt.runners.device import Device
from bisect_trt.settings import Settings
from bisect_trt.steps import context as context_module
from bisect_trt.steps.context import Context, open_beside, open_context
from bisect_trt.steps.fit_weights import (
    FittedWeights,
    fitted_problem,
    fitted_weights,
    kept_if_better,
)
from bisect_trt.steps.problem import Problem, load
from bisect_trt.steps.samples import SEARCH_STREAM, augmented, perturbs
from fixtures.build import GraphBuilder
from tests.command import call
from tests.copies import EIGHT

WIDTH = 32
FEED = {"x": np.random.default_rng(4).standard_normal((4, WIDTH)).astype(np.float32)}


def blocks(count: int = 4, bias: NDArray[np.float32] | None = None) -> onnx.ModelProto:
    """Residual blocks, whose errors add up."""
    b, x = GraphBuilder(3), "x"
    for block in range(count):
        b.scope = f"/b.{block}"
        hidden = b.op("MatMul", x, b.normal(WIDTH, WIDTH, scale=WIDTH**-0.5))
        if bias is not None:
            hidden = b.op("Add", hidden, b.weight(bias))
        hidden = b.op("Relu", hidden)
        x = b.op("Add", x, b.op("MatMul", hidden, b.normal(WIDTH, WIDTH, scale=WIDTH**-0.5)))
    b.rename_output(x, "y")
    return b.model({"x": [4, WIDTH]}, {"y": [4, WIDTH]})


def answered(model: onnx.ModelProto | Path, out: Path, **options: object) -> Result:
    its = {"runner": "emulated", "out": out, "limits": EIGHT, "repair": "none", "weights": "fit"}
    its |= {"require": "rel_range<=2e-4"}
    return bisect_trt.bisect(model, options.pop("feed", FEED), **{**its, **options})


def problem_of(model: onnx.ModelProto, feed: dict[str, NDArray[Any]], out: Path) -> Problem:
    settings = Settings(model=model, inputs=(feed,), runner="emulated", out=out)
    return load(settings, Observer())


@pytest.mark.parametrize("part", ["find_repair", "fitted_weights"])
def test_what_takes_too_long_leaves_time_for_the_search(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = dict[str, float]()

    def too_long(problem: Problem, context: Context, *_: object) -> None:
        left["s"] = context.time.left_s
        raise BudgetSpentError

    monkeypatch.setattr(pipeline, part, too_long)
    repair = "auto" if part == "find_repair" else "none"
    found = answered(blocks(), tmp_path, budget=1000.0, repair=repair)
    assert left["s"] <= 0.5 * 60_000.0
    assert [c.name for c in found.choice_rows if c.recommended] == ["plan"]
    assert found.plan.pinned and len(found.pinned) < found.layer_count
    told = "not-repaired" if part == "find_repair" else "not-fitted"
    assert sum(f.kind == told and "too little time" in f.message for f in found.findings) == 1


def test_weights_of_another_precision_are_left_alone(tmp_path: Path) -> None:
    found = answered(blocks(), tmp_path, precision="bf16")
    assert "weights fitted" not in [choice.name for choice in found.choice_rows]


def test_a_dry_run_says_that_fitting_takes_time(files: Path) -> None:
    given = (files / "m.onnx", "--input", files / "x.npz", "--runner", "emulated", "--dry-run")
    assert "rounded to fit" in call("run", *given).output
    assert "rounded to fit" not in call("run", *given, "--weights", "nearest").output


def test_weights_stay_where_the_rest_reads_inner_tensors(tmp_path: Path) -> None:
    found = answered(blocks(), tmp_path, outputs=["/b.2/MatMul_1_output_0"])
    assert found.exit_code == 0 and "weights fitted" not in [c.name for c in found.choice_rows]
    assert any("inner tensors" in f.message for f in found.findings if f.kind == "not-fitted")
    assert not (tmp_path / "model.fitted.onnx").exists()


def test_a_weight_that_the_rest_reads_too_stays(tmp_path: Path) -> None:
    model = blocks()
    inner, shared = "/b.2/Add_output_0", "w0"
    model.graph.node[-4].input[1] = shared
    assert model.graph.node[-4].op_type == "MatMul"
    problem = load(
        Settings(model=model, inputs=(FEED,), runner="emulated", out=tmp_path, outputs=(inner,)),
        Observer(),
    )
    assert shared in problem.graph.constants
    with open_context(problem, Observer()) as context:
        found = fitted_weights(problem, context)
    assert found.constants and shared not in found.constants


def test_a_network_that_errs_more_keeps_the_nearest_rounding(tmp_path: Path) -> None:
    problem = problem_of(blocks(), FEED, tmp_path)
    with open_context(problem, Observer()) as context:
        found = fitted_weights(problem, context)
        apart = list(perturbs(problem, context, SEARCH_STREAM, 4, emulated=True))
        assert kept_if_better(problem, context, found, apart) == found
        weights = {n: problem.graph.constants[n] for n in found.constants}
        farther = {
            name: neighbours(values.astype(np.float64), Precision.FP16)[1].astype(np.float32)
            for name, values in weights.items()
        }
        worse = FittedWeights(problem.graph.with_constants(farther), farther, found.layers)
        left = kept_if_better(problem, context, worse, apart)
        # Without an input to judge on, the layers' own errors decide.
        assert kept_if_better(problem, context, worse, []) == worse
    assert found.constants and not left.constants and left.graph is problem.graph
    assert left.layers and not any(row.kept for row in left.layers)


def test_copies_kept_apart_choose_no_weights(tmp_path: Path) -> None:
    problem = problem_of(blocks(), FEED, tmp_path)
    with open_context(problem, Observer()) as context:
        found = fitted_weights(problem, context)
        copies = [
            *perturbs(problem, context, SEARCH_STREAM, 10, emulated=True),
            *augmented(problem, context, SEARCH_STREAM, 10),
        ]
    made = list(dict.fromkeys(sample.digest for sample in copies))
    given = {sample.digest for sample in problem.samples}
    assert len(found.samples) == len(set(found.samples)) == len(given) + len(made) - len(made) // 5
    assert set(found.samples) == (given | set(made)) - set(made[4::5])


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_weights_beyond_fp16_stay_as_they_are(tmp_path: Path) -> None:
    bias = np.full(WIDTH, 0.3, np.float32)
    bias[0] = 1e5
    problem = problem_of(blocks(1, bias), FEED, tmp_path)
    with open_context(problem, Observer()) as context:
        found = fitted_weights(problem, context)
    biases = [found.constants[row.bias] for row in found.layers if row.kept and row.bias]
    assert biases and all(array[0] == np.float32(1e5) for array in biases)


def test_where_no_rounding_is_better_there_is_no_row(tmp_path: Path) -> None:
    model = blocks()
    for tensor in model.graph.initializer:
        exact = numpy_helper.to_array(tensor).astype(np.float16).astype(np.float32)
        tensor.CopyFrom(numpy_helper.from_array(exact, tensor.name))
    found = answered(model, tmp_path)
    assert "weights fitted" not in [choice.name for choice in found.choice_rows]
    assert [f.kind for f in found.findings].count("not-fitted") == 1
    assert not (tmp_path / "model.fitted.onnx").exists()


def half(model: onnx.ModelProto, kept: str) -> onnx.ModelProto:
    """``model`` stored in FP16, but for the layer ``kept``."""
    graph, nodes = model.graph, []
    weights = {node.input[1] for node in graph.node if node.name == kept}
    for tensor in graph.initializer:
        if tensor.name not in weights:
            stored = numpy_helper.to_array(tensor).astype(np.float16)
            tensor.CopyFrom(numpy_helper.from_array(stored, tensor.name))
    for node in graph.node:
        new = onnx.NodeProto()
        new.CopyFrom(node)
        if node.name == kept:
            before = helper.make_node("Cast", [node.input[0]], ["before"], to=TensorProto.FLOAT)
            behind = helper.make_node("Cast", ["behind"], [node.output[0]], to=TensorProto.FLOAT16)
            new.input[0], new.output[0] = "before", "behind"
            nodes += [before, new, behind]
        else:
            nodes.append(new)
    del graph.node[:]
    graph.node.extend(nodes)
    for value in (*graph.input, *graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    onnx.checker.check_model(model, full_check=True)
    return model


def test_weights_of_a_layer_that_stays_in_fp32_are_not_worth_fitting(tmp_path: Path) -> None:
    feed = {"x": FEED["x"].astype(np.float16)}
    found = answered(half(blocks(), "/b.1/MatMul"), tmp_path, feed=feed)
    # All other weights are FP16 numbers.
    assert "weights fitted" not in [choice.name for choice in found.choice_rows]
    assert not (tmp_path / "model.fitted.onnx").exists()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with the plan of the fitted row, its model and its input."""
    folder = tmp_path_factory.mktemp("files")
    onnx.save(blocks(), folder / "m.onnx")
    np.savez(folder / "x.npz", **FEED)
    answered(folder / "m.onnx", folder / "run", require="rel_range<=3e-4")
    plan = json.loads((folder / "run" / "plan.json").read_text())
    (row,) = (row for row in plan["choices"] if row["name"] == "weights fitted")
    plan |= {"weights": "fit", "pinned": row["pinned"]}
    (folder / "run" / "fitted.json").write_text(json.dumps(plan))
    return folder


def verified(files: Path, model: str, *more: object) -> tuple[int, dict[str, object]]:
    given = ("--input", files / "x.npz", "--plan", files / "run" / "fitted.json")
    out = ("--runner", "emulated", "--out", files / "verify", "--json")
    ended = call("verify", files / model, *given, *out, *more, limits=EIGHT)
    record = json.loads((files / "verify" / "verify.json").read_text())
    return ended.exit_code, record


def test_layers_kept_in_fp32_have_their_weights_in_the_files(tmp_path: Path) -> None:
    model = blocks()
    found = answered(model, tmp_path, require="rel_range<=3e-4")
    (row,) = [choice for choice in found.choice_rows if choice.name == "weights fitted"]
    before = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    made = onnx.load(tmp_path / "model.fitted.onnx")
    after = {t.name: numpy_helper.to_array(t) for t in made.graph.initializer}
    kept = [layer for layer in found.weights.rows if layer.kept]
    pinned = {x.weight for x in kept if x.layer in row.plan.pinned}
    reduced = {x.weight for x in kept} - pinned
    assert pinned and reduced
    assert all(np.array_equal(after[name], before[name]) for name in pinned)
    assert all(np.array_equal(after[name], after[name].astype(np.float16)) for name in reduced)


def test_golden_outputs_are_checked_with_fitted_weights_too(files: Path) -> None:
    np.savez(files / "golden.npz", y=np.ones((4, WIDTH), np.float32))
    code, record = verified(files, "m.onnx", "--golden", files / "golden.npz")
    assert code == 1 and not record["passed"]
    checks = {check["what"]: check["validation"] for check in record["checks"]}  # type: ignore
    assert checks["golden outputs"] is False


def test_verify_says_where_fitted_weights_are_their_own_reference(files: Path) -> None:
    told = "judged against itself"
    assert not any(told in str(note) for note in verified(files, "m.onnx")[1]["notes"])  # type: ignore
    notes = verified(files, "run/model.fitted.onnx")[1]["notes"]
    assert sum(told in str(note) for note in notes) == 1  # type: ignore


def test_no_validation_has_an_augmented_input_that_weights_were_chosen_on(tmp_path: Path) -> None:
    b = GraphBuilder(5)
    b.rename_output(b.op("MatMul", b.op("Gather", b.normal(16, 8), "x"), b.normal(8, 8)), "y")
    model = b.model({"x": [1, 16]}, {"y": [1, 16, 8]}, TensorProto.INT64)
    # Rotated, these give fifteen others.
    problem = problem_of(model, {"x": np.arange(16)[None]}, tmp_path)
    problem = replace(problem, settings=replace(problem.settings, augmented="rotate"))
    with open_context(problem, Observer()) as context:
        chosen_on = {sample.digest for sample in augmented(problem, context, SEARCH_STREAM, 8)}
        with open_beside(context, problem) as inner:
            tested = [sample.digest for sample in augmented(inner.problem, inner, 1, 8)]
    assert chosen_on and tested and chosen_on.isdisjoint(tested)


def test_a_gpu_gives_no_reference_of_fitted_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is the CPU by another name: what matters is whose outputs are taken."""
    problem = problem_of(blocks(), FEED, tmp_path)
    with open_context(problem, Observer()) as context:
        fitted = fitted_problem(problem, fitted_weights(problem, context))
    other = Device(name="another")
    monkeypatch.setattr(context_module, "emulator_device", lambda settings: other)
    with open_context(fitted, Observer()) as context:
        assert context.emulator.device != Device()
        (copy,) = augmented(fitted, context, SEARCH_STREAM, 1)
        reference = context.references.of(copy)["y"]
        np.testing.assert_array_equal(reference, problem.reference.outputs(copy)["y"])
