"""The edits of a repair, as rows, JSON and lines of text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnx

from bisect_trt.base.atomic_files import REPAIR, REPAIRED_MODEL
from bisect_trt.base.display import counted, some_of
from bisect_trt.base.errors import EXIT_NOT_MET, EXIT_OK
from bisect_trt.model.graph import Graph
from bisect_trt.model.patterns import origin_of
from bisect_trt.repair.edits import Edit, Ranges, Refusal
from bisect_trt.repair.rules import IDENTITY
from bisect_trt.report.files import to_json, write_files
from bisect_trt.steps.problem import Problem
from bisect_trt.steps.repair import Refused, Repair, whole_of

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


@dataclass(frozen=True)
class Repaired:
    """The result of ``repair``; ``model`` is None where there is none to write.

    ``digest`` is the SHA-256 of the original model.
    """

    name: str
    digest: str
    folder: Path
    found: Repair | Refused
    rows: tuple[RepairRow, ...]
    model: onnx.ModelProto | None

    @property
    def exit_code(self) -> int:
        """0 where a repaired model was written, or none is needed."""
        good = self.model is not None or (isinstance(self.found, Refused) and self.found.is_right)
        return EXIT_OK if good else EXIT_NOT_MET

    def as_json(self) -> dict[str, Any]:
        """The content of repair.json."""
        written = REPAIRED_MODEL if self.model is not None else None
        record = {"model": self.name, "model_sha256": self.digest, "repaired_model": written}
        return {**record, **repair_json(self.found, self.rows)}


def repaired_of(found: Repair | Refused, problem: Problem, folder: Path) -> Repaired:
    """The result of a repair, with the whole model to write."""
    rows, model = tuple[RepairRow, ...](), None
    if isinstance(found, Repair):
        rows = rows_of(found, problem.graph)
        whole = whole_of(problem, found.graph)
        if whole is None:
            reason = "the rest of the model reads inner tensors of the judged part"
            taken = (Refusal(edit.rule, edit.nodes, reason) for edit in found.edits)
            found, rows = Refused((*found.refused, *taken)), ()
        else:
            model = onnx.ModelProto()
            model.CopyFrom(whole)
            for key, value in as_metadata(rows, problem.model.digest).items():
                kept = [p for p in model.metadata_props if p.key != key]
                del model.metadata_props[:]
                model.metadata_props.extend(kept)
                model.metadata_props.add(key=key, value=value)
    return Repaired(problem.model.name, problem.model.digest, folder, found, rows, model)


def write_repair(result: Repaired) -> None:
    """Writes repair.json and, where there is one, the repaired model; an older one goes.

    Raises:
        MachineError: the disk is full.
        BadInputError: the folder cannot be written.
    """
    record = {REPAIR: to_json(result.as_json()) + "\n"}
    for name in (REPAIRED_MODEL, f"{REPAIRED_MODEL}.data"):
        (result.folder / name).unlink(missing_ok=True)
    models = {} if result.model is None else {REPAIRED_MODEL: result.model}
    write_files(result.folder, {**models, **record})


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
            "tried": found.tried,
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
        if found.is_right:
            return "NEEDS NO REPAIR   everything in FP16 meets the requirement on your inputs"
        return "NOT REPAIRED   no edit makes everything in FP16 less wrong"
    rules = ", ".join(found.rules)
    word = "REPAIRED" if found.repaired.missed == 0 else "PARTLY REPAIRED"
    return (
        f"{word}   {rules}: everything in FP16 misses {found.repaired.missed} of {found.tried} "
        f"inputs, before the repair {found.original.missed}"
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
    sizes = "".join(f"; {name} {before}, then {after}" for name, before, after in row.constants[:1])
    if row.largest_before is not None and row.largest_after is not None:
        sizes = f"; largest {row.largest_before:.3g}, then {row.largest_after:.3g}"
    added = f"; {counted(row.nodes_added, 'node')} added" if row.nodes_added > 0 else ""
    where = f" ({row.sources[0]})" if row.sources else ""
    return f"{row.rule:<13} {some_of(list(row.nodes))}{where}: {row.sentence}{sizes}{added}"
