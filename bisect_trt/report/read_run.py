"""Reads the record of a run back from its folder."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from bisect_trt.base.atomic_files import RUN
from bisect_trt.base.display import printable
from bisect_trt.base.errors import BadInputError, one_line
from bisect_trt.base.outcomes import (
    Cause,
    CauseFound,
    Finding,
    InputKind,
    Reproducibility,
    Tally,
    Validation,
)
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.report.columns import TABLES, from_csv
from bisect_trt.report.record import FORMAT, EngineFacts, MarkingEffect, Record, SearchFacts

Json = Mapping[str, Any]
_Kind = TypeVar("_Kind")
_SOMETIMES = ("engines", "inputs", "tradeoff")
_SAME = (
    *("model", "runner", "sentence", "passed", "complete", "ranked", "interrupted", "command"),
    *("requirements", "samples", "metrics", "rewritten", "dynamic_inputs", "versions"),
    *("evaluations", "new_evaluations", "sensitivity_runs"),
)
"""Keys of run.json that the record has by the same names."""


def read_run(folder: Path) -> Record:
    """Reads the record of the run in ``folder``.

    Raises:
        BadInputError: no run's folder, another format, or damaged.
    """
    if not folder.is_dir():
        raise BadInputError(f"{folder}: no such folder; give the --out of a run")
    path = folder / RUN
    if not path.is_file():
        raise BadInputError(
            f"{folder}: not the folder of a finished run (it has no {RUN}); `bisect-trt run` "
            "writes one"
        )
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadInputError(f"{path}: cannot be read ({one_line(error, 80)})") from error
    _check_format(path, data)
    try:
        _check(data)
        return _result(data, folder)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else one_line(error, 120)
        raise BadInputError(
            f"{path}: damaged ({reason}); run the same command again: the answers are in the cache"
        ) from error


def _check_format(path: Path, data: Any) -> None:
    """Refuses another format, with the version that wrote it."""
    record = data if isinstance(data, dict) else {}
    if record.get("format") == FORMAT:
        return
    versions = record.get("versions")
    version = versions.get("bisect-trt") if isinstance(versions, dict) else None
    by = f"bisect-trt {one_line(str(version), 40)}" if version else "another version"
    raise BadInputError(
        f"{path}: written by {by} in format {one_line(str(record.get('format')), 20)}, and this "
        f"version reads format {FORMAT}; run the same command again"
    )


def _check(data: Json) -> None:
    """Refuses what the schema does not allow, except for keys of later versions."""
    import jsonschema  # slow to import, and few commands read runs

    schema_file = files("bisect_trt.report") / "schema" / "run.schema.json"
    text = schema_file.read_text(encoding="utf-8")
    schema = json.loads(text, object_hook=_with_later_keys)
    fault = jsonschema.exceptions.best_match(
        jsonschema.Draft202012Validator(schema).iter_errors(data)
    )
    if fault is not None:
        raise ValueError(f"{fault.json_path.removeprefix('$.')}: {fault.message}")


def _with_later_keys(part: dict[str, Any]) -> dict[str, Any]:
    """Opens a part of the schema for keys that it does not name."""
    closed = part.get("additionalProperties") is False
    return {k: v for k, v in part.items() if not (closed and k == "additionalProperties")}


def _made(kind: type[_Kind], values: Json) -> _Kind:
    """Makes a ``kind`` of the ``values`` that it has fields for; later versions may have more."""
    named = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in values.items() if name in named})


def _result(data: Json, folder: Path) -> Record:
    tables = {name: _table(folder, name) for name in TABLES}
    pinned = [str(name) for name in data["pinned"]]
    # The CSV files spell out control characters; run.json has the pins' exact names.
    exact = {printable(name): name for name in pinned}
    layers = tables["layers"]["layer"].map(lambda name: exact.get(name, name))
    engine = {k: v for k, v in data["engine"].items() if k != "cost"}
    return Record(
        **{name: data[name] for name in _SAME},
        precision=Precision(data["precision"]),
        cause=Cause(data["cause"]),
        causes=[
            CauseFound(Cause(c["name"]), tuple(c["layers"]), c["sentence"])
            for c in data.get("causes", ())
        ],
        plan=_plan(data),
        score=_number(data["score"]),
        base_score=_number(data["base_score"]),
        layer_count=int(data["layers"]),
        layers=tables["layers"].assign(layer=layers),
        outputs=tables["outputs"],
        search=tables["search"],
        pins=tables["pins"].assign(layer=pinned),
        findings=[_made(Finding, found) for found in data["findings"]],
        seconds=_number(data["seconds"]),
        folder=folder,
        cost=tables["engines"],
        engine=_engine(engine) if engine else None,
        search_facts=_search(data["search"]) if data["search"] else None,
        validation=_validation(data) if data["validation_settings"] else None,
        given_share=round(1.0 - _number(data["allow_misses"]), 12),
        inputs=tables["inputs"],
        tradeoff=tables["tradeoff"],
        by_requirement=_by_requirement(data),
        budget_minutes=data["budget"] and float(data["budget"]["minutes"]),
        out_of_time=bool(data["budget"] and data["budget"]["ended_the_search"]),
        model_digest=data["model_sha256"],
        threads=int(data["machine"]["threads"]),
    )


def _plan(data: Json) -> PrecisionPlan:
    plan = data["plan"]
    held, pinned = frozenset(plan["held"]), frozenset(data["pinned"])
    return PrecisionPlan(Precision(plan["base"]), pinned, Precision(plan["pin_precision"]), held)


def _table(folder: Path, name: str) -> pd.DataFrame:
    path = folder / f"{name}.csv"
    if not path.is_file() and name in _SOMETIMES:
        return pd.DataFrame()
    try:
        # newline="": a line break inside quotes is data.
        with path.open(encoding="utf-8", newline="") as stream:
            table = from_csv(stream.read(), TABLES[name])
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{path.name}: {one_line(error, 80)}") from error
    return table if len(table) or name == "pins" else pd.DataFrame()


def _validation(data: Json) -> Validation:
    values: dict[str, Any] = dict(data["validation_settings"])
    if "prediction_limit" in values:
        values["prediction_limit"] = _number(values["prediction_limit"])
    for kind in InputKind:
        worst = _number(data["validation"][kind.value]["worst_score"])
        values[kind.value] = _made(Tally, {**data["validation"][kind.value], "worst_score": worst})
    return _made(Validation, values)


def _engine(data: Json) -> EngineFacts:
    facts = {**data, "fp32_likeness_to_tf32": _number(data["fp32_likeness_to_tf32"])}
    for name, kind in (("marking_effect", MarkingEffect), ("reproducibility", Reproducibility)):
        if facts.get(name) is not None:
            facts[name] = _made(kind, {k: _maybe_number(v) for k, v in facts[name].items()})
    return _made(EngineFacts, facts)


def _search(data: Json) -> SearchFacts:
    return _made(SearchFacts, {**data, "suspicion_auc": _number(data["suspicion_auc"])})


def _by_requirement(data: Json) -> pd.DataFrame:
    rows = [
        {
            "requirement": row["requirement"],
            **{name: _number(row[name]) for name in ("reduced_score", "plan_score")},
            "baselines": {label: _number(score) for label, score in row["baselines"].items()},
        }
        for row in data["by_requirement"]
    ]
    return pd.DataFrame(rows)


def _number(value: Any) -> float:
    """Reads a float: JSON has null for NaN, and strings for infinities."""
    return math.nan if value is None else float(value)


def _maybe_number(value: Any) -> Any:
    return _number(value) if value in (None, "inf", "-inf") else value
