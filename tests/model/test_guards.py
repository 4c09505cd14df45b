"""NaN and infinities: which of ONNX Runtime's kernels swallow them, held against ONNX's reference
evaluator, and that the emulated model puts them back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import bisect_trt
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.graph import to_emulated
from bisect_trt.model.emulated import LOST, SWALLOWING
from bisect_trt.model.graph import Graph
from bisect_trt.runners.emulator import EmulatedRunner
from fixtures.reports import gru_nan
from tests.conftest import run_model

FP32, FP16 = PrecisionPlan(Precision.FP32), PrecisionPlan(Precision.FP16)
Array = NDArray[Any]
RANDOM = np.random.default_rng(3)


@dataclass(frozen=True)
class Kernel:
    """One operator on ``x``: the other inputs are constants, None where one is left out."""

    op: str
    x: Array
    others: tuple[Array | None, ...] = ()
    outputs: int = 1
    opset: int = 17
    attributes: dict[str, Any] = field(default_factory=dict)

    def model(self) -> onnx.ModelProto:
        names = ["x", *("" if a is None else f"c{i}" for i, a in enumerate(self.others))]
        made = [f"y{i}" for i in range(self.outputs)]
        node = helper.make_node(self.op, names, made, "it", **self.attributes)
        kind = helper.np_dtype_to_tensor_dtype(self.x.dtype)
        weights = [
            numpy_helper.from_array(a, f"c{i}") for i, a in enumerate(self.others) if a is not None
        ]
        graph = helper.make_graph(
            [node],
            "g",
            [helper.make_tensor_value_info("x", kind, self.x.shape)],
            [onnx.ValueInfoProto(name=name) for name in made],
            weights,
        )
        opsets = [helper.make_opsetid("", self.opset)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def with_bad(shape: tuple[int, ...], value: float) -> Array:
    x = RANDOM.normal(size=shape).astype(np.float32)
    x.flat[x.size // 2 + 5] = value
    return x


def lost_by(kernel: Kernel, model: onnx.ModelProto) -> tuple[int, int]:
    """How many values of the first output are not finite by ONNX Runtime and by the reference; of
    integers, how many are the place of the NaN.
    """
    got = run_model(model, {"x": kernel.x})[0]
    right = ReferenceEvaluator(kernel.model()).run(None, {"x": kernel.x})[0]
    if got.dtype.kind != "f":
        return int(np.count_nonzero(got == LOST)), int(np.count_nonzero(got != right))
    return int(np.count_nonzero(~np.isfinite(got))), int(np.count_nonzero(~np.isfinite(right)))


def recurrent(op: str, gates: int, value: float, *, bias: bool = True) -> Kernel:
    hidden, width = 4, 5
    weights = [
        RANDOM.normal(size=(1, gates * hidden, width)),
        RANDOM.normal(size=(1, gates * hidden, hidden)),
        RANDOM.normal(size=(1, 2 * gates * hidden)),
    ]
    made = tuple(w.astype(np.float32) for w in weights[: 3 if bias else 2])
    return Kernel(op, with_bad((6, 2, width), value), made, 2, attributes={"hidden_size": hidden})


IMAGE, ROWS = (1, 4, 8, 8), (4, 33)
NAN, INF = float("nan"), float("inf")

SWALLOWED = {
    "LSTM with a bias": recurrent("LSTM", 4, NAN),
    "GRU with a bias": recurrent("GRU", 3, NAN),
    "GlobalMaxPool": Kernel("GlobalMaxPool", with_bad(IMAGE, NAN)),
    "ReduceMax": Kernel("ReduceMax", with_bad(ROWS, NAN), attributes={"axes": [1]}),
    "ReduceMax of all": Kernel("ReduceMax", with_bad(ROWS, NAN)),
    "ReduceMax, opset 18": Kernel("ReduceMax", with_bad(ROWS, NAN), (np.array([1]),), opset=18),
    "ReduceMin": Kernel("ReduceMin", with_bad(ROWS, NAN), attributes={"axes": [1]}),
    "ArgMax": Kernel("ArgMax", with_bad(ROWS, NAN), attributes={"axis": 1}),
    "ArgMin": Kernel("ArgMin", with_bad(ROWS, NAN), attributes={"axis": 1, "keepdims": 0}),
    **{
        f"{op}, opset {opset}": Kernel(op, with_bad(shape, NAN), opset=opset, attributes=how)
        for opset in (7, 8)
        for op, shape, how in (
            ("GlobalMaxPool", IMAGE, {}),
            ("ReduceMax", ROWS, {"axes": [1]}),
            ("ReduceMin", ROWS, {"axes": [1]}),
            ("ArgMax", ROWS, {"axis": 1}),
            ("ArgMin", ROWS, {"axis": 1}),
        )
    },
    "ArgMax, opset 18": Kernel("ArgMax", with_bad(ROWS, NAN), attributes={"axis": 1}, opset=18),
    "Clip from below": Kernel("Clip", with_bad(ROWS, INF), (np.float32(0),)),
    "Clip from above": Kernel("Clip", with_bad(ROWS, -INF), (None, np.float32(0))),
}
"""What ONNX Runtime makes finite, and the reference evaluator does not."""

KEPT = {
    "RNN": recurrent("RNN", 1, NAN),
    "LSTM without a bias": recurrent("LSTM", 4, NAN, bias=False),
    **{
        f"{op} of {value}": Kernel(op, with_bad(ROWS, value))
        for op in ("Relu", "LeakyRelu", "Sigmoid", "Tanh", "HardSwish", "Softmax", "LogSoftmax")
        for value in (NAN, INF, -INF)
    },
    "Clip": Kernel("Clip", with_bad(ROWS, NAN), (np.float32(0), np.float32(6))),
    "Min": Kernel("Min", with_bad(ROWS, NAN), (np.float32(0),)),
    "Max": Kernel("Max", with_bad(ROWS, NAN), (np.float32(0),)),
    "Max of -inf": Kernel("Max", with_bad(ROWS, -INF), (np.float32(0),)),
    "TopK": Kernel("TopK", with_bad(ROWS, NAN), (np.array([5]),), 2),
    "TopK of inf": Kernel("TopK", with_bad(ROWS, INF), (np.array([5]),), 2),
    "ReduceMax of inf": Kernel("ReduceMax", with_bad(ROWS, INF), attributes={"axes": [1]}),
    "MaxPool of inf": Kernel("MaxPool", with_bad(IMAGE, INF), attributes={"kernel_shape": [2, 2]}),
}
"""What both make of it alike."""


@pytest.mark.parametrize("name", SWALLOWED)
def test_what_a_kernel_swallows_is_put_back(name: str) -> None:
    kernel = SWALLOWED[name]
    assert kernel.op in SWALLOWING
    plain, right = lost_by(kernel, kernel.model())
    assert right > 0 and plain < right, "the kernel keeps it by now: no guard is needed"
    assert lost_by(kernel, to_emulated(kernel.model(), FP32))[0] >= right
    assert lost_by(kernel, to_emulated(kernel.model(), FP16))[0] >= right
    runner = EmulatedRunner(kernel.model())
    outputs = next(iter(runner.outputs(FP16, [Sample("x", {"x": kernel.x})])))["y0"]
    bad = outputs == LOST if outputs.dtype.kind == "i" else ~np.isfinite(outputs)
    assert np.count_nonzero(bad) >= right, "by the emulator that searches, too"


@pytest.mark.parametrize("name", KEPT)
def test_what_kernels_keep_needs_no_guard(name: str) -> None:
    kernel = KEPT[name]
    plain, right = lost_by(kernel, kernel.model())
    assert plain == right
    if kernel.op not in SWALLOWING - {"ReduceMax", "MaxPool", "Clip"}:
        assert lost_by(kernel, to_emulated(kernel.model(), FP32))[0] == plain


@pytest.mark.parametrize("op", ["Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal"])
def test_comparisons_with_nan_are_false(op: str) -> None:
    kernel = Kernel(op, with_bad(ROWS, NAN), (np.float32(0),))
    right = ReferenceEvaluator(kernel.model()).run(None, {"x": kernel.x})[0]
    got = run_model(to_emulated(kernel.model(), FP32), {"x": kernel.x})[0]
    np.testing.assert_array_equal(got, right)


@pytest.mark.parametrize("name", SWALLOWED)
def test_of_finite_values_a_guard_changes_nothing(name: str) -> None:
    kernel = SWALLOWED[name]
    x = {"x": RANDOM.normal(size=kernel.x.shape).astype(np.float32)}
    for got, right in zip(
        run_model(to_emulated(kernel.model(), FP32), x), run_model(kernel.model(), x), strict=True
    ):
        np.testing.assert_array_equal(got, right)


def test_max_pool_loses_a_nan_between_windows() -> None:
    """The reference evaluator's own pool is no judge; NumPy's maximum is."""
    x = np.zeros((1, 1, 8, 8), np.float32)
    x[0, 0, 3, 3] = NAN
    attributes = {"kernel_shape": [3, 3], "strides": [2, 2]}
    kernel = Kernel("MaxPool", x, attributes=attributes)
    right = np.lib.stride_tricks.sliding_window_view(x[0, 0], (3, 3))[::2, ::2].max((2, 3))
    got = run_model(to_emulated(kernel.model(), FP32), {"x": x})[0][0, 0]
    np.testing.assert_array_equal(np.isnan(got), np.isnan(right))
    assert np.isnan(run_model(kernel.model(), {"x": x})[0]).sum() < np.isnan(right).sum()


def test_infinities_that_reach_a_gate_count_too() -> None:
    for op, gates in (("LSTM", 4), ("GRU", 3)):
        kernel = recurrent(op, gates, INF)
        assert np.isnan(run_model(to_emulated(kernel.model(), FP32), {"x": kernel.x})[0]).any()


def half_by_numpy(model: onnx.ModelProto, inputs: dict[str, Array]) -> dict[str, Array]:
    """Every node by ONNX's reference evaluator, what it reads and gives rounded to float16 by
    NumPy: no part of the product.
    """

    def half(a: Array) -> Array:
        with np.errstate(over="ignore"):
            return a.astype(np.float16).astype(np.float32) if a.dtype == np.float32 else a

    known = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer} | inputs
    for node in model.graph.node:
        read = [n for n in node.input if n]
        kinds = [helper.np_dtype_to_tensor_dtype(known[n].dtype) for n in read]
        graph = helper.make_graph(
            [node],
            "one",
            [
                helper.make_tensor_value_info(n, kind, known[n].shape)
                for n, kind in dict(zip(read, kinds, strict=True)).items()
            ],
            [onnx.ValueInfoProto(name=o) for o in node.output if o],
        )
        one = helper.make_model(graph, opset_imports=model.opset_import)
        with np.errstate(all="ignore"):
            found = ReferenceEvaluator(one).run(None, {n: half(known[n]) for n in read})
        known |= {n: half(a) for n, a in zip(filter(None, node.output), found, strict=True)}
    return {o.name: known[o.name] for o in model.graph.output}


def test_a_gru_that_reads_nan_is_a_non_finite_verdict(tmp_path: Path) -> None:
    report = gru_nan()
    for inputs in report.inputs[:3]:
        assert np.isnan(half_by_numpy(report.model, inputs)["probs"]).all(), "by NumPy alone"
    result = bisect_trt.bisect(
        report.model, list(report.inputs), runner="emulated", out=tmp_path, robust=0, repair="none"
    )
    verdicts = result.outputs.set_index("baseline")["outcome"]
    assert verdicts["fp16"] == "non-finite" and verdicts["fp32"] == "pass"
    assert result.cause.value == "overflow" and set(result.pinned) == report.layers


HARMLESS = {
    # Mish written out: the exponential is infinite, its logarithm too, and tanh of that is 1.
    "mish": """
        e = Exp(x) one = Constant<value = float {1}>() s = Add(e, one)
        l = Log(s) t = Tanh(l) y = Mul(x, t)""",
    # A branch that is discarded where it is infinite.
    "where": """
        e = Exp(x) limit = Constant<value = float {10}>() c = Greater(x, limit)
        y = Where(c, x, e)""",
}


@pytest.mark.parametrize("name", HARMLESS)
def test_infinities_that_are_bounded_or_discarded_are_harmless(name: str, tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float[1, 64] x) => (float[1, 64] y) {{ {HARMLESS[name]} }}"""
    )
    x = {"x": np.linspace(-3.0, 14.0, 64, dtype=np.float32)[None]}
    result = bisect_trt.bisect(model, x, runner="emulated", out=tmp_path, robust=0)
    assert result.cause.value == "none" and result.pinned == []
    (told,) = (f.message for f in result.findings if f.kind == "left-overflowing")
    assert "harmless on these inputs" in told
    assert np.isfinite(half_by_numpy(model, x)["y"]).all()


def test_bodies_are_guarded() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[2, 3] x, bool c) => (float[2, 1] y) {
            y = If(c) <
                then_branch = a () => (float[2, 1] p) { p = ReduceMax<axes = [1]>(x) },
                else_branch = b () => (float[2, 1] q) { q = ReduceMin<axes = [1]>(x) }
            >
        }"""
    )
    emulated = to_emulated(Graph(model), FP32)
    for chosen in (True, False):
        feeds = {"x": np.float32([[1, NAN, 2], [3, 4, 5]]), "c": np.array(chosen)}
        got = run_model(emulated, feeds)[0]
        assert np.isnan(got[0]).all() and np.isfinite(got[1]).all()


def test_an_integer_made_of_nan_is_not_finite() -> None:
    from bisect_trt.metrics.errors import tensor_error

    right = np.array([1, 2, 3])
    assert not tensor_error(right, np.array([1, LOST, 3])).finite
    assert tensor_error(np.array([1, LOST, 3]), np.array([1, LOST, 3])).finite
    assert helper.np_dtype_to_tensor_dtype(right.dtype) == TensorProto.INT64


def test_a_pool_of_minus_infinities_gives_one() -> None:
    """Found by random networks: ONNX Runtime's begins with the lowest number, and gives that."""
    x = RANDOM.standard_normal((1, 2, 3, 4)).astype(np.float32)
    x[0, 1] = -np.inf
    model = Kernel("GlobalMaxPool", x).model()
    assert np.isfinite(run_model(model, {"x": x})[0]).all(), "the kernel hides it"
    found = run_model(to_emulated(model, FP32), {"x": x})[0].reshape(2)
    assert found[0] == x[0, 0].max() and found[1] == -np.inf


def quantised(kind: type[np.generic], opset: int) -> onnx.ModelProto:
    """A quantisation to ``kind`` and back; an overflow makes some of what it reads NaN in FP16."""
    return onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : {opset}]>
        g (float[8] x) => (float[8] y)
        <float big = {{6e4}}, float three = {{0.75}}, float small = {{1e-4}}, float step = {{0.04}},
        {kind.__name__} zero = {{0}}> {{
            far = Mul(x, big) part = Mul(far, three) near = Sub(far, part) z = Mul(near, small)
            q = QuantizeLinear(z, step, zero)
            y = DequantizeLinear(q, step, zero)
        }}""")


@pytest.mark.parametrize("opset", [10, 13, 21])
@pytest.mark.parametrize("kind", [np.int8, np.uint8])
def test_a_quantised_nan_is_one_again(kind: type[np.generic], opset: int) -> None:
    """ONNX Runtime gives the lowest integer, which is near zero for uint8, and others zero."""
    model = quantised(kind, opset)
    x = np.float32([0.1, 0.5, 1.0, 1.6, 0.0, 0.3, 0.7, 5.0])
    expected = np.where(x * np.float32(4.5e4) > 65504, np.nan, run_model(model, {"x": x})[0])
    assert np.isnan(expected).any() and np.isfinite(run_model(model, {"x": x})[0]).all()
    np.testing.assert_array_equal(
        run_model(to_emulated(model, FP32), {"x": x}), run_model(model, {"x": x})
    )
    found = run_model(to_emulated(model, FP16), {"x": x})[0]
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    runner = EmulatedRunner(model)
    outputs = next(iter(runner.outputs(FP16, [Sample("x", {"x": x})])))["y"]
    np.testing.assert_array_equal(np.isnan(outputs), np.isnan(expected))
