"""What `built` says: the shares of an engine's precisions, and what of a plan was not honoured."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from bisect_trt.base.display import counted, some_of
from bisect_trt.base.errors import EXIT_NOT_MET, EXIT_OK
from bisect_trt.report.markdown import Page, Section
from bisect_trt.steps.built import PRECISIONS, BuiltEngine, BuiltLayer, Honoured

SLOWEST = 12
"""Layers that the table of times shows."""

TF32 = "TF32 is not visible: a layer in FP32 may compute in it"


def exit_code(built: BuiltEngine) -> int:
    """1 where a plan was not honoured, else 0."""
    missed = built.honoured is not None and built.honoured.dishonoured
    return EXIT_NOT_MET if missed else EXIT_OK


def built_record(built: BuiltEngine) -> dict[str, Any]:
    """The content as a JSON object."""
    its = built.honoured
    return {
        "engine": str(built.source),
        "model": None if built.model is None else str(built.model),
        "tf32": "not visible",
        "tensors": dict(built.tensors),
        "layers": dict(built.layers_by_precision()),
        "time_ms": built.time_by_precision() if built.is_timed else None,
        "engine_layers": [
            {
                "name": layer.name,
                "precision": layer.precision,
                "nodes": list(layer.nodes),
                "time_ms": None if math.isnan(layer.time_ms) else layer.time_ms,
            }
            for layer in built.layers
        ],
        "unmapped": list(built.unmapped),
        "timed_elsewhere": list(built.strange),
        "plan": None
        if its is None
        else {
            "path": str(built.plan),
            "reduced": its.reduced,
            "expected": its.expected,
            "found": its.found,
            "seen": its.seen,
            "hidden": list(its.hidden),
            "absent": list(its.absent),
            "not_honoured": [vars(row) for row in its.dishonoured],
        },
        "exit_code": exit_code(built),
    }


def built_page(built: BuiltEngine) -> Page:
    """The content as a page for the terminal."""
    return Page(
        "bisect-trt built",
        _answer(built),
        exit_code(built) == EXIT_OK,
        tuple(s for s in _sections(built) if s is not None),
        tuple(_lines(built)),
    )


def _answer(built: BuiltEngine) -> str:
    its = built.honoured
    if its is None:
        layers, tensors = len(built.layers), sum(built.tensors.values())
        return f"{built.source}: {counted(layers, 'layer')}, {counted(tensors, 'tensor')}"
    shares = f"{its.found:.0%} of {counted(its.seen, 'layer')} in {its.reduced}".replace("%", " %")
    expected = f"{its.expected:.0%}".replace("%", " %")
    if its.dishonoured:
        missed = counted(len(its.dishonoured), "layer")
        return f"Not honoured: {shares} where {expected} was expected; {missed} differ"
    return f"Honoured: {shares}, {expected} was expected"


def _lines(built: BuiltEngine) -> list[str]:
    lines = [TF32]
    its = built.honoured
    if its is not None and its.hidden:
        lines.append(
            f"{counted(len(its.hidden), 'layer')} fused or of several types: theirs does not show"
        )
    if its is not None and its.absent:
        lines.append(f"not in the engine: {some_of(its.absent)}")
    if built.unmapped:
        lines.append(f"no node of the model: {some_of(built.unmapped, 3)}")
    if built.strange:
        lines.append(f"timed, but not in the engine's JSON: {some_of(built.strange, 3)}")
    return lines


def _sections(built: BuiltEngine) -> list[Section | None]:
    return [
        Section("By precision", _shares(built)),
        _dishonoured(built.honoured) if built.honoured is not None else None,
        Section("Slowest layers", _slowest(built)) if built.is_timed else None,
    ]


def _shares(built: BuiltEngine) -> pd.DataFrame:
    layers = built.layers_by_precision()
    times = built.time_by_precision()
    present = [p for p in PRECISIONS if p in layers or p in built.tensors]
    table = pd.DataFrame({"precision": present})
    table["tensors"] = [_of(built.tensors.get(p, 0), built.tensors) for p in present]
    table["layers"] = [_of(layers.get(p, 0), layers) for p in present]
    if times:
        whole = sum(times.values())
        table["time"] = [
            f"{_percent(times.get(p, 0.0), whole)} ({times.get(p, 0.0):.3g} ms)" for p in present
        ]
    return table


def _of(count: int, counts: Any) -> str:
    return f"{_percent(count, sum(counts.values()))} ({count})"


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.0%}".replace("%", " %") if whole else "-"


def _dishonoured(its: Honoured) -> Section | None:
    if not its.dishonoured:
        return None
    columns = ("layer", "wanted", "found", "engine layer")
    rows = [(x.layer, x.wanted, x.found, x.engine_layer[:60]) for x in its.dishonoured]
    return Section("Not honoured", pd.DataFrame(rows, columns=list(columns)))


def _slowest(built: BuiltEngine) -> pd.DataFrame:
    timed = [layer for layer in built.layers if layer.time_ms > 0.0]
    whole = sum(layer.time_ms for layer in timed)
    timed.sort(key=lambda layer: -layer.time_ms)
    return pd.DataFrame([_timed_row(layer, whole) for layer in timed[:SLOWEST]])


def _timed_row(layer: BuiltLayer, whole: float) -> dict[str, str]:
    return {
        "ms": f"{layer.time_ms:.3g}",
        "share": _percent(layer.time_ms, whole),
        "precision": layer.precision,
        "nodes": some_of(layer.nodes, 3) if layer.nodes else f"none ({layer.name[:60]})",
    }
