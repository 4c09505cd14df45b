"""Outputs that are another or are not."""

from __future__ import annotations

import onnx

from bisect_trt.model.graph import Graph
from bisect_trt.model.outputs import decided_outputs

MODEL = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[2, 8] x, int64[2] given)
  => (float[2, 4] logits, int64[2, 1] best, bool[2, 4] mask, int64[2] size, int64[2] ids)
<float[8, 4] w = {0.1, 0.2, 0.3, 0.4, 0.1, 0.2, 0.3, 0.4, 0.1, 0.2, 0.3, 0.4, 0.1, 0.2, 0.3, 0.4,
                  0.1, 0.2, 0.3, 0.4, 0.1, 0.2, 0.3, 0.4, 0.1, 0.2, 0.3, 0.4, 0.1, 0.2, 0.3, 0.4},
 float zero = {0}, int64 one = {1}>
{
  [product] logits = MatMul(x, w)
  [best] best = ArgMax <axis = 1> (logits)
  [mask] mask = Greater(logits, zero)
  [size] size = Shape(logits)
  [ids] ids = Add(given, one)
}
"""


def test_integers_decide_where_a_lowered_layer_may_change_them() -> None:
    graph = Graph(onnx.parser.parse_model(MODEL))
    assert decided_outputs(graph, ["product"]) == {"best", "mask"}
    assert not decided_outputs(graph, [])
