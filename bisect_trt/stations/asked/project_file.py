"""``bisect.toml``: the models of a project, what each is asked, and what holds for all of them.

Keys are the options of ``run`` without their dashes; the command line overrides them.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from bisect_trt.core.errors import BadInputError, one_line
from bisect_trt.numerics.draws.variants import check_kinds
from bisect_trt.numerics.requirements.requirement_text import check_requirements
from bisect_trt.stations.asked.named_layers import compiled
from bisect_trt.stations.asked.option import Option
from bisect_trt.stations.asked.settings import Settings, options

PROJECT_FILE = "bisect.toml"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_FILES = ("--input", "--holdout", "--metric", "--variants")
"""Options whose texts may be paths, or functions in files."""


@dataclass(frozen=True)
class Project:
    """``runs`` are the settings by the models' names, in the file's order; each has its folder in
    ``out``.
    """

    path: Path
    out: Path
    runs: Mapping[str, Settings]


def run_keys() -> dict[str, tuple[str, Option]]:
    """What a model may be asked, by key: the field of the settings and its option."""
    taken = {n: its for n, its in options().items() if "run" in its.commands and n != "out"}
    return {its.flag.removeprefix("--"): (name, its) for name, its in taken.items()}


def read_project(path: Path, out: Path | None, overriding: Mapping[str, Any]) -> Project:
    """The project that a file describes; every model's settings are checked before any runs.

    Args:
        path: of the TOML file; paths in it are relative to its folder.
        out: the gate's folder, where it is not the file's.
        overriding: fields of the settings that the command line gave.

    Raises:
        BadInputError: the file cannot be read, or says something that nobody understands.
    """
    data = _parsed(path)
    _check_keys(path, "", data, ("out", "defaults", "models"))
    defaults, models = data.get("defaults", {}), data.get("models", {})
    for name, value in (("defaults", defaults), ("models", models)):
        if not isinstance(value, dict):
            raise BadInputError(f"{path}: {name} must be a table")
    named = data.get("out", "reports/gate")
    if not isinstance(named, str) or not named:
        raise BadInputError(f"{path}: out must be a path")
    folder = out if out is not None else path.parent / named
    shared = _fields(path, "[defaults]", defaults, ())
    if not models:
        raise BadInputError(f"{path}: names no model; add a table [models.NAME]")
    runs = {}
    for name, asked in models.items():
        where = f"[models.{name}]"
        if not _NAME.fullmatch(name):
            raise BadInputError(f"{path}: {where}: a name is letters, digits, dots and dashes")
        own = _fields(path, where, asked, ("model", "input"))
        chosen = {**shared, **own, **overriding, "out": folder / name}
        try:
            runs[name] = Settings(**chosen)
            _check_values(runs[name])
        except BadInputError as error:
            raise BadInputError(f"{path}: {where}: {error}") from error
    return Project(path, folder, runs)


def _check_values(settings: Settings) -> None:
    """What can be known to be wrong before a model is read."""
    check_requirements(settings.require, [str(metric) for metric in settings.metrics])
    check_kinds(settings.variants)
    for flag, texts in (("--pin", settings.pin), ("--lower", settings.lower)):
        for text in texts:
            compiled(flag, text)


def _parsed(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BadInputError(
            f"{path}: no such file; write one (see docs/gate.md), or name it with --config"
        ) from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise BadInputError(f"{path}: cannot be read ({one_line(error, 120)})") from error


def _check_keys(path: Path, where: str, table: Mapping[str, Any], known: Iterable[str]) -> None:
    known = list(known)
    for key in table:
        if key not in known:
            near = get_close_matches(key, known, 1, 0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            at = f"{where}: " if where else ""
            raise BadInputError(f"{path}: {at}unknown key {key!r}; {hint}")


def _fields(path: Path, where: str, table: Any, required: Sequence[str]) -> dict[str, Any]:
    """The settings' fields that a table gives."""
    if not isinstance(table, dict):
        raise BadInputError(f"{path}: {where} must be a table")
    keys = run_keys()
    _check_keys(path, where, table, [*required, *keys])
    for key in required:
        if key not in table:
            raise BadInputError(f"{path}: {where}: lacks {key!r}")
    found: dict[str, Any] = {}
    for key, value in table.items():
        if key in ("model", "input"):
            its = Option(f"--{key}", "", kind=Path, repeatable=key == "input")
            name = {"model": "model", "input": "inputs"}[key]
        else:
            name, its = keys[key]
        if not _fits(its, value):
            kind = "a list of texts" if its.repeatable else _words(its)
            raise BadInputError(f"{path}: {where}: {key} must be {kind}")
        several = [value] if its.repeatable and isinstance(value, str) else value
        found[name] = _placed(its, several, path.parent)
    return found


def _fits(its: Option, value: Any) -> bool:
    """TOML has types, so that a text is no number and a number no switch."""
    if its.repeatable and isinstance(value, list):
        return all(isinstance(v, str) for v in value)
    if its.kind in (int, float):
        kinds = (int,) if its.kind is int else (int, float)
        return isinstance(value, kinds) and not isinstance(value, bool)
    return isinstance(value, bool if its.kind is bool else str)


def _words(its: Option) -> str:
    words = {int: "a whole number", float: "a number", bool: "true or false"}
    return words.get(its.kind, "a text")


def _placed(its: Option, value: Any, folder: Path) -> Any:
    """Paths beside the file, where it lies elsewhere than the command was started."""
    if isinstance(value, list):
        return [_placed(its, v, folder) for v in value]
    if not isinstance(value, str) or not (its.kind is Path or its.flag in _FILES):
        return value
    if its.flag == "--variants" and "," in value:
        return ",".join(_placed(its, kind.strip(), folder) for kind in value.split(","))
    in_file = ".py:" in value
    named = value == "none" or _MODULE.fullmatch(value) or its.flag == "--variants"
    return value if not value or (named and not in_file) else str(folder / value)
