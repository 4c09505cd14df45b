"""Writes the files of a run's folder, whole or not at all."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import pandas as pd

from bisect_trt.base.atomic_files import (
    FITTED_MODEL,
    OLDER_FILES,
    PLAN,
    REPAIR,
    REPAIRED_MODEL,
    RESULT_FILES,
    RUN,
    TYPED_MODEL,
    VERIFY_FILES,
    VERIFY_JUNIT,
    VERIFY_RECORD,
    draft_prefix,
    scratch,
    sweep,
)
from bisect_trt.base.errors import BadInputError, not_written
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.model.load import digest_of
from bisect_trt.model.save import save_model
from bisect_trt.model.typed import to_typed
from bisect_trt.report.choices import Choice, recommended
from bisect_trt.report.columns import ORIGINALS, TABLES, to_csv
from bisect_trt.report.html import as_html
from bisect_trt.report.junit import as_junit, verification_as_junit
from bisect_trt.report.markdown import as_markdown
from bisect_trt.report.record import Record
from bisect_trt.report.repairs import Repaired, as_stored, repaired_model
from bisect_trt.steps.answer import RunState
from bisect_trt.steps.fit_weights import fitted_problem
from bisect_trt.steps.problem import Problem
from bisect_trt.steps.repair import Repair, repaired_problem
from bisect_trt.steps.verify import Verification


@dataclass(frozen=True)
class OwnedFolder:
    """A folder that one command writes whole."""

    command: str
    files: frozenset[str]  # names of all files it writes
    record: str  # the JSON file whose ``kind`` names the command

    def check(self, folder: Path, read: Sequence[Path] = ()) -> None:
        """Refuses a folder with other files, one that cannot be written, or one of ``read``."""
        if folder.exists() and not folder.is_dir():
            raise BadInputError(f"--out {folder}: not a folder; choose another name")
        present = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
        strange = [name for name in present if name not in self.files]
        if strange or (present and not self.is_ours(folder)):
            what = strange[0] if strange else present[0]
            raise BadInputError(
                f"--out {folder}: holds {what}, which no `{self.command}` wrote; choose another "
                "folder, or move it away"
            )
        for path in read:
            if path.resolve().parent == folder.resolve():
                raise BadInputError(
                    f"--out {folder}: {path} would be written over; choose another folder"
                )
        parent = next((p for p in folder.resolve().parents if p.exists()), None)
        if parent is None or not parent.is_dir() or not os.access(parent, os.W_OK):
            raise BadInputError(f"--out {folder}: cannot be written; choose another folder")

    def is_ours(self, folder: Path) -> bool:
        """Whether the command wrote ``folder``."""
        try:
            found = json.loads((folder / self.record).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return isinstance(found, dict) and found.get("kind") == self.command

    def remove(self, folder: Path) -> None:
        """Removes ``folder`` if the command wrote it."""
        if self.is_ours(folder):
            shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def written(self, folder: Path) -> Iterator[Path]:
        """Yields an empty folder that replaces ``folder`` if the block ends without an error."""
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            sweep(folder.parent)
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=draft_prefix()) as name:
                draft = Path(name) / "new"
                draft.mkdir()
                yield draft
                # A folder can only replace an empty one, so the old one is moved away first.
                if folder.exists():
                    os.replace(folder, Path(name) / "old")
                os.replace(draft, folder)
        except OSError as error:
            raise not_written(f"--out {folder}", error) from error


def discard(folder: Path) -> None:
    """Removes an earlier run's results, run.json first."""
    # Without run.json the folder does not look like a finished run from the first removal on.
    for name in (*RESULT_FILES, *VERIFY_FILES, *OLDER_FILES):
        (folder / name).unlink(missing_ok=True)


def write_report(result: Record, state: RunState) -> None:
    """Writes every file, ``run.json`` last: its presence means that the folder is complete.

    Raises:
        MachineError: the disk is full; nothing was written.
        BadInputError: the folder cannot be written.
    """
    tables = {name: getattr(result, name) for name in ("layers", "outputs", "search", "pins")}
    sometimes = {"engines": result.cost, "inputs": result.inputs, "tradeoff": result.tradeoff}
    sometimes |= {name: getattr(result, name) for name in ORIGINALS}
    tables |= {name: table for name, table in sometimes.items() if len(table)}
    problem = repaired = fitted = state.problem
    models: dict[str, onnx.ModelProto] = {}
    if isinstance(state.repair, Repair):
        models[REPAIRED_MODEL] = repaired_model(state.repair, result.repair, problem)
        repaired = fitted = repaired_problem(problem, state.repair)
    if state.weights is not None:
        fitted = fitted_problem(repaired, state.weights)
        rows = [choice.plan for choice in result.choice_rows if choice.fitted]
        row = fitted.plan_of_whole(rows[0] if rows else state.base)
        models[FITTED_MODEL] = as_stored(fitted.whole.settled(row), problem)

    def whole(plan: PrecisionPlan, choice: Choice | None) -> tuple[Problem, PrecisionPlan]:
        """The model of a choice, and its plan for the whole of that."""
        of = problem
        if choice is not None and (choice.repaired or choice.fitted):
            of = fitted if choice.fitted else repaired
        return of, of.plan_of_whole(plan)

    shipped, plan = whole(result.plan, recommended(result.choice_rows))
    models[TYPED_MODEL] = to_typed(shipped.whole, plan)
    wholes = [whole(choice.plan, choice)[1] for choice in result.choice_rows]

    def plan_json(draft: Path) -> str:
        digests = _digest(draft / REPAIRED_MODEL), _digest(draft / FITTED_MODEL)
        return result.plan_json(plan, *digests, wholes) + "\n"

    texts: dict[str, Content] = {**_csv_files(tables), **_documents(result), PLAN: plan_json}
    write_files(result.folder, {**models, **texts, RUN: to_json(result.as_json()) + "\n"})


def _digest(model: Path) -> str:
    """The SHA-256 of a model and the weights beside it; empty where there is none."""
    files = [path for path in (model, model.with_name(f"{model.name}.data")) if path.exists()]
    return digest_of(*files) if files else ""


def _csv_files(tables: Mapping[str, pd.DataFrame]) -> dict[str, str]:
    """The content of each table's file."""
    return {f"{name}.csv": to_csv(table, TABLES[name]) for name, table in tables.items()}


def _documents(result: Record) -> dict[str, str]:
    """The documents that can be written again from a run's folder."""
    return {
        "report.md": as_markdown(result),
        "report.html": as_html(result),
        "junit.xml": as_junit(result),
    }


def write_documents(result: Record) -> None:
    """Writes report.html, report.md and junit.xml again."""
    write_files(result.folder, _documents(result))


def write_tables(result: Record) -> None:
    """Writes the error tables alone, layers.csv and outputs.csv."""
    tables = {"layers": result.layers, "outputs": result.outputs}
    write_files(result.folder, _csv_files(tables))


Content = str | onnx.ModelProto | Callable[[Path], str]
"""A file's text or model, or what gives the text from the folder of the files before it."""


def write_files(folder: Path, contents: Mapping[str, Content]) -> None:
    """Writes texts and models into ``folder``, all or none, the last one last.

    Raises:
        MachineError: the disk is full.
        BadInputError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with scratch("result", folder) as name:
            draft = Path(name)
            for file_name, content in contents.items():
                if isinstance(content, onnx.ModelProto):
                    save_model(content, draft / file_name)
                    continue
                text = content if isinstance(content, str) else content(draft)
                (draft / file_name).write_bytes(text.encode(errors="replace"))
            # Weights beside a model first: without them it could not be loaded.
            weights = [path.name for path in draft.iterdir() if path.name not in contents]
            for file_name in (*weights, *contents):
                os.replace(draft / file_name, folder / file_name)
    except OSError as error:
        raise not_written(f"--out {folder}", error, "; choose another folder") from error


def to_json(value: Any) -> str:
    """Writes strict JSON: NaN becomes null, infinities the strings "inf" and "-inf"."""
    return json.dumps(_plain(value), indent=2, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if hasattr(value, "item"):  # a NumPy scalar
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def write_verification(found: Verification) -> None:
    """Writes verify.json and verify.junit.xml, each whole."""
    record = to_json(found.as_json()) + "\n"
    write_files(found.folder, {VERIFY_RECORD: record, VERIFY_JUNIT: verification_as_junit(found)})


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
