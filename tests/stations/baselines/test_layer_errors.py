"""What is told of a layer's channels needs no more memory than one layer's, once all is seen."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from bisect_trt.numerics.errors.channel_peaks import channel_peaks, quartiles
from bisect_trt.runners.emulator.by_node.node_by_node import LayerValues
from bisect_trt.stations.baselines.layer_errors import _Found, _Measured


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
    assert held == [1, 1, 2, 2, 3, 3, 3, 3, 2, 2, 1, 1]
    rows = found.rows()
    for place, name in enumerate(names):
        peaks = channel_peaks(values[:, place].reshape(-1, 50), -1)
        assert rows[name].items() >= vars(quartiles(peaks)).items()
