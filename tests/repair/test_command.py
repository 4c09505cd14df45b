"""``bisect-trt repair``: its files, its exit codes and what it says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from bisect_trt.repair.edits import origins_of
from fixtures.build import GraphBuilder
from tests.command import call
from tests.repair.graphs import run, run_fp16, snr_db
from tests.repair.test_proof import folded
from tests.repair.test_rules import batch_norm, normal


def written(model: onnx.ModelProto, feed: dict[str, np.ndarray], folder: Path) -> list[str]:
    """The model and its input as files, as arguments of a command."""
    onnx.save(model, folder / "m.onnx")
    np.savez(folder / "x.npz", **feed)  # type: ignore[arg-type]
    return [str(folder / "m.onnx"), "--input", str(folder / "x.npz"), "--out", str(folder / "out")]


def test_a_repaired_model_is_fp32_checked_and_says_what_was_done(tmp_path: Path) -> None:
    model, feed = folded()
    ended = call("repair", *written(model, feed, tmp_path))
    assert ended.exit_code == 0, ended.output
    assert ended.output.startswith("REPAIRED   fold-bn")
    made = onnx.load(tmp_path / "out" / "model.repaired.onnx")
    onnx.checker.check_model(made, full_check=True)
    assert [(v.name, v.type) for v in made.graph.input] == [
        (v.name, v.type) for v in model.graph.input
    ]
    assert [v.name for v in made.graph.output] == [v.name for v in model.graph.output]
    (node,) = [n for n in made.graph.node if n.op_type == "Conv"]
    assert (node.name, origins_of(node)) == ("/Conv", ("/BatchNormalization",))
    said = {p.key: p.value for p in made.metadata_props}
    assert json.loads(said["bisect_trt.repairs"])[0]["rule"] == "fold-bn"
    exact = run(model, feed)["y"]
    np.testing.assert_allclose(run(made, feed)["y"], exact, atol=1e-6 * np.abs(exact).max())
    assert snr_db(exact, run_fp16(made, feed)["y"]) > 50
    record = json.loads((tmp_path / "out" / "repair.json").read_text())
    assert record["repaired_model"] == "model.repaired.onnx"
    proof = record["repair_proof"]
    assert proof["missed_before"] == proof["tried"] > proof["missed_after"] == 0
    assert proof["headroom"] >= 2
    (row,) = record["repairs"]
    assert row["identity"].startswith("BN(W x + c)") and row["constants"][0][2] == "folded"


def test_a_repaired_model_needs_no_repair(tmp_path: Path) -> None:
    model, feed = folded()
    assert call("repair", *written(model, feed, tmp_path)).exit_code == 0
    made = tmp_path / "out" / "model.repaired.onnx"
    again = call("repair", made, "--input", tmp_path / "x.npz", "--out", tmp_path / "again")
    assert again.exit_code == 0
    assert again.output.startswith("NEEDS NO REPAIR")
    assert not (tmp_path / "again" / "model.repaired.onnx").exists()


@pytest.mark.parametrize("rules", ["mask", "epsilon,mask"])
def test_only_the_rules_that_are_named_edit(tmp_path: Path, rules: str) -> None:
    model, feed = folded()
    ended = call("repair", *written(model, feed, tmp_path), "--repair", rules)
    assert ended.exit_code == 1
    assert ended.output.startswith("NOT REPAIRED")
    record = json.loads((tmp_path / "out" / "repair.json").read_text())
    assert record["repairs"] == [] and record["repaired_model"] is None


def test_an_unknown_rule_is_named(tmp_path: Path) -> None:
    model, feed = folded()
    ended = call("repair", *written(model, feed, tmp_path), "--repair", "fold_bn")
    assert ended.exit_code == 2
    assert "--repair fold_bn: no such rule; choose auto, none, or some of fold-bn" in ended.output
    assert not (tmp_path / "out").exists()


def test_json_is_the_file(tmp_path: Path) -> None:
    model, feed = folded()
    ended = call("repair", *written(model, feed, tmp_path), "--json")
    assert json.loads(ended.output) == json.loads((tmp_path / "out" / "repair.json").read_text())


def with_tail(*, inner: bool) -> onnx.ModelProto:
    """Scores behind a BatchNormalization, then a NonMaxSuppression; the rest may read inside."""
    b = GraphBuilder(60, opset=17)
    h = batch_norm(b, b.op("Gemm", "x", b.normal(4, 6, scale=1e4)), 6, 1e8)
    b.rename_output(b.op("Reshape", h, b.weight([1, 1, -1], np.int64)), "scores")
    boxes = b.op("Reshape", b.op("Gemm", "x", b.normal(4, 4)), b.weight([1, -1, 4], np.int64))
    b.rename_output(boxes, "boxes")
    read = h if inner else "scores"
    top = b.op("ReduceMax", read, keepdims=0)
    b.rename_output(b.op("Mul", top, b.weight(2.0)), "best")
    b.rename_output(b.op("Identity", "scores"), "kept")
    model = b.model({"x": [6, 4]}, {"kept": [1, 1, 36], "boxes": [1, 6, 4], "best": []})
    return model


@pytest.mark.parametrize("inner", [False, True])
def test_the_rest_of_a_model_judged_at_inner_tensors_stays(tmp_path: Path, inner: bool) -> None:
    model, feed = with_tail(inner=inner), {"x": normal(61, 6, 4)}
    ended = call("repair", *written(model, feed, tmp_path), "--outputs", "scores,boxes")
    if inner:
        assert ended.exit_code == 1
        assert "reads inner tensors of the judged part" in ended.output
        return
    assert ended.exit_code == 0, ended.output
    made = onnx.load(tmp_path / "out" / "model.repaired.onnx")
    onnx.checker.check_model(made, full_check=True)
    exact, got = run(model, feed), run(made, feed)
    assert exact.keys() == got.keys()
    for name, array in exact.items():
        np.testing.assert_allclose(got[name], array, rtol=1e-5, atol=1e-5 * np.abs(array).max())


def test_a_source_in_bf16_is_refused(tmp_path: Path) -> None:
    kinds = TensorProto
    nodes = [
        helper.make_node("Cast", ["x"], ["low"], to=kinds.BFLOAT16),
        helper.make_node("Add", ["low", "low"], ["twice"]),
        helper.make_node("Cast", ["twice"], ["y"], to=kinds.FLOAT),
    ]
    value = [helper.make_tensor_value_info(n, kinds.FLOAT, [4]) for n in "xy"]
    graph = helper.make_graph(nodes, "g", value[:1], value[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    ended = call("repair", *written(model, {"x": normal(62, 4)}, tmp_path))
    assert ended.exit_code == 2
    assert "the graph is repaired only for FP16, and its precision is" in ended.output
