"""All files of the run's folder, from one result."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pandas as pd

from bisect_trt.core.disk.run_files import (
    ANNOTATED_MODEL,
    PLAN,
    RESULT_FILES,
    REWRITTEN_MODEL,
    RUN,
    TYPED_MODEL,
    VERIFY_FILES,
)
from bisect_trt.core.disk.scratch import scratch, scratch_in
from bisect_trt.core.errors import BadInputError, MachineError, is_disk_full
from bisect_trt.graph.files.save import save_model
from bisect_trt.graph.passes.typed import to_typed
from bisect_trt.report.files.annotations import annotated_model
from bisect_trt.report.files.junit import as_junit
from bisect_trt.report.page.page import as_html
from bisect_trt.report.record.columns import TABLES
from bisect_trt.report.record.csv_files import to_csv
from bisect_trt.report.record.record import Record
from bisect_trt.report.words.markdown import as_markdown
from bisect_trt.stations.case.case import Case


def discard(folder: Path) -> None:
    """Remove an earlier run's result whole, its summary first: what is being computed anew must not
    look finished, and no file may belong to another answer.
    """
    for name in (*RESULT_FILES, *VERIFY_FILES):
        (folder / name).unlink(missing_ok=True)


def write_report(result: Record, case: Case) -> None:
    """Write every file, ``run.json`` last, so that its presence means the folder is complete.

    The model that the plan is for is written too where it is not the user's own.

    Raises:
        MachineError: the disk is full; nothing was written then.
        BadInputError: the folder cannot be written.
    """
    tables = {**_error_tables(result), "search": result.search, "pins": result.pins}
    sometimes = {"engines": result.cost, "inputs": result.inputs, "frontier": result.frontier}
    tables |= {name: table for name, table in sometimes.items() if len(table)}
    texts = {
        PLAN: result.plan_json(case.plan_of_whole(result.plan)) + "\n",
        **documents_of(result),
        RUN: to_json(result.as_json()) + "\n",
    }
    models = {
        TYPED_MODEL: to_typed(case.whole, case.plan_of_whole(result.plan)),
        ANNOTATED_MODEL: annotated_model(result, case.graph),
    }
    if case.rewritten:
        models[REWRITTEN_MODEL] = case.graph.proto
    _write(result.folder, tables, texts, models)


def documents_of(result: Record) -> dict[str, str]:
    """What people and CI read, by file name: all that can be written again from a run's folder."""
    return {
        "report.md": as_markdown(result),
        "report.html": as_html(result),
        "junit.xml": as_junit(result),
    }


def write_documents(result: Record) -> None:
    """Write report.html, report.md and junit.xml again. Raises as :func:`write_report`."""
    with scratch_in(result.folder):
        _write(result.folder, {}, documents_of(result), {})


def write_tables(result: Record) -> None:
    """The error tables alone: layers.csv and outputs.csv. Raises as :func:`write_report`."""
    _write(result.folder, _error_tables(result), {}, {})


def _error_tables(result: Record) -> dict[str, pd.DataFrame]:
    return {"layers": result.layers, "outputs": result.outputs}


def _write(
    folder: Path, tables: dict[str, pd.DataFrame], texts: dict[str, str], models: dict[str, Any]
) -> None:
    """All of it into a draft folder, then file by file to its place: a full disk or an error is met
    before anything is seen.
    """
    try:
        with scratch("result") as made:
            draft = Path(made)
            for name, table in tables.items():
                text = to_csv(table, TABLES[name])
                (draft / f"{name}.csv").write_bytes(text.encode(errors="replace"))
            for name, text in texts.items():
                (draft / name).write_text(text, encoding="utf-8", errors="replace")
            for name, model in models.items():
                save_model(model, draft / name)
            for name in reversed(RESULT_FILES):
                if (draft / name).exists():
                    os.replace(draft / name, folder / name)
    except OSError as error:
        if is_disk_full(error):
            raise MachineError(
                f"{folder}: the disk is full, so no report was written; free some space and run "
                "the same command again: the answers are in the journal"
            ) from error
        raise BadInputError(f"{folder}: cannot be written ({error.strerror})") from error


def to_json(value: Any) -> str:
    """Strict JSON: NaN becomes null, infinities the strings "inf" and "-inf", which JSON has no
    numbers for.
    """
    return json.dumps(_plain(value), indent=2, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        if value != value:
            return None
        return value if abs(value) != float("inf") else ("inf" if value > 0 else "-inf")
    return value
