"""What TensorRT computes otherwise than the model says, and converters that change a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.version_converter
import pytest
from onnx import numpy_helper

import bisect_trt
from bisect_trt.base.errors import BadInputError
from tests.networks import parsed

X = np.linspace(-1.0, 1.0, 64, dtype=np.float32).reshape(8, 8).T.copy()


def run(
    body: str, out: Path, scale: float = 1.0, shape: str = "8,n", **options: Any
) -> bisect_trt.Result:
    model = parsed(body, "float[8, 8] x", f"float[{shape}] y")
    chosen = {"require": "max_abs<=1", "runner": "emulated", "robust": 0, "out": out, **options}
    return bisect_trt.bisect(model, {"x": X * np.float32(scale)}, **chosen)


def told(result: bisect_trt.Result) -> dict[str, str]:
    return {f.kind: f.message for f in result.findings if f.weighty}


@pytest.mark.parametrize(
    ("op", "near", "far", "why"),
    [
        ("LogSoftmax<axis = 1>", 5.0, 15.0, "-inf"),
        ("ReduceLogSumExp<axes = [1]>", 5.0, 15.0, "the sum"),
        ("LpNormalization<axis = 1, p = 2>", 200.0, 300.0, "the square of 300"),
    ],
)
def test_steps_between_that_leave_fp16(
    op: str, near: float, far: float, why: str, tmp_path: Path
) -> None:
    """Called validated, and an engine gives infinities: it computes the steps in FP16 one by
    one."""
    body = f"n = Neg(x) y = {op}(n)"
    inside = run(body, tmp_path / "near", near)
    assert inside.pinned == []
    outside = run(body, tmp_path / "far", far)
    (found,) = (f for f in outside.findings if f.kind == "held")
    assert why in found.message and found.message.endswith("it is kept in FP32")
    assert outside.passed and outside.pinned == [found.where]
    low = run(body, tmp_path / "low", far, keep_reduced=[found.where])
    assert why in told(low)["written-out"] and low.pinned == []
    assert run(body, tmp_path / "bf16", far, precision="bf16").pinned == []


def test_double_precision_is_fp32_on_an_engine(tmp_path: Path) -> None:
    """x + 1e9 - 1e9 is x in double and next to nothing in FP32: "nothing to pin", it said."""
    body = """
        large = Constant<value = double {1e9}>()
        d = Cast<to = 11>(x)
        a = Add(d, large)
        s = Sub(a, large)
        f = Cast<to = 1>(s)
        y = Neg(f)
    """
    assert "2 nodes compute in double" in told(run(body, tmp_path))["double-precision"]
    shapes = """
        s = Shape(x)
        d = Cast<to = 11>(s)
        h = Add(d, d)
        f = Floor(h)
        i = Cast<to = 7>(f)
        n = Neg(x)
        y = Tile(n, i)
    """
    few = run(shapes, tmp_path / "shapes", 1.0, "m,n")
    assert "double-precision" not in told(few)


LARGEST = "import numpy\ndef largest(a, b):\n    return max(float(abs(x['y'] - y['y']).max()) for "
LARGEST += "x, y in zip(a, b))\n"
HIDES, SHOWS = np.float32([1.0, 0.0]), np.float32([1.0, 1.0])


def model() -> onnx.ModelProto:
    """``y = x * w``, of an opset that BF16 has to raise."""
    weight = np.float32([1.0, 1.0])
    return parsed("[scale] y = Mul(x, w)", "float[2] x", "float[2] y", opset=12, w=weight)


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
