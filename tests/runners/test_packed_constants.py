"""Weights with several values to a byte are the same numbers however a plan is emulated."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.runners.emulator import EmulatedRunner
from tests.conftest import run_model

X = {"x": np.ones(63, np.float32)}


def quantised(kind: str) -> onnx.ModelProto:
    """x times 63 weights of type ``kind``, an odd number of them."""
    signed, bits = not kind.startswith("U"), 2 if kind.endswith("2") else 4
    least, most = (-(2 ** (bits - 1)), 2 ** (bits - 1)) if signed else (0, 2**bits)
    values = np.random.default_rng(0).integers(least, most, 63)
    elem_type = getattr(TensorProto, kind)
    weight = helper.make_tensor("q", elem_type, [63], [int(v) for v in values])
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [
            helper.make_node("DequantizeLinear", ["q", "s"], ["w"], "dequantise"),
            helper.make_node("Mul", ["x", "w"], ["y"], "mul"),
        ],
        "g",
        [info("x", TensorProto.FLOAT, [63])],
        [info("y", TensorProto.FLOAT, [63])],
        [weight, numpy_helper.from_array(np.float32(1), "s")],
    )
    opset = 25 if bits == 2 else 21
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=12)


@pytest.mark.parametrize("kind", ["INT4", "UINT4", "INT2", "UINT2"])
def test_packed_weights_are_read_as_they_are_packed(kind: str) -> None:
    """Node by node two weights were read as one, and the layers' errors were those of noise."""
    if not hasattr(TensorProto, kind):
        pytest.skip("this onnx has no such type")
    model = quantised(kind)
    try:
        (expected,) = run_model(model, X)
    except Exception as error:
        pytest.skip(f"this ONNX Runtime does not run it: {error}")
    emulator, sample = EmulatedRunner(model, Precision.FP16), Sample("s", X)
    plan = PrecisionPlan("fp16")
    (switched,) = emulator.outputs(plan, [sample])
    traced = next(t for t in emulator.trace(sample, plan) if t.tensor == "y")
    for found in (
        switched["y"],
        traced.reference,
    ):
        np.testing.assert_array_equal(found, expected)
