"""Underflow is a cause, with the number that matters; where there are two causes both are named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import bisect_trt
from bisect_trt.base.outcomes import Cause
from bisect_trt.base.plan import Precision
from bisect_trt.metrics.requirements import times
from bisect_trt.model.graph import Graph
from bisect_trt.model.lost_constants import constant_sizes, largest_constant, lost_constants
from fixtures.fixture import waves
from fixtures.reports import bsroformer_rms
from tests.networks import parsed


def run(model: onnx.ModelProto, out: Path, scale: float = 1.0) -> bisect_trt.Result:
    x = {"x": waves(0, 1, 16) * np.float32(scale)}
    return bisect_trt.bisect(model, x, runner="emulated", out=out, robust=0)


def test_the_ends_of_each_layer_s_constants() -> None:
    model = parsed(
        "[two] a = Clip(x, low, high) [none] b = Relu(a) [odd] c = Mul(b, w) [zeros] y = Add(c, z)",
        constants="float low = {-1e-9}, float high = {6}, float z = {0}, "
        "float[4] w = {0, -9.79e7, 3e-8, 1}",
    )
    sizes = constant_sizes(Graph(model))
    assert sizes == {
        "two": (pytest.approx(1e-9), 6.0),
        "odd": (pytest.approx(3e-8), pytest.approx(9.79e7)),
    }
    wide = parsed("[inf] y = Mul(x, w)", w=np.array([np.inf], np.float32))
    assert constant_sizes(Graph(wide)) == {}


def test_of_which_constants_little_is_left() -> None:
    model = parsed(
        "[eps] a = Add(x, e) [scale] b = Mul(a, s) [fine] c = Mul(b, w) [mixed] y = Mul(c, m)",
        constants="float e = {1e-12}, float[1] s = {2e-7}, float[1] m = {-0.5}",
        w=np.float32([1.0, 1e-9]),
    )
    graph = Graph(model)
    lost = lost_constants(graph, Precision.FP16)
    assert set(lost) == {"eps", "scale"}, "a tiny value among large ones is not missed"
    assert lost["eps"].words(Precision.FP16) == "epsilon 1e-12 of eps becomes 0 in FP16"
    # 2e-7 is 3.36 of FP16's smallest steps: rounded to 3, which is off by 11 %.
    assert lost_constants(graph, Precision.BF16) == {}
    assert "of its bits in FP16" in lost["scale"].words(Precision.FP16)


def test_the_largest_constant_has_the_name_of_its_role() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[1, 2, 4] x) => (float[1, 2, 4] y)
    <float[2] s = {1, 1}, float[2] b = {0, 0}, float[2] m = {0, 0}, float[2] v = {9.8e7, 1}> {
        [bn] y = BatchNormalization(x, s, b, m, v)
    }"""
    assert largest_constant(Graph(onnx.parser.parse_model(text)), "bn") == "variance 9.8e+07 of bn"


def test_an_epsilon_that_becomes_zero_is_named(tmp_path: Path) -> None:
    body = """
        [square] q = Mul(x, zero) [guard] g = Add(q, eps) [divide] d = Div(q, g)
        [last] y = Add(d, x)"""
    result = run(parsed(body, constants="float zero = {0}, float eps = {1e-9}"), tmp_path)
    assert result.cause is Cause.UNDERFLOW
    assert "epsilon 1e-09 of guard becomes 0 in FP16" in result.sentence
    assert [c.name for c in result.causes] == [Cause.UNDERFLOW]


def test_values_that_are_too_small_are_named(tmp_path: Path) -> None:
    body = "[small] s = Mul(x, c) [again] t = Mul(s, c) [large] l = Div(t, d) y = Tanh(l)"
    result = run(parsed(body, constants="float c = {1e-3}, float d = {1e-6}"), tmp_path, 1.0)
    assert result.cause is Cause.UNDERFLOW and result.passed
    assert "again" in result.causes[0].layers


def test_two_causes_are_both_named(tmp_path: Path) -> None:
    report = bsroformer_rms()
    result = bisect_trt.bisect(
        report.model, list(report.inputs), runner="emulated", out=tmp_path, robust=0
    )
    assert [c.name for c in result.causes] == [Cause.UNDERFLOW, Cause.OVERFLOW]
    assert "FP16 underflows in" in result.sentence and "FP16 overflows in" in result.sentence
    saved = result.as_json()["causes"]
    assert [c["name"] for c in saved] == ["underflow", "overflow"]
    assert all(c["layers"] and c["sentence"] for c in saved)


def test_a_second_cause_is_named_where_a_reduced_layer_reads_what_is_too_small(
    tmp_path: Path,
) -> None:
    """Random networks with two faults: `tiny` alone in FP32 is rounded to zero again by `back`."""
    body = """
        [up] a = Mul(x, k) [far] b = Mul(a, k) [down] c = Div(b, k) [near] d = Div(c, k)
        [tiny] t = Mul(d, w) [back] e = Mul(t, m) [more] f = Mul(e, m) y = Add(f, d)"""
    constants = "float k = {600}, float w = {1e-9}, float m = {3e4}"
    result = run(parsed(body, constants=constants), tmp_path)
    assert {c.name for c in result.causes} == {Cause.OVERFLOW, Cause.UNDERFLOW}
    (small,) = (c.layers for c in result.causes if c.name is Cause.UNDERFLOW)
    assert "tiny" in small


def test_a_constant_that_becomes_infinite_is_no_rounding(tmp_path: Path) -> None:
    """The output hides it: 0 times infinity is NaN, and NaN is not larger than anything."""
    body = """
        [small] t = Mul(x, a) [large] u = Mul(t, b) [more] c = Greater(u, a)
        [turned] n = Neg(x) y = Where(c, x, n)"""
    model = parsed(body, constants="float a = {4e-9}, float b = {2.5e8}")
    result = run(model, tmp_path)
    assert {c.name for c in result.causes} == {Cause.OVERFLOW, Cause.UNDERFLOW}
    assert "constant 'b' 2.5e+08 of large exceeds FP16's 65,504" in result.sentence


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        ("non-finite", "NaN or infinite values"),
        ("fail", "an output of another shape"),
        ("crashed", "no outputs: the run breaks"),
        ("build-failed", "no outputs: the run breaks"),
    ],
)
def test_why_there_is_no_score(outcome: str, said: str) -> None:
    assert times(float("inf"), outcome) == said
    assert times(1.5, outcome) == "1.5 times the tolerance"


def test_a_factor_is_no_epsilon_and_a_mask_keeps_its_sign() -> None:
    graph = Graph(
        parsed(
            "[unit] a = Mul(x, u) [mask] y = Add(a, m)",
            constants="float u = {1e-9}",
            m=np.float32([-1e9]),
        )
    )
    words = lost_constants(graph, Precision.FP16)["unit"].words(Precision.FP16)
    assert words == "constant 'u' 1e-09 of unit becomes 0 in FP16"
    assert largest_constant(graph, "mask") == "constant 'm' -1e+09 of mask"
