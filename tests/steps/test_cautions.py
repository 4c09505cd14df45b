"""What TensorRT computes otherwise than the model says is told of where no engine judges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

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


def test_the_cosine_of_single_values_is_no_requirement(tmp_path: Path) -> None:
    body = "m = ReduceMean<axes = [0, 1], keepdims = 1>(x) y = Neg(m)"
    with pytest.raises(BadInputError, match="of a single value the cosine sees the sign alone"):
        run(body, tmp_path, shape="1,1", require="cosine>=0.999")
    # Of what a detector finds there may be one, or none.
    assert run(body, tmp_path, shape="1,found", require="cosine>=0.999").passed
