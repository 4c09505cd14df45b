"""The edits of a repair, as rows, JSON and lines of text."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import onnx

from bisect_trt.base.atomic_files import REPAIRED_MODEL
from bisect_trt.base.display import counted, some_of
from bisect_trt.base.errors import EXIT_NOT_MET, EXIT_OK
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.model.graph import Graph
from bisect_trt.model.patterns import origin_of
from bisect_trt.model.typed import to_typed
from bisect_trt.repair.edits import Edit, Ranges
from bisect_trt.repair.rules import IDENTITY
from bisect_trt.steps.problem import Problem
from bisect_trt.steps.repair import Refused, Repair, whole_of

METADATA = "bisect_trt.repairs"
"""The metadata key of a repaired model that lists its edits, as JSON."""


@dataclass(frozen=True)
class RepairRow:
    """One edit of the graph.

    ``sources`` are lines of the user's code, where the exporter kept them. ``constants`` are texts:
    name, before, after. ``largest_before`` and ``largest_after`` are the largest values that the
    tensors at stake had on the given inputs; NaN is None. ``score_without`` and ``missed_without``
    are the worst score and the inputs missed where all edits but this rule's are made.
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
    score_without: float | None
    missed_without: int | None


@dataclass(frozen=True)
class RefusedRow:
    """An edit that was not made, and why."""

    rule: str
    nodes: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class RepairProof:
    """What proves a repair: everything reduced misses ``missed_*`` of ``tried`` inputs.

    ``score_*``: the worst score there. ``fp32_change``: of an output's largest value;
    ``fp32_noise``: what another order of FP32's sums changes. ``headroom``: the factor on the
    inputs that the repaired graph stands.
    """

    tried: int
    missed_before: int
    missed_after: int
    score_before: float
    score_after: float
    fp32_change: float
    fp32_noise: float
    headroom: float


@dataclass(frozen=True)
class RepairFacts:
    """The edits of a repair, its proof, None where there is none, and what was refused."""

    rows: tuple[RepairRow, ...] = ()
    proof: RepairProof | None = None
    refused: tuple[RefusedRow, ...] = ()

    @property
    def rules(self) -> list[str]:
        """The rules that edits were made by, in their order."""
        return list(dict.fromkeys(row.rule for row in self.rows))

    def as_json(self) -> dict[str, Any]:
        """As run.json and repair.json have them."""
        proof = asdict(self.proof) if self.proof is not None else {}
        return {
            "repairs": [asdict(row) for row in self.rows],
            "repair_proof": proof,
            "repairs_refused": [asdict(row) for row in self.refused],
        }


def facts_from_json(data: Mapping[str, Any]) -> RepairFacts:
    """Reads what :meth:`RepairFacts.as_json` wrote.

    Raises:
        KeyError, ValueError, TypeError: it is none.
    """
    rows = (
        RepairRow(
            **{
                **row,
                **{key: tuple(row[key]) for key in ("nodes", "sources")},
                "constants": tuple((c[0], c[1], c[2]) for c in row["constants"]),
                **{key: _maybe_float(row[key]) for key in _MAYBE_FLOATS},
            }
        )
        for row in data["repairs"]
    )
    refused = (
        RefusedRow(row["rule"], tuple(row["nodes"]), row["reason"])
        for row in data["repairs_refused"]
    )
    proof = None
    if data["repair_proof"]:
        counts = {f.name: f.type for f in fields(RepairProof)}
        proof = RepairProof(
            **{
                name: int(value) if counts[name] == "int" else _maybe_float(value)
                for name, value in data["repair_proof"].items()
            }
        )
    return RepairFacts(tuple(rows), proof, tuple(refused))


_MAYBE_FLOATS = ("largest_before", "largest_after", "score_without")


def _maybe_float(value: Any) -> Any:
    return None if value is None else float(value)  # JSON has strings for infinities


@dataclass(frozen=True)
class Repaired:
    """The result of ``repair``; ``model`` is None where there is none to write.

    ``digest`` is the SHA-256 of the original model.
    """

    name: str
    digest: str
    folder: Path
    found: Repair | Refused
    facts: RepairFacts
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
        return {**record, **self.facts.as_json()}


def repaired_of(found: Repair | Refused, problem: Problem, folder: Path) -> Repaired:
    """The result of a repair, with the whole model to write."""
    facts = facts_of(found, problem)
    model = repaired_model(found, facts, problem) if isinstance(found, Repair) else None
    return Repaired(problem.model.name, problem.model.digest, folder, found, facts, model)


def repaired_model(found: Repair, facts: RepairFacts, problem: Problem) -> onnx.ModelProto:
    """The whole repaired model, whose metadata says what was done.

    Inputs and outputs have the types of the source.
    """
    whole = whole_of(problem, found.graph)
    assert whole is not None, "find_repair refuses what cannot be put back"
    model = onnx.ModelProto()
    model.CopyFrom(as_stored(whole, problem))
    added = as_metadata(facts.rows, problem.model.digest)
    kept = [p for p in model.metadata_props if p.key not in added]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    for key, value in added.items():
        model.metadata_props.add(key=key, value=value)
    return model


def as_stored(whole: Graph, problem: Problem) -> onnx.ModelProto:
    """The FP32 model ``whole``, whose inputs and outputs have the types of the source."""
    return to_typed(whole, PrecisionPlan(Precision.FP32)) if problem.lifted else whole.proto


def facts_of(found: Repair | Refused, problem: Problem) -> RepairFacts:
    """The rows of a repair, in the order in which the edits were made, and its proof."""
    refused = tuple(RefusedRow(r.rule.value, r.nodes, r.reason) for r in found.refused)
    if isinstance(found, Refused):
        return RepairFacts(refused=refused)
    nodes = {name: node for node, name in problem.graph.named_nodes()}
    proof = RepairProof(
        tried=found.tried,
        missed_before=found.original.missed,
        missed_after=found.repaired.missed,
        score_before=found.original.score,
        score_after=found.repaired.score,
        fp32_change=found.change.share,
        fp32_noise=found.change.noise,
        headroom=found.headroom,
    )
    return RepairFacts(tuple(_row(edit, found, nodes) for edit in found.edits), proof, refused)


def _row(edit: Edit, repair: Repair, nodes: Mapping[str, onnx.NodeProto]) -> RepairRow:
    found = [origin_of(nodes[name]) for name in edit.nodes if name in nodes]
    sources = dict.fromkeys(f"{o.file}:{o.line}" for o in found if o.file)
    without = repair.without.get(edit.rule)
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
        score_without=None if without is None else without.score,
        missed_without=None if without is None else without.missed,
    )


def _largest(edit: Edit, ranges: Ranges) -> float | None:
    return max((ranges[t].largest for t in edit.tensors if t in ranges), default=None)


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
    reduced = "everything in FP16"
    if found.kept:
        reduced += f" but {counted(len(found.kept), 'layer')}"
    word = "REPAIRED" if found.repaired.missed == 0 else "PARTLY REPAIRED"
    return (
        f"{word}   {rules}: {reduced} misses {found.repaired.missed} of {found.tried} "
        f"inputs, before the repair {found.original.missed}"
    )


def lines(facts: RepairFacts) -> list[str]:
    """The edits, the proof and the refusals, a line each."""
    return [*edit_lines(facts), *refusal_lines(facts)]


def edit_lines(facts: RepairFacts) -> list[str]:
    """The edits and their proof, a line each."""
    said = [line_of(row) for row in facts.rows]
    if facts.proof is not None:
        said.append(f"proof: {proof_sentence(facts.proof)}")
    return said


def proof_sentence(proof: RepairProof) -> str:
    """What FP32 changes, and the largest inputs that fit."""
    return (
        f"FP32 changes by {proof.fp32_change:.2g} of an output's largest value (noise "
        f"{proof.fp32_noise:.2g}); inputs up to {proof.headroom:g} times as large fit"
    )


def refusal_lines(facts: RepairFacts) -> list[str]:
    """Why edits were refused, a line for each reason."""
    counts = Counter(f"{row.rule}: {row.reason}" for row in facts.refused)
    return [f"refused: {w}" + (f" ({n} times)" if n > 1 else "") for w, n in counts.items()]


def line_of(row: RepairRow) -> str:
    """One edit in a line."""
    sizes = "".join(f"; {name} {before}, then {after}" for name, before, after in row.constants[:1])
    if row.largest_before is not None and row.largest_after is not None:
        sizes = f"; largest {row.largest_before:.3g}"
        if row.largest_after != row.largest_before:
            sizes += f", then {row.largest_after:.3g}"
    added = f"; {counted(row.nodes_added, 'node')} added" if row.nodes_added > 0 else ""
    where = f" ({row.sources[0]})" if row.sources else ""
    return f"{row.rule:<13} {some_of(list(row.nodes))}{where}: {row.sentence}{sizes}{added}"
