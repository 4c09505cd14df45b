"""Reads a project file, and writes the result of all its models."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pandas as pd

from bisect_trt.base.display import counted, xml_text
from bisect_trt.base.errors import (
    EXIT_NO_RUNNER,
    EXIT_NOT_MET,
    EXIT_OK,
    BadInputError,
    one_line,
)
from bisect_trt.base.outcomes import word_of
from bisect_trt.inputs.augmentations import check_kinds
from bisect_trt.inputs.images import image_options
from bisect_trt.metrics.parser import check_requirements
from bisect_trt.metrics.requirements import times
from bisect_trt.metrics.time_limits import (
    JudgedLimit,
    TimeLimit,
    judged_from_json,
    with_timed_engine,
)
from bisect_trt.repair.rules import rules_of
from bisect_trt.report.choices import recommended, recommended_speed
from bisect_trt.report.files import OwnedFolder, to_json, write_files
from bisect_trt.report.headline import headline
from bisect_trt.report.junit import as_junit
from bisect_trt.report.markdown import Page, Section, page_as_markdown
from bisect_trt.report.record import Record
from bisect_trt.report.tables import judged_scores, share_kept
from bisect_trt.settings import FORMER, Option, Settings, options
from bisect_trt.steps.saved_plan import compiled

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_FILES = ("--input", "--holdout", "--metric", "--augmented")
"""Options whose values may be paths, or functions in files."""


@dataclass(frozen=True)
class Project:
    """A project file."""

    path: Path
    out: Path  # folder of all runs
    runs: Mapping[str, Settings]  # settings of each model by name, in file order
    warnings: Sequence[str] = ()  # keys of older versions in the file


def run_keys() -> dict[str, tuple[str, Option]]:
    """The keys of a model's table, each with its field of the settings and its option."""
    return {
        option.flag.removeprefix("--"): (name, option)
        for name, option in options().items()
        if option.commands & {"run", "gate"} and name != "out"
    }


def read_project(path: Path, out: Path | None, overriding: Mapping[str, Any]) -> Project:
    """Reads a project file and checks the settings of every model before any runs.

    Raises:
        BadInputError: the file cannot be read, or a key or value is wrong.
    """
    data = _parsed(path)
    _check_keys(path, "", data, ("out", "defaults", "models"))
    defaults, models = data.get("defaults", {}), data.get("models", {})
    for name, value in (("defaults", defaults), ("models", models)):
        if not isinstance(value, dict):
            raise BadInputError(f"{path}: {name} must be a table")
    own_out = data.get("out", "reports/gate")
    if not isinstance(own_out, str) or not own_out:
        raise BadInputError(f"{path}: out must be a path")
    folder = out if out is not None else path.parent / own_out
    warnings: list[str] = []
    shared = _fields(path, "[defaults]", defaults, (), warnings)
    if not models:
        raise BadInputError(f"{path}: names no model; add a table [models.NAME]")
    runs = {}
    for name, table in models.items():
        where = f"[models.{name}]"
        if not _NAME.fullmatch(name):
            raise BadInputError(f"{path}: {where}: a name is letters, digits, dots and dashes")
        own = _fields(path, where, table, ("model", "input"), warnings)
        chosen = {**shared, **own, **overriding, "out": folder / name}
        try:
            runs[name] = Settings(**chosen, precision_given="precision" in chosen)
            _check_values(runs[name])
            runs[name] = with_timed_engine(runs[name])
        except BadInputError as error:
            raise BadInputError(f"{path}: {where}: {error}") from error
    return Project(path, folder, runs, warnings)


def _check_values(settings: Settings) -> None:
    """Refuses values that are wrong for every model."""
    check_requirements(settings.require, [str(metric) for metric in settings.metric])
    check_kinds(settings.augmented)
    image_options(settings)
    rules_of(settings.repair)
    for text in settings.keep_fp32:
        compiled("--keep-fp32", text)
    for text in settings.keep_reduced:
        compiled("--keep-reduced", text)


def _parsed(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BadInputError(
            f"{path}: no such file; write one (see docs/ci.md), or name it with --config"
        ) from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise BadInputError(f"{path}: cannot be read ({one_line(error, 120)})") from error


def _check_keys(path: Path, where: str, table: Mapping[str, Any], valid: Sequence[str]) -> None:
    for key in table:
        if key not in valid:
            near = get_close_matches(key, valid, 1, 0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(valid)}"
            place = f"{where}: " if where else ""
            raise BadInputError(f"{path}: {place}unknown key {key!r}; {hint}")


def _in_todays_keys(table: Mapping[str, Any], where: str, warnings: list[str]) -> dict[str, Any]:
    """Replaces keys of older versions in ``table``, each with a warning."""
    today: dict[str, Any] = {}
    for key, value in table.items():
        name, translated = FORMER.get(f"--{key}", (f"--{key}", str))
        new = name.removeprefix("--")
        if new != key:
            warnings.append(f"{where}: {key!r} is called {new!r} now")
            is_number = isinstance(value, float | int) and not isinstance(value, bool)
            value = float(translated(str(value))) if is_number else value
        today[new] = value
    return today


def _fields(
    path: Path, where: str, table: Any, required: Sequence[str], warnings: list[str]
) -> dict[str, Any]:
    """The fields of the settings that a table sets."""
    if not isinstance(table, dict):
        raise BadInputError(f"{path}: {where} must be a table")
    table = _in_todays_keys(table, where, warnings)
    keys = run_keys()
    _check_keys(path, where, table, [*required, *keys])
    for key in required:
        if key not in table:
            raise BadInputError(f"{path}: {where}: lacks {key!r}")
    found: dict[str, Any] = {}
    for key, value in table.items():
        if key in ("model", "input"):
            option = Option(f"--{key}", "", kind=Path, repeatable=key == "input")
            name = "model" if key == "model" else "inputs"
        else:
            name, option = keys[key]
        if not _fits(option, value):
            words = {int: "a whole number", float: "a number", bool: "true or false"}
            kind = "a list of texts" if option.repeatable else words.get(option.kind, "a text")
            raise BadInputError(f"{path}: {where}: {key} must be {kind}")
        listed = [value] if option.repeatable and isinstance(value, str) else value
        found[name] = _relative_to(path.parent, option, listed)
    return found


def _fits(option: Option, value: Any) -> bool:
    """Whether a TOML value has the option's type."""
    if option.repeatable and isinstance(value, list):
        return all(isinstance(v, str) for v in value)
    if option.kind in (int, float):
        kinds = (int,) if option.kind is int else (int, float)
        return isinstance(value, kinds) and not isinstance(value, bool)
    return isinstance(value, bool if option.kind is bool else str)


def _relative_to(folder: Path, option: Option, value: Any) -> Any:
    """Makes the paths in an option's value relative to the project file's folder."""
    if isinstance(value, list):
        return [_relative_to(folder, option, v) for v in value]
    if not isinstance(value, str) or not (option.kind is Path or option.flag in _FILES):
        return value
    if option.flag == "--augmented" and "," in value:
        return ",".join(_relative_to(folder, option, kind.strip()) for kind in value.split(","))
    in_file = ".py:" in value
    is_name = value == "none" or _MODULE.fullmatch(value) or option.flag == "--augmented"
    return value if not value or (is_name and not in_file) else str(folder / value)


MARKDOWN = "gate.md"
RECORD = "gate.json"
JUNIT = "junit.xml"
_OWNED = OwnedFolder("bisect-trt gate", frozenset({MARKDOWN, RECORD, JUNIT}), RECORD)


@dataclass(frozen=True)
class Entry:
    """The result of one model."""

    name: str  # name in the project file
    exit_code: int
    result: Record | None = None  # record of its run; None after an error
    error: str = ""  # one line on the error
    limits: Sequence[JudgedLimit] = ()  # what its time was held to

    @property
    def is_refuted(self) -> bool:
        """Whether its plan passes on the given inputs but is refuted by validation."""
        return self.result is not None and self.result.passed and self.result.is_refuted

    @property
    def is_unsure(self) -> bool:
        """Whether it meets the requirements and --strict asks for a validated answer."""
        found = self.result
        return found is not None and found.is_met and found.exit_code != EXIT_OK

    @property
    def is_slow(self) -> bool:
        """Whether it meets the requirements and misses a time limit."""
        meets = self.result is not None and self.result.is_met
        return meets and any(limit.met is False for limit in self.limits)

    @property
    def said(self) -> str:
        """The answer in one sentence, with what was missed and the cause."""
        found = self.result
        if found is None:
            return self.error
        if found.is_met:
            unsure = " Not validated, as --strict asks." if self.is_unsure else ""
            return f"{headline(found)}{unsure}{self._limits_in_words()}"
        scores = judged_scores(found.by_requirement)
        missed = [f"{r} ({times(score)})" for r, score in scores.items() if not score <= 1.0]
        which = f" Missed: {', '.join(missed)}." if missed else ""
        return f"{headline(found)}{which} {found.sentence}"

    def _limits_in_words(self) -> str:
        """Each time limit and what was found, the missed ones first."""
        said = ""
        words = {False: "Too slow", None: "Time not judged", True: "Fast enough"}
        for met, begin in words.items():
            those = [f"{x.text} ({x.found})" for x in self.limits if x.met is met]
            said += f" {begin}: {', '.join(those)}." if those else ""
        return said


def judged_entry(name: str, result: Record, limits: Sequence[TimeLimit]) -> Entry:
    """The entry of a model that was run, held to ``limits``."""
    speed = recommended_speed(result.choice_rows)
    judged = tuple(limit.judged(speed) for limit in limits)
    codes = {True: EXIT_OK, False: EXIT_NOT_MET, None: EXIT_NO_RUNNER}
    # Without a plan that passes there is nothing to time.
    code = result.exit_code or max((codes[limit.met] for limit in judged), default=EXIT_OK)
    return Entry(name, code, result, limits=judged)


@dataclass(frozen=True)
class Gate:
    """The results of a project."""

    folder: Path  # of the gate's own files
    entries: Sequence[Entry]  # models that were run, in file order
    planned: int  # number of models in the file

    @property
    def exit_code(self) -> int:
        """The largest exit code of the models, so that errors outrank missed requirements."""
        return max((entry.exit_code for entry in self.entries), default=0)


def check_gate_folder(folder: Path, models: Iterable[str]) -> None:
    """Refuses a folder that has files of the gate's names from another source."""
    if clashes := sorted(_OWNED.files.intersection(models)):
        raise BadInputError(f"[models.{clashes[0]}]: the gate writes a file of that name")
    if folder.exists() and not folder.is_dir():
        raise BadInputError(f"--out {folder}: not a folder; choose another name")
    strange = sorted(name for name in _OWNED.files if (folder / name).exists())
    if strange and not _OWNED.is_ours(folder):
        raise BadInputError(
            f"--out {folder}: holds {strange[0]}, which no `bisect-trt gate` wrote; choose another "
            "folder, or move it away"
        )


def _table(gate: Gate) -> pd.DataFrame:
    """A row per model."""
    rows: list[dict[str, Any]] = []
    for entry in gate.entries:
        word = {0: "pass", 1: "MISSED"}.get(entry.exit_code, f"ERROR {entry.exit_code}")
        row: dict[str, Any] = {"model": entry.name, "gate": word}
        found = entry.result
        if found is not None:
            row["recommended"] = _recommended(found)
            row["pins"] = f"{len(found.pinned)} of {found.layer_count}"
            row["score"] = found.score
            row |= _speed_in_words(found)
            row["inputs"] = word_of(found.validation) or ""
            row["judged by"] = found.runner
            row["new evaluations"] = str(found.new_evaluations)
            row["seconds"] = round(found.seconds, 1)
        rows.append({**row, "answer": entry.said})
    return pd.DataFrame(rows)


def _speed_in_words(found: Record) -> dict[str, str]:
    """The recommended choice's latency and the share of the saving that it keeps, where known."""
    chosen = recommended(found.choice_rows)
    words: dict[str, str] = {}
    if chosen is not None and chosen.latency_ms is not None:
        words["ms"] = f"{chosen.latency_ms:.3f}"
    if chosen is not None and chosen.saving_kept is not None:
        words["saving kept"] = share_kept(chosen)
    return words


def _recommended(found: Record) -> str:
    """The recommended choice, such as "repaired (fold-bn), 0 layers"; empty where none is."""
    chosen = recommended(found.choice_rows)
    if chosen is None:
        return ""
    return f"{chosen.in_words(found.repair.rules)}, {counted(len(chosen.pinned), 'layer')}"


def gate_page(gate: Gate) -> Page:
    """The answer and the table of models."""
    slow = _names(e for e in gate.entries if e.exit_code == 1 and e.is_slow)
    unsure = _names(e for e in gate.entries if e.is_unsure)
    known = [e for e in gate.entries if e.is_refuted or e.is_slow or e.is_unsure]
    missed = _names(e for e in gate.entries if e.exit_code == 1 and e not in known)
    refuted = _names(e for e in gate.entries if e.is_refuted)
    broken = _names(e for e in gate.entries if e.exit_code > 1)
    done = len(gate.entries)
    closed = [f"{missed} missed the requirements"] if missed else []
    closed += [f"{slow} missed a time limit"] if slow else []
    closed += [f"{unsure} was not validated (--strict)"] if unsure else []
    closed += [f"{refuted} spent the budget on a plan that validation rejects"] if refuted else []
    lines = []
    if broken:
        answer = f"Not decided: {broken} could not be judged."
        lines = [f"{'; '.join(closed)}."] if closed else []
    elif closed:
        answer = f"Closed: {'; '.join(closed)}."
    else:
        answer = f"Open: {done} of {gate.planned} models meet their requirements."
    if done < gate.planned:
        lines.append(f"{gate.planned - done} models have not been run yet.")
    good = gate.exit_code == 0 and done == gate.planned
    return Page("bisect-trt gate", answer, good, [Section("Models", _table(gate))], lines)


def _names(entries: Iterable[Entry]) -> str:
    return ", ".join(entry.name for entry in entries)


def gate_record(gate: Gate) -> dict[str, Any]:
    """The content of gate.json."""
    models = []
    for entry in gate.entries:
        row: dict[str, Any] = {"name": entry.name, "exit_code": entry.exit_code}
        row |= {"said": entry.said, "folder": entry.name}
        for key in ("new_evaluations", "score", "pinned"):
            row[key] = getattr(entry.result, key, None)
        row["recommended"] = _recommended(entry.result) if entry.result is not None else ""
        speed = recommended_speed(entry.result.choice_rows if entry.result is not None else ())
        row |= {"latency_ms": speed.latency_ms, "saving_kept": speed.saving_kept}
        row["estimated_latency"] = speed.is_estimated
        row["hold"] = [limit.as_json() for limit in entry.limits]
        models.append(row)
    record: dict[str, Any] = {"kind": _OWNED.command, "exit_code": gate.exit_code}
    return {**record, "planned": gate.planned, "models": models}


def write_gate(gate: Gate) -> None:
    """Writes gate.md, junit.xml and gate.json, each whole."""
    texts = {
        RECORD: to_json(gate_record(gate)) + "\n",  # first: it marks the folder as the gate's
        MARKDOWN: page_as_markdown(gate_page(gate), more=RECORD),
        JUNIT: _junit(gate),
    }
    write_files(gate.folder, texts)


def _junit(gate: Gate) -> str:
    """Joins the models' suites; a model without a result is an error."""
    suites = ElementTree.Element("testsuites", name="bisect-trt gate")
    for entry in gate.entries:
        if entry.result is not None:
            suite = ElementTree.fromstring(as_junit(entry.result, entry.limits))
            suite.set("name", entry.name)
            suites.append(suite)
            continue
        counts = {"tests": "1", "failures": "0", "errors": "1"}
        suite = ElementTree.SubElement(suites, "testsuite", {"name": entry.name, **counts})
        problem = ElementTree.SubElement(suite, "testcase", classname=entry.name, name="run")
        ElementTree.SubElement(problem, "error", message=xml_text(entry.error))
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def limits_held(run: Path) -> tuple[JudgedLimit, ...]:
    """The time limits that the gate beside the run's folder held it to; none without a gate.

    Raises:
        BadInputError: the gate's file cannot be read.
    """
    path = run.resolve().parent / RECORD
    if not _OWNED.is_ours(path.parent):
        return ()
    try:
        models = json.loads(path.read_text(encoding="utf-8"))["models"]
        held = (m.get("hold", ()) for m in models if m["folder"] == run.resolve().name)
        return tuple(judged_from_json(limit) for limits in held for limit in limits)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInputError(f"{path}: cannot be read ({one_line(error, 80)})") from error
