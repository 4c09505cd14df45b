"""What is told of a layer needs no more memory than its row, once all is seen."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from bisect_trt.metrics.errors import channel_peaks, quartiles
from bisect_trt.model.layers import Layer
from bisect_trt.runners.node_by_node import LayerValues
from bisect_trt.steps.layer_errors import _Found, _Measured


def test_channels_peaks_are_over_samples_and_tensors_and_are_let_go() -> None:
    random = np.random.default_rng(0)
    names, samples, tensors = ("a", "b", "c"), 2, 2
    shape = (samples, len(names), tensors, 3, 50)
    values = random.standard_normal(shape).astype(np.float32)
    found = _Found(samples)
    held = []
    with ThreadPoolExecutor(1) as pool:
        for number in range(samples):
            for place, name in enumerate(names):
                for array in values[number, place]:
                    layer = LayerValues(name, name, array, array, array)
                    found.add(number, _Measured(pool, layer, -1))
                    held.append(len(found._peaks))
                    assert len(found._accumulated) == len(found._introduced) == held[-1]
    assert held == [1, 1, 2, 2, 3, 3, 3, 3, 2, 2, 1, 1]
    columns = found.columns(layers(*names))
    assert not found._accumulated and not found._rows
    for place in range(len(names)):
        peaks = channel_peaks(values[:, place].reshape(-1, 50), -1)
        row = {what: column[place] for what, column in columns.items()}
        assert row.items() >= vars(quartiles(peaks)).items()


def test_a_layer_without_a_row_is_a_row_of_what_is_not_known() -> None:
    found = _Found(1)
    values = np.float32([1.0, 2.0])
    with ThreadPoolExecutor(1) as pool:
        layer = LayerValues("/a/2", "/a/2", values, values, values + np.float32(0.5))
        found.add(0, _Measured(pool, layer, -1))
    columns = found.columns(layers("/a/1", "/a/2", "/a/3"))
    assert columns["finite"] == [False, True, False]
    assert columns["underflows"] == [False] * 3
    for what, value in (("elements", 2), ("introduced_max_abs", 0.5), ("max_abs", 0.0)):
        assert np.array_equal(columns[what], [np.nan, value, np.nan], equal_nan=True), what
    assert set(map(len, columns.values())) == {3}


def layers(*names: str) -> list[Layer]:
    return [
        Layer(name, "Add", place, ("y",), ("x",), frozenset()) for place, name in enumerate(names)
    ]
