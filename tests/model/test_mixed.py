"""Mixed models that other tools made: what they compute, and the plan that their types say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from bisect_trt.base.errors import BadInputError
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.graph import list_layers, to_typed
from bisect_trt.model.graph import Graph
from bisect_trt.model.mixed import Match, MixedModel, load_mixed, plan_of_mixed
from bisect_trt.runners.emulator import EmulatedRunner
from bisect_trt.runners.second_emulator import WholeModelRunner
from fixtures.models import ALL, conv_clip
from tests.conftest import same
from tests.networks import parsed

CHAIN = "a = Mul (x, k)  b = Mul (a, k)  y = Div (b, d)"
"""x * 1000 * 1000 / 10,000: FP16 overflows, FP32 gives 100 x."""

CONSTANTS = {"k": np.float32(1000.0), "d": np.float32(1e4)}


def judged(mixed: MixedModel, x: np.ndarray) -> np.ndarray:
    """The output of a mixed model for ``x``, on which both emulators agree."""
    runners = (EmulatedRunner(mixed.graph, mixed.precision), WholeModelRunner(mixed.graph))
    first, second = (
        next(iter(r.outputs(mixed.exact, [Sample("x", {"x": x})])))["y"] for r in runners
    )
    assert same(first, second)
    return first


def of(body: str, mixed: onnx.ModelProto, **constants: Any) -> MixedModel:
    return load_mixed(mixed, Graph(parsed(body, **{**CONSTANTS, **constants})), "m.onnx")


def half(**values: float) -> dict[str, np.float16]:
    return {name: np.float16(value) for name, value in values.items()}


def in_half(body: str, *, casts_inside: bool = False, **more: Any) -> onnx.ModelProto:
    """A model in FP16, whose borders are FP16, or Casts inside where it ``casts_inside``."""
    if casts_inside:
        body = f"h = Cast <to = 10> (x)  {body.replace('(x', '(h').replace('y =', 'z =')}"
        return parsed(f"{body}  y = Cast <to = 1> (z)", **half(k=1000.0, d=1e4), **more)
    borders = {"inputs": "float16[1, 16] x", "outputs": "float16[1, 16] y"}
    return parsed(body, **borders, **half(k=1000.0, d=1e4), **more)


INPUT = np.linspace(0.01, 1.0, 16, dtype=np.float32).reshape(1, 16)


@pytest.mark.parametrize("casts_inside", [False, True])
def test_what_overflows_in_fp16_overflows(casts_inside: bool) -> None:
    model = in_half(CHAIN, casts_inside=casts_inside)
    found = of(CHAIN, model)
    assert found.plan == PrecisionPlan(Precision.FP16)
    output = judged(found, INPUT)
    fed = INPUT if casts_inside else INPUT.astype(np.float16)
    with np.errstate(over="ignore"):
        expected = ReferenceEvaluator(model).run(None, {"x": fed})[0].astype(np.float32)
    assert np.isinf(expected).any() and np.isfinite(expected).any()
    np.testing.assert_array_equal(output, expected)
    said = any("rounded at the border" in note for note in found.notes)
    assert said is not casts_inside


def test_an_island_in_fp32_is_one() -> None:
    body = """h = Cast <to = 10> (x)  a = Mul (h, k)  w = Cast <to = 1> (a)
        b = Mul (w, e)  y = Div (b, d)"""
    weights = {**half(k=1000.0), "e": np.float32(1000.0), "d": np.float32(1e4)}
    found = of(CHAIN, parsed(body, **weights))
    assert found.plan.pinned == {"Mul_b", "Div_y"}
    half_x = INPUT.astype(np.float16)
    first = (half_x * np.float16(1000.0)).astype(np.float32)
    expected = first * np.float32(1000.0) / np.float32(1e4)
    np.testing.assert_array_equal(judged(found, INPUT), expected)


def test_an_operand_that_stays_in_fp32_is_not_rounded() -> None:
    body = "y = Pow (x, p)"
    power = np.float32(0.45454547)
    assert np.float32(np.float16(power)) != power
    mixed = parsed(
        "h = Cast <to = 10> (x)  z = Pow (h, p)  y = Cast <to = 1> (z)", p=np.asarray(power)
    )
    found = of(body, mixed, p=np.asarray(power))
    exact = INPUT.astype(np.float16).astype(np.float64) ** np.float64(power)
    expected = exact.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(judged(found, INPUT), expected)
    assert not found.plan.pinned  # its output is FP16


def test_a_node_that_no_plan_reduces_is_rounded_where_its_type_is_fp16() -> None:
    boxes = np.asarray([[0.0, 0.0, 3.0, 3.0]], np.float32)
    body = "y = RoiAlign <output_height = 2, output_width = 2> (x, r, i)"
    borders = {"inputs": "float[1, 1, 4, 4] x", "outputs": "float[1, 1, 2, 2] y"}
    weights = {"r": boxes, "i": np.zeros(1, np.int64)}
    original = parsed(body, **borders, **weights)
    mixed = parsed(
        f"h = Cast <to = 10> (x)  {body.replace('(x', '(h').replace('y =', 'z =')}"
        "  y = Cast <to = 1> (z)",
        **borders,
        **{**weights, "r": boxes.astype(np.float16)},
    )
    found = load_mixed(mixed, Graph(original), "m.onnx")
    x = (np.arange(16, dtype=np.float32) / 7.0).reshape(1, 1, 4, 4)
    output = judged(found, x)
    assert not np.array_equal(output, run_in_fp32(original, x))
    np.testing.assert_array_equal(output, output.astype(np.float16))


def run_in_fp32(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    runner = EmulatedRunner(model)
    return next(iter(runner.outputs(PrecisionPlan(Precision.FP32), [Sample("x", {"x": x})])))["y"]


PLANS = [make for make in ALL if make().precision in ("fp16", "bf16")]


@pytest.mark.parametrize("make", PLANS, ids=lambda make: make.__name__)
@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_a_typed_model_is_read_back(make: Callable[[], Any], data: st.DataObject) -> None:
    fixture = make()
    base = Precision(fixture.precision)
    model = onnx.load(fixture.model) if not hasattr(fixture.model, "graph") else fixture.model
    layers = [x.name for x in list_layers(model) if base in x.precisions]
    plan = PrecisionPlan(base, data.draw(st.frozensets(st.sampled_from(layers))))
    typed = to_typed(model, plan)
    if plan.pinned.issuperset(layers):
        with pytest.raises(BadInputError, match="no node of it gives FP16 or BF16"):
            plan_of_mixed(model, typed)
        return
    found, nodes = plan_of_mixed(model, typed)
    assert found == plan
    assert {node.how for node in nodes} <= {Match.NAME, Match.ADDED}
    feed = Sample("x", dict(fixture.inputs))
    mixed = load_mixed(typed, Graph(model), "m.onnx")
    runs = (EmulatedRunner(model, base), plan), (EmulatedRunner(mixed.graph, base), mixed.exact)
    own, its = (next(iter(runner.outputs(one, [feed]))) for runner, one in runs)
    assert all(same(own[name], its[name]) for name in own)


TOOLS = {
    "autocast": frozenset[str](),
    "autocast_io": frozenset[str](),
    "float16": frozenset({"/stem/Clip"}),
    "float16_io": frozenset({"/stem/Clip"}),
}
"""The layers that AutoCast's and onnxconverter-common's models in mixed/ keep in FP32."""


@pytest.mark.parametrize("name", TOOLS)
def test_models_of_other_tools_compute_what_their_plans_say(name: str) -> None:
    fixture = conv_clip()
    path = Path(__file__).parent / "mixed" / f"{name}.onnx"
    mixed = load_mixed(path, Graph(fixture.model), "m.onnx")
    assert mixed.plan == PrecisionPlan(Precision.FP16, TOOLS[name])
    assert {node.how for node in mixed.nodes if node.layer} == {Match.NAME}
    own = EmulatedRunner(fixture.model).outputs(mixed.plan, [Sample("x", fixture.inputs)])
    its = EmulatedRunner(mixed.graph).outputs(mixed.exact, [Sample("x", fixture.inputs)])
    assert same(next(iter(own))["y"].astype(np.float16), next(iter(its))["y"].astype(np.float16))
    assert any("rounded at the border" in note for note in mixed.notes) is name.endswith("_io")


def test_renamed_added_fused_and_missing_nodes_are_named() -> None:
    original = parsed(
        """c = Conv (x, w)  n = BatchNormalization (c, s, b, m, v)  r = Relu (n)
        i = Identity (r)  y = Sigmoid (i)""",
        inputs="float[1, 2, 4, 4] x",
        outputs="float[1, 2, 4, 4] y",
        w=np.ones((2, 2, 1, 1), np.float32),
        **{name: np.ones(2, np.float32) for name in ("s", "b", "m", "v")},
    )
    mixed = parsed(  # the normalisation is folded, the Identity is gone
        """h = Cast <to = 10> (x)  n = Conv (h, w)  o = Cast <to = 1> (n)  r = Relu (o)
        y = Sigmoid (r)""",
        inputs="float[1, 2, 4, 4] x",
        outputs="float[1, 2, 4, 4] y",
        w=np.full((2, 2, 1, 1), 0.5, np.float16),
    )
    found = load_mixed(mixed, Graph(original), "m.onnx")
    by_layer = {node.layer: (node.how, node.node) for node in found.nodes if node.layer}
    assert by_layer == {
        "Conv_c": (Match.MISSING, ""),
        "BatchNormalization_n": (Match.FUSED, "Conv_n"),
        "Relu_r": (Match.NAME, "Relu_r"),
        "Identity_i": (Match.MISSING, ""),
        "Sigmoid_y": (Match.NAME, "Sigmoid_y"),
    }
    added = [node.node for node in found.nodes if node.how is Match.ADDED]
    assert added == ["Cast_h", "Cast_o"]
    # The Identity stands between layers in FP32, the Conv before one in FP16.
    assert found.plan.pinned == {"Relu_r", "Identity_i", "Sigmoid_y"}
    assert any("fused into others: BatchNormalization_n" in note for note in found.notes)
    assert any("not found: Conv_c, Identity_i" in note for note in found.notes)


def test_a_renamed_node_is_found_by_its_output() -> None:
    mixed = in_half(CHAIN, casts_inside=True)
    for number, node in enumerate(mixed.graph.node):
        node.name = f"node_{number}"
    found = of(CHAIN, mixed)
    assert [(n.how, n.layer, n.node) for n in found.nodes if n.layer] == [
        (Match.OUTPUT, "Mul_a", "node_1"),
        (Match.OUTPUT, "Mul_b", "node_2"),
        (Match.OUTPUT, "Div_y", "node_3"),  # behind a Cast that the tool added
    ]


def test_weights_that_a_converter_clips_are_said_and_judged() -> None:
    body, large = "y = Mul (x, v)", np.full(16, 9.8e7, np.float32)
    clipped = np.full(16, 1e4, np.float16)
    mixed = parsed("h = Cast <to = 10> (x)  z = Mul (h, v)  y = Cast <to = 1> (z)", v=clipped)
    found = of(body, mixed, v=large)
    assert any("has clipped values of 1 weight: v" in note for note in found.notes)
    assert judged(found, INPUT).max() == np.float32(np.float16(1e4))


def test_a_newer_opset_is_said() -> None:
    found = of(CHAIN, in_half(CHAIN, opset=18))
    assert any("opset 18, raised from 17" in note for note in found.notes)


def other_weights() -> onnx.ModelProto:
    model = in_half(CHAIN)
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.float16(1002.0), "k"))
    return model


def both_kinds() -> onnx.ModelProto:
    body = """h = Cast <to = 10> (x)  a = Mul (h, k)  w = Cast <to = 16> (a)  b = Mul (w, l)
        v = Cast <to = 1> (b)  y = Div (v, d)"""
    model = parsed(body, **half(k=1000.0), d=np.float32(1e4))
    model.graph.initializer.append(helper.make_tensor("l", TensorProto.BFLOAT16, [], [1000.0]))
    return model


REFUSED: dict[str, tuple[Callable[[], onnx.ModelProto], str]] = {
    "other weights": (other_weights, "weight 'k' of 'Mul_a' is more than a rounding apart"),
    "FP32": (lambda: parsed(CHAIN, **CONSTANTS), "no node of it gives FP16 or BF16"),
    "both kinds": (both_kinds, "mixes FP16 and BF16"),
    "older opset": (lambda: in_half(CHAIN, opset=16), "has opset 16, older than 17"),
    "other input": (
        lambda: parsed(
            CHAIN.replace("(x", "(q"),
            inputs="float16[1, 16] q",
            outputs="float16[1, 16] y",
            **half(k=1000.0, d=1e4),
        ),
        "has no input 'x'",
    ),
    "other shape": (
        lambda: parsed(
            CHAIN,
            inputs="float16[1, 8] x",
            outputs="float16[1, 8] y",
            **half(k=1000.0, d=1e4),
        ),
        "input 'x' has the shape",
    ),
    "other output": (
        lambda: parsed(
            CHAIN.replace("y =", "z ="),
            inputs="float16[1, 16] x",
            outputs="float16[1, 16] z",
            **half(k=1000.0, d=1e4),
        ),
        "has no output 'y'",
    ),
    "another model": (
        lambda: parsed(
            "h = Cast <to = 10> (x)  s = Sigmoid (h)  y = Cast <to = 1> (s)",
        ),
        "no node of it is one of m.onnx",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_cannot_be_judged_is_refused_in_one_line(case: str) -> None:
    make, words = REFUSED[case]
    with pytest.raises(BadInputError) as error:
        of(CHAIN, make())
    assert words in str(error.value) and "\n" not in str(error.value)
