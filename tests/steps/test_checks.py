"""Requirements that every plan meets are refused, and only those."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import bisect_trt
from bisect_trt.base.errors import BadInputError
from fixtures.build import GraphBuilder

SINGLE = "of a single value the cosine sees the sign alone"
RANDOM = np.random.default_rng(0)


def classifier() -> onnx.ModelProto:
    """Probabilities and the class that they choose."""
    build = GraphBuilder(0)
    logits = build.op("MatMul", "x", build.normal(32, 10))
    chosen = build.op("ArgMax", logits, axis=1, keepdims=0)
    sure = build.op("Greater", build.op("Softmax", logits, axis=1), build.weight(0.1))
    outputs = {chosen: ([1], np.int64), sure: ([1, 10], np.bool_)}
    model = build.model({"x": [1, 32]}, {logits: [1, 10]})
    for name, (shape, dtype) in outputs.items():
        kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, kind, shape))
    return model


def test_ids_and_truth_values_are_compared_and_not_chosen_among(tmp_path: Path) -> None:
    """Refused as always true, for 'class_id' has one value: its top 1 is the same class."""
    model = classifier()
    logits, chosen, sure = (o.name for o in model.graph.output)
    given = {"x": RANDOM.normal(size=(1, 32)).astype(np.float32)}
    asked = [f"{chosen}:top1>=1", f"{sure}:top10>=0.5", f"{logits}:top9>=1"]
    result = bisect_trt.bisect(model, given, require=asked, robust=0, out=tmp_path)
    assert result.passed
    with pytest.raises(BadInputError, match=f"top10>=1.: always true.*{logits}.*has 10;"):
        bisect_trt.bisect(model, given, require=f"{logits}:top10>=1", out=tmp_path / "refused")


@pytest.mark.parametrize(("channels", "refused"), [(1, True), (2, False)])
@pytest.mark.parametrize("rank", [2, 4])
def test_an_argmax_of_one_channel_is_refused(
    rank: int, channels: int, refused: bool, tmp_path: Path
) -> None:
    """A binary segmentation "met the requirement as it is", whatever its logits were."""
    build = GraphBuilder(0)
    if rank == 4:
        shape, kernel = [1, 3, 4, 4], build.normal(channels, 3, 1, 1)
        made = build.op("Conv", "x", kernel)
        model = build.model({"x": shape}, {made: [1, channels, 4, 4]})
    else:
        shape = [1, 8]
        made = build.op("MatMul", "x", build.normal(8, channels))
        model = build.model({"x": shape}, {made: [1, channels]})
    given = {"x": RANDOM.normal(size=shape).astype(np.float32)}

    def run() -> bisect_trt.Result:
        return bisect_trt.bisect(model, given, require="argmax>=1", out=tmp_path, robust=0)

    if not refused:
        assert run().requirements == ("argmax>=1",)
        return
    with pytest.raises(BadInputError, match=r"argmax>=1.: always true.*has 1;"):
        run()


def test_the_cosine_of_single_values_is_refused_for_a_batch_of_one(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[n,8] x) => (float[n,1] y) {
        y = ReduceMean<axes = [1], keepdims = 1>(x) }"""
    )
    one, three = (RANDOM.normal(size=(n, 8)).astype(np.float32) for n in (1, 3))
    with pytest.raises(BadInputError, match=SINGLE):
        bisect_trt.bisect(model, [{"x": one}, {"x": -one}], require="cosine>=0.9", out=tmp_path)
    several = [{"x": one}, {"x": three}]
    assert bisect_trt.bisect(model, several, require="cosine>=0.9", out=tmp_path, robust=0).passed
