"""The table of the layers' errors."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bisect_trt.base.errors import RunnerFailedError
from bisect_trt.base.interrupt import Observer
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
