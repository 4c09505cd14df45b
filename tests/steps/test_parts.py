"""Slices and boxes that the outputs do not hold: refused, for every plan would pass."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import bisect_trt
from bisect_trt.base.errors import BadInputError
from fixtures.fixture import waves

MODEL = onnx.parser.parse_model(
    """<ir_version: 8, opset_import: ["" : 17]>
    g (float[1, 6, 5] x) => (float[1, 6, 5] y, float[1, 6, 4] boxes, float[1, 6] scores) <
        int64[1] zero = {0}, int64[1] four = {4}, int64[1] two = {2}, int64[1] last = {-1}
    > {
        y = Tanh(x)
        b = Slice(x, zero, four, two)
        boxes = Abs(b)
        d = Gather<axis = 2>(x, last)
        e = Squeeze(d, two)
        scores = Sigmoid(e)
    }"""
)


@pytest.mark.parametrize(
    ("require", "said"),
    [
        ("y[:,:,90:]:max_abs<=1e-9", "takes nothing of output 'y', which has shape (1, 6, 5)"),
        ("y[5]:max_abs<=1e-9", "takes nothing of output 'y'"),
        ("y[:,:,4:2]:cosine>=0.9", "takes nothing of output 'y'"),
        ("y[:,:,:,0]:max_abs<=1e-3", "takes nothing of output 'y'"),
        ("y[:,:,::0]:max_abs<=1e-3", "is no index or slice"),
        ("box_match(boxes,scores[:,:3])>=0.9", "boxes have shape (1, 6, 4), scores (1, 3)"),
        ("box_match(boxes,scores,boxes[:,:,:2])>=0.9", "and classes (1, 6, 2)"),
        ("box_match(boxes[0:5:0],scores)>=0.9", "'0:5:0' is no index or slice"),
        ("box_match(boxes[:,9:],scores[:,9:])>=0.9", "no box with a score above 0"),
        ("box_match(boxes,scores)<=0.9", "not understood"),
        ("box_match()>=0.9", "not understood"),
    ],
)
def test_what_is_not_there_is_refused(tmp_path: Path, require: str, said: str) -> None:
    with pytest.raises(BadInputError) as refused:
        bisect_trt.bisect(
            MODEL, {"x": waves(1, 1, 6, 5)}, require=require, runner="emulated", out=tmp_path
        )
    assert said in str(refused.value)


def test_one_input_may_be_empty_there(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[n, 4] x) => (float[n, 4] y) { y = Tanh(x) }"""
    )
    inputs = [{"x": waves(n, n, 4)} for n in (2, 6)]
    result = bisect_trt.bisect(
        model, inputs, require="y[4:]:max_abs<=1e-2", runner="emulated", robust=0, out=tmp_path
    )
    assert result.passed and np.isfinite(result.score)
