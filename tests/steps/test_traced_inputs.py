"""Which inputs the table of the layers is made from: those on which layers leave the range."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import bisect_trt
from bisect_trt.base.outcomes import Cause

# An L2 norm: where the sum of squares is infinite the quotient is 0, and finite.
MODEL = """<ir_version: 8, opset_import: ["": 17]>
g (float[1, 64] x) => (float[1, 64] y) <int64[1] axis = {1}> {
    [square] s = Mul (x, x)
    [sum] t = ReduceSum (s, axis)
    [root] n = Sqrt (t)
    [quotient] y = Div (x, n)
}"""


def given(total: float) -> dict[str, Any]:
    """An input whose squares sum up to ``total``."""
    values = np.linspace(1.0, 2.0, 64, dtype=np.float32)
    return {"x": (values * np.sqrt(total / np.sum(values**2)))[None].astype(np.float32)}


@pytest.mark.parametrize("order", sorted(set(permutations(("low", "low", "high")))))
def test_overflow_that_an_output_hides_is_found_on_any_input(
    order: tuple[str, ...], tmp_path: Path
) -> None:
    totals = {"low": 30_000.0, "high": 70_000.0}
    inputs = [given(totals[kind] + place) for place, kind in enumerate(order)]
    common: dict[str, Any] = {"runner": "emulated", "robust": 0}
    model = onnx.parser.parse_model(MODEL)
    found = bisect_trt.bisect(model, inputs, require="rel_range<=1e-2", out=tmp_path, **common)
    assert found.cause is Cause.OVERFLOW and found.passed
    assert set(found.pinned) == {"sum", "root"}
    table = found.layers.set_index("layer")
    assert not table.loc["sum", "introduced_finite"] and table.loc["sum", "ref_max"] > 65_504
    loose = bisect_trt.bisect(model, inputs, require="max_abs<=1", out=tmp_path / "loose", **common)
    assert loose.cause is Cause.NONE
    told = [f.message for f in loose.findings if f.kind == "overflow-lost"]
    assert told and "sum" in told[0]


def test_of_many_inputs_those_are_traced_that_show_more(tmp_path: Path) -> None:
    """And a repeated command asks no network again."""
    inputs = [given(20_000.0 + place) for place in range(12)]
    inputs[5] = given(80_000.0)
    model = onnx.parser.parse_model(MODEL)
    found = [
        bisect_trt.bisect(
            model, inputs, require="max_abs<=1", runner="emulated", robust=0, out=tmp_path
        )
        for _ in range(2)
    ]
    for result in found:
        assert [f.where for f in result.findings if f.kind == "overflow-lost"] == ["sum"]
    assert found[1].new_evaluations == 0 and found[1].layers.equals(found[0].layers)
