"""The table of the layers' errors, and the inputs that it is made from."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

import bisect_trt
from bisect_trt.base.errors import RunnerFailedError
from bisect_trt.base.interrupt import Observer
from bisect_trt.base.outcomes import Cause
from bisect_trt.metrics.errors import channel_peaks, quartiles
from bisect_trt.runners.node_by_node import LayerValues
from bisect_trt.settings import Settings
from bisect_trt.steps.context import open_context
from bisect_trt.steps.layer_errors import trace_layers
from bisect_trt.steps.problem import load
from fixtures.models import residual


def table_of(
    traced: dict[str, list[LayerValues]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """The table where the emulator gives ``traced`` of each sample, and then breaks."""
    fixture = residual()
    given = [{n: a * np.float32(1 + k) for n, a in fixture.inputs.items()} for k in (0, 1)]
    settings = Settings(fixture.model, given, require=[fixture.require], out=folder)
    problem = load(settings, Observer())

    def trace(sample: Any, _: Any) -> Any:
        yield from traced[sample.name]
        raise RunnerFailedError("a rounded index out of range")

    with open_context(problem, Observer()) as context:
        monkeypatch.setattr(context, "emulator", SimpleNamespace(trace=trace))
        return trace_layers(problem, context, problem.samples[: len(traced)])


def test_channels_peaks_are_over_samples_and_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.random.default_rng(0).standard_normal((2, 2, 3, 50)).astype(np.float32)
    name = residual().model.graph.node[0].name
    of = [[LayerValues(name, name, array, array, array) for array in arrays] for arrays in values]
    traced = {"sample 0": of[0], "sample 1": of[1]}
    row = table_of(traced, tmp_path, monkeypatch).iloc[0]
    peaks = channel_peaks(values.reshape(-1, 50), -1)
    assert dict(row).items() >= vars(quartiles(peaks)).items()


def test_a_layer_without_a_row_is_a_row_of_what_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.float32([1.0, 2.0])
    name = residual().model.graph.node[1].name
    layer = LayerValues(name, name, values, values, values + np.float32(0.5))
    table = table_of({"sample 0": [layer]}, tmp_path, monkeypatch)
    assert list(table["layer"])[1] == name
    assert list(table["finite"])[:3] == [False, True, False] and not table["underflows"].any()
    for what, value in (("elements", 2), ("introduced_max_abs", 0.5), ("max_abs", 0.0)):
        assert np.array_equal(table[what][:3], [np.nan, value, np.nan], equal_nan=True), what


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
    common: dict[str, Any] = {"runner": "emulated", "robust": 0, "repair": "none"}
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
