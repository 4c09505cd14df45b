"""A converter that makes another model of an older one is named, whichever input shows it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.version_converter
import pytest
from onnx import TensorProto, helper, numpy_helper

import bisect_trt
from bisect_trt.base.errors import BadInputError

LARGEST = "import numpy\ndef largest(a, b):\n    return max(float(abs(x['y'] - y['y']).max()) for "
LARGEST += "x, y in zip(a, b))\n"
HIDES, SHOWS = np.float32([1.0, 0.0]), np.float32([1.0, 1.0])


def model() -> onnx.ModelProto:
    """``y = x * w``, of an opset that BF16 has to raise."""
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "w"], ["y"], name="scale")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])],
        [numpy_helper.from_array(np.float32([1.0, 1.0]), "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 12)], ir_version=8)


@pytest.fixture
def careless(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX's converter, and a weight of its model is another one."""
    convert: Callable[[onnx.ModelProto, int], onnx.ModelProto] = (
        onnx.version_converter.convert_version
    )

    def other(made: onnx.ModelProto, target: int) -> onnx.ModelProto:
        converted = convert(made, target)
        weight = numpy_helper.from_array(np.float32([1.0, 2.0]), "w")
        converted.graph.initializer[0].CopyFrom(weight)
        return converted

    monkeypatch.setattr(onnx.version_converter, "convert_version", other)


@pytest.mark.usefixtures("careless", "few_draws")
@pytest.mark.parametrize("inputs", [[SHOWS], [HIDES, SHOWS], [HIDES, HIDES, SHOWS, HIDES]])
@pytest.mark.parametrize("requirement", ["max_abs<=1e-1", "largest<=1e-1"])
def test_the_converter_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    inputs: list[np.ndarray[tuple[int], np.dtype[np.float32]]],
    requirement: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "all_at_once.py").write_text(LARGEST)
    own = {"metrics": ["all_at_once:largest@all"]} if "largest" in requirement else {}
    with pytest.raises(BadInputError, match="ONNX's converter made another model of opset 12"):
        bisect_trt.bisect(
            model(),
            [{"x": x} for x in inputs],
            require=requirement,
            precision="bf16",
            runner="emulated",
            out=tmp_path / "out",
            **own,
        )
