"""Reads the plan of a mixed ONNX model back from its types."""

from __future__ import annotations

from pathlib import Path

from bisect_trt.base.plan import Precision
from bisect_trt.imports.entries import By, Entry, Form, What
from bisect_trt.imports.mapping import ImportedList, MappedEntry, Status
from bisect_trt.model.graph import Graph
from bisect_trt.model.mixed import Match, load_mixed

_SAID = {
    Match.FUSED: "the tool fused it; it has the type of what it was fused into",
    Match.MISSING: "not in that model; it has the type of its neighbours",
    Match.ADDED: "the tool added this node; the model has no such layer",
}
_CONVERTS = "the tool added this Cast, which only converts a type"


def import_mixed(path: Path, graph: Graph, of: str) -> ImportedList:
    """The plan that the types of the model at ``path`` say for ``graph``, which is called ``of``.

    Raises:
        BadInputError: it cannot be read, has no reduced node, or is of another model.
    """
    mixed = load_mixed(path, graph, of)
    layers = {layer.name for layer in graph.layers_at(mixed.precision)}
    casts = {name for node, name in Graph(mixed.proto).named_nodes() if node.op_type == "Cast"}
    rows = []
    for found in mixed.nodes:
        if found.how is not Match.ADDED and found.layer not in layers:
            continue  # a node that no plan reduces
        kept = found.layer in mixed.plan.pinned
        said = _SAID.get(found.how, "")
        if not kept and not said:
            continue  # reduced, as all that a list does not name
        precision = Precision.FP32 if kept else mixed.precision
        if found.how is Match.ADDED and found.node in casts:
            entry = Entry(By.NODE, found.node, mixed.precision, What.OUTPUT)
            rows.append(MappedEntry(entry, Status.MAPPED, said=_CONVERTS))
            continue
        if found.how is Match.ADDED:
            entry = Entry(By.NODE, found.node, None, What.OUTPUT, refused=said)
            rows.append(MappedEntry(entry, Status.REFUSED, said=said))
            continue
        entry = Entry(By.NODE, found.layer, precision, What.OUTPUT)
        status = Status.WIDENED if said else Status.MAPPED
        rows.append(MappedEntry(entry, status, (found.layer,), said))
    return ImportedList(Form.MIXED, str(path), mixed.plan, tuple(rows), mixed.notes)
