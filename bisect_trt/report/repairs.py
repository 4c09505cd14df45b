"""The edits of a repair, as rows, JSON and lines of text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import onnx

from bisect_trt.base.display import counted, some_of
from bisect_trt.model.graph import Graph
from bisect_trt.model.patterns import origin_of
from bisect_trt.repair.edits import Edit, Ranges
from bisect_trt.repair.rules import IDENTITY
from bisect_trt.steps.repair import Refused, Repair

METADATA = "bisect_trt.repairs"
"""The metadata key of a repaired model that lists its edits, as JSON."""


@dataclass(frozen=True)
class RepairRow:
    """One edit of the graph.

    ``sources`` are lines of the user's code, where the exporter kept them. ``constants`` are texts:
    name, before, after. ``largest_before`` and ``largest_after`` are the largest values that the
    tensors at stake had on the given inputs; NaN is None.
    """

    rule: str
    nodes: tuple[str, ...]
    sources: tuple[str, ...]
    sentence: str
    identity: str
    constants: tuple[tuple[str, str, str], ...]
    largest_before: float | None
    largest_after: float | None
    nodes_added: int


def rows_of(repair: Repair, original: Graph) -> tuple[RepairRow, ...]:
    """A row for each edit, in the order in which they were made."""
    nodes = {name: node for node, name in original.named_nodes()}
    return tuple(_row(edit, repair, nodes) for edit in repair.edits)


def _row(edit: Edit, repair: Repair, nodes: Mapping[str, onnx.NodeProto]) -> RepairRow:
    found = [origin_of(nodes[name]) for name in edit.nodes if name in nodes]
    sources = dict.fromkeys(f"{o.file}:{o.line}" for o in found if o.file)
    return RepairRow(
        rule=edit.rule.value,
        nodes=edit.nodes,
        sources=tuple(sources),
        sentence=edit.sentence,
        identity=IDENTITY[edit.rule],
        constants=tuple((c.name, c.before, c.after) for c in edit.changed),
        largest_before=_largest(edit, repair.before),
        largest_after=_largest(edit, repair.after),
        nodes_added=sum(len(new) for new in edit.replaced.values()) - len(edit.replaced),
    )


def _largest(edit: Edit, ranges: Ranges) -> float | None:
    return max((ranges[t].largest for t in edit.tensors if t in ranges), default=None)


def refusals_json(found: Repair | Refused) -> list[dict[str, Any]]:
    """What was not repaired, and why."""
    return [
        {"rule": r.rule.value, "nodes": list(r.nodes), "reason": r.reason} for r in found.refused
    ]


def repair_json(found: Repair | Refused, rows: Sequence[RepairRow]) -> dict[str, Any]:
    """The content of repair.json."""
    record: dict[str, Any] = {"repairs": [asdict(row) for row in rows]}
    if isinstance(found, Repair):
        record |= {
            "missed_before": found.original.missed,
            "missed_after": found.repaired.missed,
            "score_before": found.original.score,
            "score_after": found.repaired.score,
            "fp32_change": found.change.share,
            "fp32_noise": found.change.noise,
            "headroom": found.headroom,
        }
    return {**record, "refused": refusals_json(found)}


def as_metadata(rows: Sequence[RepairRow], original_digest: str) -> dict[str, str]:
    """What a repaired model says of itself: its edits and the original's SHA-256."""
    edits = [{"rule": row.rule, "nodes": list(row.nodes), "what": row.sentence} for row in rows]
    return {METADATA: json.dumps(edits), "bisect_trt.original_sha256": original_digest}


def headline(found: Repair | Refused) -> str:
    """The answer in a sentence."""
    if isinstance(found, Refused):
        return "NOT REPAIRED   no edit makes everything in FP16 less wrong"
    rules = ", ".join(found.rules)
    word = "REPAIRED" if found.repaired.missed == 0 else "PARTLY REPAIRED"
    return (
        f"{word}   {rules}: everything in FP16 misses {found.repaired.missed} of the inputs tried, "
        f"before {found.original.missed}"
    )


def lines(found: Repair | Refused, rows: Sequence[RepairRow]) -> list[str]:
    """The edits, the proof and the refusals, a line each."""
    said = [line_of(row) for row in rows]
    if isinstance(found, Repair):
        said.append(
            f"proof: FP32 changes by {found.change.share:.2g} of an output's largest value (noise "
            f"{found.change.noise:.2g}); inputs up to {found.headroom:g} times as large fit"
        )
    counts: dict[str, int] = {}
    for refusal in found.refused:
        words = f"{refusal.rule.value}: {refusal.reason}"
        counts[words] = counts.get(words, 0) + 1
    said += [f"refused: {w}" + (f" ({n} times)" if n > 1 else "") for w, n in counts.items()]
    return said


def line_of(row: RepairRow) -> str:
    """One edit in a line."""
    sizes = ""
    if row.largest_before is not None and row.largest_after is not None:
        sizes = f"; largest {row.largest_before:.3g}, then {row.largest_after:.3g}"
    added = f"; {counted(row.nodes_added, 'node')} added" if row.nodes_added > 0 else ""
    where = f" ({row.sources[0]})" if row.sources else ""
    return f"{row.rule:<13} {some_of(list(row.nodes))}{where}: {row.sentence}{sizes}{added}"
