"""What an answer does on an input of zeros, where an epsilon vanishes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import bisect_trt
from fixtures.build import GraphBuilder
from tests.copies import EIGHT


def loud(number: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(number)
    return {"x": random.normal(size=(1, 4, 16)).astype(np.float32)}


def two_norms(epsilon: float, size: float = 1.0) -> onnx.ModelProto:
    """A product of about ``size``, then RMS norms, written out, and weights of usual size."""
    builder = GraphBuilder(3, opset=17)
    x = builder.op("MatMul", "x", builder.normal(16, 16, scale=size))
    for _ in range(2):
        mean = builder.op("ReduceMean", builder.op("Mul", x, x), axes=[-1], keepdims=1)
        root = builder.op("Sqrt", builder.op("Add", mean, builder.weight(epsilon)))
        x = builder.op("MatMul", builder.op("Div", x, root), builder.normal(16, 16))
    builder.rename_output(x, "y")
    return builder.model({"x": [1, 4, 16]}, {"y": [1, 4, 16]})


@pytest.mark.parametrize("size", [1.0, 1000.0])
def test_an_answer_without_numbers_on_zeros_says_so_or_guards_them(
    size: float, tmp_path: Path
) -> None:
    model = two_norms(1e-12, size)
    result = bisect_trt.bisect(
        model,
        [loud(n) for n in range(10)],
        runner="emulated",
        out=tmp_path,
        limits=EIGHT,
    )
    assert result.passed
    blank = bisect_trt.verify(
        model, {"x": np.zeros((1, 4, 16), np.float32)}, tmp_path / "plan.json", runner="emulated"
    )
    found = [finding for finding in result.findings if finding.kind == "blank-input"]
    assert blank.passed != bool(found)
    if size > 1.0:  # the squares overflow, so the graph is repaired and its guard stays
        assert result.is_repaired and not found
    else:
        assert "zeros" in result.sentence or "zeros" in repr(result)


def test_an_epsilon_that_fp16_holds_needs_no_word(tmp_path: Path) -> None:
    result = bisect_trt.bisect(
        two_norms(1e-5),
        [loud(n) for n in range(4)],
        runner="emulated",
        out=tmp_path,
        limits=EIGHT,
    )
    assert not any(finding.kind == "blank-input" for finding in result.findings)
