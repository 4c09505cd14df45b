"""Signs that the given inputs are alike: a plan that holds on them may not hold on other kinds."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from bisect_trt.core.finding import Finding
from bisect_trt.numerics.blocks import flat
from bisect_trt.probe.journal import Row
from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.case.case import Case
from bisect_trt.stations.case.coverage import ALIKE

_CLASSES = 3
"""An output of fewer values a row decides between no kinds of inputs."""

_MOST = 64
"""Inputs whose outputs are looked at."""

_NEARLY = 0.99
_SUM = 1e-3
_MOST_COMPARED, _VALUES = 8, 1 << 16
"""Inputs whose outputs are compared, and values of each."""


def note_alike(case: Case, bench: Bench) -> None:
    """Say of the given inputs that all are of one class, or have nearly the same outputs.

    Args:
        case: the given inputs; of one nothing is said.
        bench: has their references, and keeps what is said.
    """
    if len(case.samples) < 2:
        return
    key = bench.prober.key("alike", *(sample.digest for sample in case.samples))
    known = bench.journal.recall(key)
    if known is None:
        told = _signs(case, [bench.references.of(sample) for sample in case.samples[:_MOST]])
        bench.journal.record_later(Row(key, "alike", told))
    else:
        told = known[0]
    for where, message in told:
        bench.note(Finding(ALIKE, where, message))


def _signs(case: Case, references: Sequence[Any]) -> list[tuple[str, str]]:
    count, found = len(case.samples), []
    for name, first in references[0].items():
        outputs = [reference[name] for reference in references]
        if all(np.array_equal(a, first) for a in outputs):
            continue  # of no input: anchors, say
        chosen = _top_class(outputs) if _are_classes(case.graph.proto, name, outputs) else None
        if chosen is not None:
            called = _called(case.graph.proto, chosen, first.shape[-1])
            found.append(
                (
                    name,
                    f"all {count} inputs are class {called} by output {name!r}: inputs of other "
                    "classes are not covered",
                )
            )
        elif _nearly_same(outputs):
            found.append(
                (
                    name,
                    f"output {name!r} is nearly the same for all {count} inputs (correlation above "
                    f"{_NEARLY:g}): other kinds of inputs are not covered",
                )
            )
    return found


def _top_class(outputs: Sequence[NDArray[Any]]) -> int | None:
    """The one class that each input has most of; None where they differ, or choose none."""
    rows = [a.reshape(-1, a.shape[-1]) for a in outputs if a.ndim in (1, 2) and a.dtype.kind == "f"]
    if len(rows) < len(outputs) or any(r.shape[1] < _CLASSES or len(r) != 1 for r in rows):
        return None
    chosen = {int(np.argmax(row)) for row in rows}
    return chosen.pop() if len(chosen) == 1 else None


_CALLED = re.compile("class|label|logit|prob|score", re.IGNORECASE)
_NAMES = ("names", "classes", "labels")
"""Keys under which exporters write the classes' names into a model."""


def _are_classes(model: onnx.ModelProto, name: str, outputs: Sequence[NDArray[Any]]) -> bool:
    """Whether an output's values are classes': probabilities, or called so, or named in the model.
    An embedding has a largest value too.
    """
    if _CALLED.search(name) or any(entry.key in _NAMES for entry in model.metadata_props):
        return True
    return all(a.size and a.min() >= 0.0 and abs(float(a.sum()) - 1.0) < _SUM for a in outputs)


def _called(model: onnx.ModelProto, chosen: int, classes: int) -> str:
    """A class by its name, where the exporter wrote names into the model, and by its number."""
    for entry in model.metadata_props:
        if entry.key in _NAMES:
            try:
                names = ast.literal_eval(entry.value)
                return f"{str(names[chosen])!r} ({chosen} of {classes})"
            except (ValueError, SyntaxError, KeyError, IndexError, TypeError):
                continue
    return f"{chosen} of {classes}"


def _nearly_same(outputs: Sequence[NDArray[Any]]) -> bool:
    """Whether every output correlates with the first above 0.99."""
    shapes = {a.shape for a in outputs}
    if len(shapes) > 1 or outputs[0].dtype.kind != "f" or outputs[0].size < _CLASSES:
        return False
    step = -(-outputs[0].size // _VALUES)
    values = [flat(a)[::step].astype(np.float64) for a in outputs[:_MOST_COMPARED]]
    if not all(np.isfinite(v).all() for v in values):
        return False
    centred = [v - v.mean() for v in values]
    norms = [float(np.linalg.norm(v)) for v in centred]
    if min(norms) == 0.0:
        return False
    return all(
        float(v @ centred[0]) / (norm * norms[0]) > _NEARLY
        for v, norm in zip(centred[1:], norms[1:], strict=True)
    )
