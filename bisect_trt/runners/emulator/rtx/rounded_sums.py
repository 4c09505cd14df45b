"""Matrix products whose sums are rounded to FP16 now and then, as one ONNX Runtime session: a Scan
over the pieces of the sum.

The same loop in NumPy gave the same bits in nine times the time, on two cores. A step of the Scan
is too little work for more than two: on more, each core has columns of its own and goes through all
steps of them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import cache

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import helper

from bisect_trt.core.machine.cores import thread_count
from bisect_trt.core.machine.threads import in_order
from bisect_trt.core.precision import Precision
from bisect_trt.graph.tensors.operator_rules import FLOAT, STORAGE_TYPE
from bisect_trt.runners.ort.sessions import node_session

Array = NDArray[np.float32]


FEWEST_COLUMNS = 64
"""Below which a core has nothing to gain."""


def rounded_sums(a: Array, b: Array) -> Array:
    """``a[0] @ b[0] + a[1] @ b[1] + ...``, rounded to FP16 after each product.

    Args:
        a: (s, z, m, t) float32 that holds FP16 values; z may be 1 and stand for any other.
        b: (s, z, t, n), likewise; at most 16 terms t are what the hardware adds at once.

    Returns:
        (z, m, n) float32 that holds FP16 values.
    """
    batch = max(a.shape[1], b.shape[1])
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)  # once, and not by each part
    total = np.empty((batch, a.shape[2], b.shape[3]), np.float32)

    def fill(part: tuple[slice, slice]) -> None:
        some, columns = part
        left = a[:, some] if a.shape[1] > 1 else a
        right = (b[:, some] if b.shape[1] > 1 else b)[..., columns]
        total[some, :, columns] = rounded_sum(left, right)

    for _ in in_order(fill, _parts(batch, b.shape[3], thread_count())):
        pass
    return total


def rounded_sum(a: Array, b: Array) -> Array:
    """As :func:`rounded_sums`, in the caller's thread alone."""
    rows = a.shape[2]
    if rows == 1:  # ONNX Runtime adds the terms of a single row in an order that the columns tell
        a = np.concatenate([a, np.zeros_like(a)], axis=2)
    shape = max(a.shape[1], b.shape[1]), a.shape[2], b.shape[3]
    feed = {"a": np.ascontiguousarray(a), "b": np.ascontiguousarray(b)}
    found: Array = _session().run(["total"], {"zero": np.zeros(shape, np.float32), **feed})[0]
    return found[:, :rows]


def _parts(batch: int, columns: int, most: int) -> Iterator[tuple[slice, slice]]:
    """At most ``most`` parts of about the same size, by columns where there are enough of them, or
    by the products of a batch.
    """
    by_columns = min(most, columns // FEWEST_COLUMNS)
    if by_columns >= min(most, batch):
        for begin, end in _borders(columns, max(1, by_columns)):
            yield slice(None), slice(begin, end)
        return
    for begin, end in _borders(batch, min(most, batch)):
        yield slice(begin, end), slice(None)


def _borders(size: int, parts: int) -> Iterator[tuple[int, int]]:
    for part in range(parts):
        yield part * size // parts, (part + 1) * size // parts


_own = threading.local()


def _session() -> ort.InferenceSession:
    """Any number of pieces of any shapes; the calling thread's own, made once: the steps of sixteen
    threads that share one wait for its arena most of the time.
    """
    session: ort.InferenceSession | None = getattr(_own, "session", None)
    if session is None:
        session = _own.session = node_session(_model(), 1, own_arena=True)
    return session


@cache
def _model() -> onnx.ModelProto:
    """The Scan over the pieces."""

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
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
