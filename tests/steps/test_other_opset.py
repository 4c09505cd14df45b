"""A converter that makes another model of an older one is named as a possible reason."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.version_converter
import pytest
from onnx import TensorProto, helper, numpy_helper

import bisect_trt
from bisect_trt.base.outcomes import Cause


def test_a_raised_opset_is_named_where_fp32_misses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BF16 has to raise ``y = x * w``, and the converter gives ``w`` another value."""
    convert = onnx.version_converter.convert_version

    def careless(made: onnx.ModelProto, target: int) -> onnx.ModelProto:
        converted = convert(made, target)
        weight = numpy_helper.from_array(np.float32([1.0, 2.0]), "w")
        converted.graph.initializer[0].CopyFrom(weight)
        return converted

    monkeypatch.setattr(onnx.version_converter, "convert_version", careless)
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "w"], ["y"], name="scale")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])],
        [numpy_helper.from_array(np.float32([1.0, 1.0]), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 12)], ir_version=8)
    result = bisect_trt.bisect(
        model,
        {"x": np.float32([1.0, 1.0])},
        require="max_abs<=1e-1",
        precision="bf16",
        runner="emulated",
        out=tmp_path,
    )
    assert result.cause is Cause.NOT_PRECISION and "raised to opset 13" in result.sentence
