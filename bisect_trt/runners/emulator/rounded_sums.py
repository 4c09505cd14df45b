"""Matrix products whose sums are rounded to FP16 now and then, as one ONNX Runtime session: a Scan
over the pieces of the sum.

The same loop in NumPy gave the same bits in nine times the time, on two cores.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import helper

from bisect_trt.core.precision import Precision
from bisect_trt.graph.operator_rules import FLOAT, STORAGE_TYPE
from bisect_trt.runners.ort_sessions import node_session

Array = NDArray[np.float32]


def rounded_sums(a: Array, b: Array) -> Array:
    """``a[0] @ b[0] + a[1] @ b[1] + ...``, rounded to FP16 after each product.

    Args:
        a: (s, z, m, t) float32 that holds FP16 values; z may be 1 and stand for any other.
        b: (s, z, t, n), likewise; at most 16 terms t are what the hardware adds at once.

    Returns:
        (z, m, n) float32 that holds FP16 values.
    """
    zero = np.zeros((max(a.shape[1], b.shape[1]), a.shape[2], b.shape[3]), np.float32)
    feed = {"zero": zero, "a": np.ascontiguousarray(a), "b": np.ascontiguousarray(b)}
    total: Array = _session().run(["total"], feed)[0]
    return total


@cache
def _session() -> ort.InferenceSession:
    """Any number of pieces of any shapes; made once."""

    def values(**shapes: list[str]) -> list[onnx.ValueInfoProto]:
        return [helper.make_tensor_value_info(n, FLOAT, shape) for n, shape in shapes.items()]

    body = helper.make_graph(
        [
            helper.make_node("MatMul", ["piece_a", "piece_b"], ["product"]),
            helper.make_node("Add", ["before", "product"], ["sum"]),
            helper.make_node("Cast", ["sum"], ["stored"], to=STORAGE_TYPE[Precision.FP16]),
            helper.make_node("Cast", ["stored"], ["after"], to=FLOAT),
        ],
        "piece",
        values(before=["z", "m", "n"], piece_a=["za", "m", "t"], piece_b=["zb", "t", "n"]),
        values(after=["z", "m", "n"]),
    )
    scan = helper.make_node("Scan", ["zero", "a", "b"], ["total"], body=body, num_scan_inputs=2)
    graph = helper.make_graph(
        [scan],
        "rounded_sums",
        values(zero=["z", "m", "n"], a=["s", "za", "m", "t"], b=["s", "zb", "t", "n"]),
        values(total=["z", "m", "n"]),
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    return node_session(model)
