"""What a viewer of the model, such as Netron, shows at its nodes."""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from bisect_trt.core.names import printable
from bisect_trt.graph.model.graph import Graph
from bisect_trt.graph.passes.annotated import annotated
from bisect_trt.report.record.columns import FLAG, LAYERS
from bisect_trt.report.record.record import Record
from bisect_trt.report.words.headline import headline
from bisect_trt.report.words.sentences import is_least, number, score_without

_SHOWN = (
    "alone_score",
    "rank",
    "max_abs",
    "snr_db",
    "finite",
    "introduced_max_abs",
    "introduced_snr_db",
    "introduced_finite",
    "ref_min",
    "ref_max",
    "engine_max_abs",
    "engine_finite",
)
"""Columns of layers.csv; the ``pinned`` among them is said in words, as ``precision``."""


def annotated_model(result: Record, graph: Graph) -> onnx.ModelProto:
    """The model that was searched, with the answer at it and errors and pins at its layers.

    Args:
        result: what is told.
        graph: the model, whose layers the result is of.
    """
    answer = {"answer": printable(headline(result)), "cause": result.cause.value}
    answer |= {"requirements": printable(", ".join(result.requirements))}
    return annotated(graph, answer, dict(_of_layers(result)))


def _of_layers(result: Record) -> Iterator[tuple[str, dict[str, str]]]:
    pinned, low = set(result.pinned), result.plan.base.value
    proved = result.pins[result.pins["proved"].astype(bool)] if len(result.pins) else result.pins
    without = {
        str(row.layer): f"{row.verdict_without}, {'at least ' * is_least(row)}{score_without(row)}"
        for row in proved.itertuples()
    }
    flags = {c.name for c in LAYERS if c.kind == FLAG}
    shown = [c for c in _SHOWN if c in result.layers]
    columns = (result.layers[c].to_list() for c in shown)
    for name, *values in zip(result.layers["layer"].map(str), *columns, strict=True):
        at = result.plan.pin_precision.value
        words = {"precision": f"{at} (pinned)" if name in pinned else low}
        if name in without:
            words["without_this_pin"] = without[name]
        for column, value in zip(shown, values, strict=True):
            text = str(value) if column in flags else number(value)
            if text not in ("", "nan"):
                words[column] = text
        yield name, words
