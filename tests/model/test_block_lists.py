"""Plans as lists for AutoCast and for ONNX Runtime's converter."""

from __future__ import annotations

import json
import re
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from bisect_trt.base.errors import BadInputError
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.graph import list_layers
from bisect_trt.model.block_lists import (
    BLOCK_LISTS,
    autocast_arguments,
    onnxruntime_arguments,
)
from fixtures.encoders import encoder_decomposed, encoder_layernorm
from fixtures.subgraphs import branch, loop
from tests.command import call


def chain(*names: str, op: str = "Sin") -> onnx.ModelProto:
    """Nodes behind each other, called ``names``."""
    nodes = [
        helper.make_node(op, [f"t{index}"], [f"t{index + 1}"], name)
        for index, name in enumerate(names)
    ]
    ends = [
        helper.make_tensor_value_info(tensor, TensorProto.FLOAT, [2])
        for tensor in ("t0", f"t{len(names)}")
    ]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def plan_of(*pinned: str) -> PrecisionPlan:
    return PrecisionPlan(Precision.FP16, frozenset(pinned))


def test_each_expression_matches_its_node_and_no_other() -> None:
    names = ("/a.b/Sin", "/a.b/Sin_1", "/aXb/Sin", "x/a.b/Sin", "a+(b)[c]", "/a.b/Sin\n")
    model = chain(*names)
    for name in names:
        (text,) = json.loads(autocast_arguments(model, plan_of(name)))["nodes_to_exclude"]
        assert [n for n in names if re.match(text, n)] == [name], "AutoCast uses re.match"


def test_both_lists_turn_the_converters_own_rules_off() -> None:
    model = chain("a", "b")
    its = json.loads(autocast_arguments(model, plan_of("a")))
    assert its["data_max"] is its["init_max"] is None and its["low_precision_type"] == "fp16"
    its = json.loads(onnxruntime_arguments(model, plan_of("a")))
    assert its["op_block_list"] == [] and its["node_block_list"] == ["a"]
    assert its["max_finite_val"] == 65504.0 and its["keep_io_types"] is True


def test_nodes_that_are_never_reduced_are_listed_too() -> None:
    shape = helper.make_node("Shape", ["t0"], ["s"], "shape")
    kept = helper.make_node("ConstantOfShape", ["s"], ["c"], "filled")
    model = chain("a")
    model.graph.node.extend([shape, kept])
    assert [x.name for x in list_layers(model)] == ["a"]
    listed = json.loads(onnxruntime_arguments(model, plan_of()))["node_block_list"]
    assert listed == ["filled"]


def test_a_layernorm_that_autocast_merges_is_kept_where_a_part_of_it_is() -> None:
    model = encoder_decomposed().model
    power = next(x.name for x in list_layers(model) if x.op == "Pow" and "/head" in x.name)
    listed = json.loads(autocast_arguments(model, plan_of(power)))["nodes_to_exclude"]
    assert any(re.match(text, "LayerNorm_/head/ReduceMean") for text in listed)
    other = next(x.name for x in list_layers(model) if x.op == "Softmax")
    listed = json.loads(autocast_arguments(model, plan_of(other)))["nodes_to_exclude"]
    assert not any("LayerNorm_" in text for text in listed)


@pytest.mark.parametrize("form", BLOCK_LISTS)
@pytest.mark.parametrize(
    ("model", "pinned", "words"),
    [
        (chain("a", ""), "Sin_t2", "'Sin_t2' .*: the Sin has no name in the file"),
        (chain("a", "a"), "a_1", "'a_1' .*: 2 nodes are called 'a'"),
        (chain("a", "a"), "a", "'a' .*: 2 nodes are called 'a'"),
    ],
)
def test_a_layer_that_no_list_can_name_is_named(
    form: str, model: onnx.ModelProto, pinned: str, words: str
) -> None:
    with pytest.raises(BadInputError, match=f"^layer {words}; use the typed ONNX"):
        BLOCK_LISTS[form](model, plan_of(pinned))


@pytest.mark.parametrize("form", BLOCK_LISTS)
@pytest.mark.parametrize("base", [Precision.FP32, Precision.TF32])
def test_a_plan_that_reduces_no_tensor_is_refused(form: str, base: Precision) -> None:
    with pytest.raises(BadInputError, match="reduces nothing"):
        BLOCK_LISTS[form](chain("a"), PrecisionPlan(base))


def test_bf16_is_autocast_s_alone() -> None:
    model, plan = encoder_layernorm().model, PrecisionPlan(Precision.BF16)
    assert json.loads(autocast_arguments(model, plan))["low_precision_type"] == "bf16"
    with pytest.raises(BadInputError, match="FP16 only"):
        onnxruntime_arguments(model, plan)


def test_bodies_that_a_converter_breaks_are_refused() -> None:
    chosen, steps = branch().model, loop().model
    (choice,) = [x.name for x in list_layers(chosen) if x.op == "If"]
    (turns,) = [x.name for x in list_layers(steps) if x.op == "Loop"]
    with pytest.raises(BadInputError, match=f"layer '{choice}' cannot be kept in FP32"):
        onnxruntime_arguments(chosen, plan_of(choice))
    with pytest.raises(BadInputError, match=f"layer '{turns}' cannot be reduced by AutoCast"):
        autocast_arguments(steps, plan_of())
    listed = json.loads(autocast_arguments(steps, plan_of(turns)))["nodes_to_exclude"]
    assert any(re.match(text, turns) for text in listed)


def with_constant(value: float) -> onnx.ModelProto:
    """A node that adds ``value``, which is a Constant node."""
    constant = helper.make_node(
        "Constant", [], ["c"], "", value=helper.make_tensor("", TensorProto.FLOAT, [], [value])
    )
    model = chain("sin", "add")
    model.graph.node.insert(0, constant)
    model.graph.node[2].op_type = "Add"
    model.graph.node[2].input.append("c")
    return model


def test_a_constant_node_that_would_be_rounded_is_refused() -> None:
    with pytest.raises(BadInputError, match=r"layer 'add' .* rounds 'c', a Constant node"):
        onnxruntime_arguments(with_constant(0.1), plan_of("add"))
    onnxruntime_arguments(with_constant(0.5), plan_of("add"))
    onnxruntime_arguments(with_constant(0.1), plan_of("sin"))
    assert "add" in autocast_arguments(with_constant(0.1), plan_of("add"))


def test_the_command_writes_the_list(tmp_path: Path) -> None:
    model, plan, target = (tmp_path / name for name in ("m.onnx", "plan.json", "list.json"))
    onnx.save(chain("a", "b"), model)
    plan.write_text(plan_of("b").to_json())
    for form, key in (("autocast", "nodes_to_exclude"), ("onnxruntime", "node_block_list")):
        ended = call("export", model, "--plan", plan, "--format", form)
        assert ended.exit_code == 0 and len(json.loads(ended.stdout)[key]) == 1
        call("export", model, "--plan", plan, "--format", form, "-o", target)
        assert target.read_text() == ended.stdout


@pytest.mark.parametrize("form", BLOCK_LISTS)
def test_a_list_comes_back_as_the_same_plan(form: str, tmp_path: Path) -> None:
    fixture = encoder_layernorm()
    model, plan, text, back = (tmp_path / n for n in ("m.onnx", "plan.json", "list.json", "b.json"))
    onnx.save(fixture.model, model)
    pinned = [
        x.name for x in list_layers(fixture.model) if x.op in ("Softmax", "LayerNormalization")
    ]
    plan.write_text(plan_of(*pinned).to_json())
    assert call("export", model, "--plan", plan, "--format", form, "-o", text).exit_code == 0
    ended = call("import", model, text, "-o", back)
    assert ended.exit_code == 0, ended.output
    assert sorted(json.loads(back.read_text())["pinned"]) == sorted(pinned)


def test_the_command_names_the_layer_that_it_cannot_write(tmp_path: Path) -> None:
    model, plan = tmp_path / "m.onnx", tmp_path / "plan.json"
    onnx.save(chain("a", ""), model)
    plan.write_text(plan_of("Sin_t2").to_json())
    ended = call("export", model, "--plan", plan, "--format", "autocast")
    assert ended.exit_code == 2 and "layer 'Sin_t2' cannot be in a list" in ended.stderr
