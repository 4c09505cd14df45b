"""Matrix products whose sums are rounded to FP16 now and then, as one ONNX Runtime session: a Scan
over the pieces of the sum.

The same loop in NumPy gave the same bits in nine times the time, on two cores. A step of the Scan
is too little work for more than two: on more, each core has columns of its own and goes through all
steps of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import helper

from bisect_trt.core.cores import thread_count
from bisect_trt.core.precision import Precision
from bisect_trt.core.threads import in_order
from bisect_trt.graph.operator_rules import FLOAT, STORAGE_TYPE
from bisect_trt.runners.ort_sessions import node_session

Array = NDArray[np.float32]


_LEAST = 64
"""Columns, below which a core has nothing to gain."""


def rounded_sums(a: Array, b: Array) -> Array:
    """``a[0] @ b[0] + a[1] @ b[1] + ...``, rounded to FP16 after each product.

    Args:
        a: (s, z, m, t) float32 that holds FP16 values; z may be 1 and stand for any other.
        b: (s, z, t, n), likewise; at most 16 terms t are what the hardware adds at once.

    Returns:
        (z, m, n) float32 that holds FP16 values.
    """
    session, batch = _session(), max(a.shape[1], b.shape[1])
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)  # once, and not by each part
    total = np.empty((batch, a.shape[2], b.shape[3]), np.float32)

    def fill(part: tuple[slice, slice]) -> None:
        some, columns = part
        left = a[:, some] if a.shape[1] > 1 else a
        right = (b[:, some] if b.shape[1] > 1 else b)[..., columns]
        place = total[some, :, columns]
        feed = {"zero": np.zeros(place.shape, np.float32)}
        feed |= {"a": np.ascontiguousarray(left), "b": np.ascontiguousarray(right)}
        place[...] = session.run(["total"], feed)[0]

    for _ in in_order(fill, _parts(batch, b.shape[3], thread_count())):
        pass
    return total


def _parts(batch: int, columns: int, most: int) -> Iterator[tuple[slice, slice]]:
    """At most ``most`` parts of about the same size, by columns where there are enough of them, or
    by the products of a batch.
    """
    by_columns = min(most, columns // _LEAST)
    if by_columns >= min(most, batch):
        for begin, end in _borders(columns, max(1, by_columns)):
            yield slice(None), slice(begin, end)
        return
    for begin, end in _borders(batch, min(most, batch)):
        yield slice(begin, end), slice(None)


def _borders(size: int, parts: int) -> Iterator[tuple[int, int]]:
    for part in range(parts):
        yield part * size // parts, (part + 1) * size // parts


@cache
def _session() -> ort.InferenceSession:
    """Any number of pieces of any shapes, a thread a call; made once."""

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
    return node_session(model, 1)
