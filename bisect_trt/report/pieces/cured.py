"""What cures say to people and machines, and the files they leave."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from bisect_trt.core.names import cell
from bisect_trt.graph.files.save import save_model
from bisect_trt.report.files.owned_folder import OwnedFolder
from bisect_trt.report.files.write import to_json
from bisect_trt.report.words.sentences import number
from bisect_trt.stations.pieces.cures import Cure, Cures
from bisect_trt.stations.pieces.engine_trials import PROCESSES

TABLE, RECORD, MODEL = "cures.csv", "cures.json", "model.cured.onnx"
FOLDER = OwnedFolder("bisect-trt cure", frozenset({TABLE, RECORD, MODEL, f"{MODEL}.data"}), RECORD)


def headline_of_cures(cures: Cures) -> str:
    """The answer in one sentence."""
    if not cures.needed:
        first = cures.tried[0]
        return (
            f"The model is right and steady as it is: {first.seen.runs} runs in {PROCESSES} fresh "
            "processes; there is nothing to cure."
        )
    smallest = cures.smallest
    if smallest is None:
        spent = "" if cures.complete else f" before {_ended(cures)} the search"
        return f"None of {max(0, len(cures.tried) - 1)} cures works{spent}."
    written = f"; {MODEL} is that model" if smallest.model is not None else ""
    return f"Cured by {smallest.name}: {smallest.how}{written}."


def table_of_cures(cures: Cures) -> pd.DataFrame:
    """A row a cure, as cures.csv has them."""
    return pd.DataFrame(
        [
            {
                "cure": cure.name,
                "works": cure.works,
                "right": cure.seen.runs > 0 and cure.seen.wrong == 0 and not cure.seen.failure,
                "steady": cure.seen.runs > 0 and cure.seen.differing == 0,
                "processes": cure.seen.processes,
                "runs": cure.seen.runs,
                "wrong_runs": cure.seen.wrong,
                "error_over_allowed": cure.seen.worst,
                "latency_ms": cure.latency_ms,
                "engine_bytes": cure.engine_bytes,
                "how": cell(cure.how),
                "failure": cell(cure.seen.failure),
            }
            for cure in cures.tried
        ]
    )


def lines_of_cures(cures: Cures) -> list[str]:
    """A line a cure, for the screen."""
    return [_line(cure) for cure in cures.tried]


def cures_as_json(cures: Cures) -> dict[str, Any]:
    """The record for machines, models apart."""
    return {
        "kind": FOLDER.command,
        "complete": cures.complete,
        "smallest": cures.smallest.name if cures.smallest is not None else None,
        "tried": [
            {
                "cure": c.name,
                "how": c.how,
                "works": c.works,
                "marks": list(c.marks),
                "latency_ms": c.latency_ms,
                "engine_bytes": c.engine_bytes,
                "seen": {**asdict(c.seen), "verdict": c.seen.verdict.value},
            }
            for c in cures.tried
        ],
    }


def write_cures(cures: Cures, folder: Path) -> None:
    """The table, the record and the cured model, in the place of earlier ones.

    Args:
        cures: what was tried.
        folder: as ``FOLDER.check`` allowed it.

    Raises:
        BadInputError: the folder cannot be written.
        MachineError: the disk is full; what was there is there still.
    """
    with FOLDER.written(folder) as draft:
        smallest = cures.smallest
        if smallest is not None and smallest.model is not None:
            save_model(smallest.model, draft / MODEL)
        table_of_cures(cures).to_csv(draft / TABLE, index=False)
        (draft / RECORD).write_text(to_json(cures_as_json(cures)) + "\n", encoding="utf-8")


def _ended(cures: Cures) -> str:
    return "an interruption ended" if cures.interrupted else "--max-builds ended"


def _line(cure: Cure) -> str:
    seen = cure.seen
    if seen.failure:
        return f"{cure.name}: {seen.failure[:200]}"
    word = "right and steady" if cure.works else str(seen.suspect)
    return (
        f"{cure.name}: {word}; {seen.wrong} of {seen.runs} runs wrong in {seen.processes} "
        f"processes, {number(cure.latency_ms)} ms, {cure.engine_bytes / 2**20:.1f} MB"
    )
