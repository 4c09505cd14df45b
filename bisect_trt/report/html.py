"""Writes report.html: first screen, tables, plots and recipes to copy."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from bisect_trt.base.atomic_files import PLAN, TYPED_MODEL
from bisect_trt.base.display import counted, printable, some_of
from bisect_trt.base.outcomes import VANISHING, Finding
from bisect_trt.base.plan import Precision
from bisect_trt.inputs.images import IMAGES
from bisect_trt.metrics.requirements import NOTHING_ALLOWED, brief, times
from bisect_trt.metrics.rounding import LARGEST
from bisect_trt.report import figures, tables, text
from bisect_trt.report.build import (
    ENGINE,
    Profile,
    allows_tf32,
    build_words,
    profile_of_inputs,
    why_no_tf32,
)
from bisect_trt.report.choices import saved_by_repair
from bisect_trt.report.columns import names_in
from bisect_trt.report.first_lines import verdict_line
from bisect_trt.report.headline import (
    cause_sentence,
    files_line,
    headline,
    next_step,
    not_covered,
)
from bisect_trt.report.record import Record
from bisect_trt.report.repairs import proof_sentence, refusal_lines
from bisect_trt.report.weights import weights_table
from bisect_trt.settings import options

SHOWN_ROWS = 300
"""Rows of a table in the page; the CSV files have all."""

_TRADEOFF = names_in(
    "pins set given_share perturbed_share perturbed_lower_bound augmented_share holdout_share "
    "p50_score p95_score worst_score latency_ms"
)
_INPUTS = ("input", "kind", "all reduced", "with the answer", "passed")
_SEARCH = names_in("evaluation runner on base pins outcome score seconds note")
_NAMED = names_in("layer op module where")
_PINS = names_in(
    "layer op module where sensitivity held inherited proved proved_on proof_evaluation "
    "outcome_without score_without missed_on"
)
_FLAGS = names_in("pinned source finite engine_finite")
_LAYERS = names_in(
    "layer op module where pinned source rank sensitivity introduced_rel_range rel_range "
    "max_abs snr_db finite engine_rel_range engine_finite ref_min ref_max channels"
)
_TITLES = {
    "introduced_rel_range": "own error / range",
    "rel_range": "error / range",
    "max_abs": "largest error",
    "snr_db": "SNR, dB",
    "engine_rel_range": "engine error / range",
    "engine_finite": "engine finite",
    "ref_min": "smallest value",
    "ref_max": "largest value",
}
"""Titles of columns in the page; tooltips give their names in layers.csv."""

SHOWN_BARS = 20
MOST_CAUSES = 5
_MEASURES = {
    "sensitivity": "Score of the outputs, in tolerances, when only this layer is reduced",
    "introduced_rel_range": "Error of the layer alone, over its range",
}
"""What bars show, by the column of layers.csv; the first one that was measured."""

_RUNNERS = {"emulated": "emulator", "emulated-whole": "second emulator"}

_SCRIPTS = ("plotly-basic.min.js", "dataTables.min.js", "report.js")
_STYLES = ("dataTables.min.css", "report.css", "answer.css")


@cache
def environment() -> Environment:
    """The templates of pages, which escape all values."""
    # Jinja's select_autoescape goes by file endings, and .j2 would escape nothing.
    templates = _templates(autoescape=True, finalize=_harmless)
    templates.filters |= {"brief": brief, "cell": text.number, "code": _code}
    return templates


@cache
def text_environment() -> Environment:
    """The templates of other files, which do not escape; callers do."""
    return _templates(autoescape=False, keep_trailing_newline=True)


def _templates(**more: Any) -> Environment:
    return Environment(
        loader=PackageLoader("bisect_trt.report"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        **more,
    )


@cache
def _asset(name: str) -> Markup:
    """The text of an asset, trusted as markup."""
    return Markup((files("bisect_trt.report") / "assets" / name).read_text(encoding="utf-8"))


def _harmless(value: Any) -> Any:
    """Spells out control characters in text; leaves markup as it is."""
    return printable(value) if type(value) is str else value


def _code(lines: str) -> Markup:
    """Lines of code, with all control characters except line breaks spelled out."""
    return Markup("\n").join(printable(line) for line in lines.split("\n"))


def _answer(result: Record) -> dict[str, Any]:
    """The values for ``answer.html.j2``, the first screen."""
    rules, required = result.repair.rules, result.requirements
    choices = tables.choices_table(result.choice_rows, rules, required)
    return {
        "result": result,
        "tone": text.tone(result),
        "word": verdict_line(result),
        "headline": headline(result),
        "cause": cause_sentence(result),
        # The table's caption and rows say the first sentence.
        "validation": [*text.validation_sentences(result.validation)[1:], *not_covered(result)],
        "caption": text.verdict_words(result.validation) or "What it holds on",
        "next_step": next_step(result),
        "tested": result.validation.tested if result.validation is not None else [],
        "letter": figures.letter,
        "choices": _whole(choices),
        "judged_by": text.judged_by(result),
    }


def as_fragment(result: Record) -> str:
    """The first screen as an element for a notebook."""
    style = _asset("notebook.css") + _asset("answer.css")
    template = environment().get_template("notebook.html.j2")
    return template.render(style=style, files=files_line(result), **_answer(result))


def as_html(result: Record) -> str:
    """The whole page; names from models and paths cannot become markup or scripts in it."""
    # The cause is in the model as given: a repair may have removed the layer to blame.
    given = result.original_layers if len(result.original_layers) else result.layers
    plots = _figures(result, given)
    data = {
        "figures": [f.as_json() for f in plots.values()],
        "layers": layer_data(result.layers),
        "names": [printable(str(name)) for name in given["layer"]],
    }
    by_kind: dict[str, list[Finding]] = {}
    # Constants that partly vanish are many and harmless, so they come last.
    for finding in sorted(result.findings, key=lambda f: (not f.weighty, f.kind == VANISHING)):
        by_kind.setdefault(finding.kind, []).append(finding)
    inputs = _with_worst(tables.worst_inputs(result.inputs))
    of_engine = result.engine
    shipped = recipes(result)
    return (
        environment()
        .get_template("report.html.j2")
        .render(
            **_answer(result),
            figures=plots,
            build=shipped[0] if shipped else None,
            recipes=shipped[1:],
            bars=_bars(given, result),
            lowest=figures.LOWEST_SCORE,
            is_cut=_is_cut(plots),
            of_original=given is result.original_layers,
            beyond=_beyond(given, result.precision),
            cures=_whole(tables.cures_table(result)),
            tradeoff=_table(result.tradeoff.dropna(axis=1, how="all"), _TRADEOFF),
            scores=_scores(result.by_requirement),
            outputs=_table(result.outputs, tables.OUTPUT_COLUMNS),
            images=[f.message for f in result.findings if f.kind == IMAGES],
            inputs_summary=_inputs_summary(result),
            inputs=_table(inputs, _INPUTS, left_out=len(result.inputs) - len(inputs)),
            searched=text.search_sentences(result),
            search=_table(_in_words(result.search), _SEARCH),
            pins=_table(_with_places(tables.shown_pins(result)), _PINS),
            unproved=text.unproved(result),
            ordered_by=text.sensitivity_sentences(result),
            sources=text.sources(given),
            proved=bool(result.pins["proved"].any()),
            cost=_table(result.cost, tables.COST_COLUMNS),
            candidates=_whole(tables.candidates_table(of_engine.candidates if of_engine else ())),
            times=_whole(tables.times_table(of_engine.times if of_engine else ())),
            weights=_whole(weights_table(result.weights)),
            repairs=_whole(tables.repairs_table(result.repair)),
            repair_lines=[
                *([proof_sentence(result.repair.proof)] if result.repair.proof else []),
                *filter(None, [saved_by_repair(result.choice_rows)]),
                *refusal_lines(result.repair)[:SHOWN_ROWS],
            ],
            engine=text.engine_sentences(result),
            has_layers=len(result.layers) > 0,
            findings=list(by_kind.values()),
            evaluations={_RUNNERS.get(name, name): n for name, n in result.evaluations.items()},
            command=_folded(shlex.split(result.command)) if result.command else "",
            scripts=[_asset(name) for name in _SCRIPTS],
            styles=[_asset(name) for name in _STYLES],
            policy=_policy(),
            data=_script_json(data),
        )
    )


def _is_cut(plots: Mapping[str, figures.Figure]) -> bool:
    """Whether an error is smaller than the plots show."""
    traces = plots["layers-plot"].data if "layers-plot" in plots else ()
    return any(figures.LOWEST_SCORE in trace["y"] for trace in traces)


class Bar(NamedTuple):
    """A layer of the bars: ``width`` is in per cent, ``score`` in words."""

    layer: str
    op: str
    place: str
    score: str
    width: float
    fails: bool
    is_cause: bool
    pinned: bool


class Bars(NamedTuple):
    """The layers that harm the most, and what is measured."""

    measure: str
    unit: str
    rows: Sequence[Bar]


def _bars(layers: pd.DataFrame, result: Record) -> Bars:
    """The layers with the largest sensitivity, or own error where that was not measured."""
    measured = (c for c in _MEASURES if c in layers and (layers[c].astype(float) > 0.0).any())
    column = next(measured, None)
    if column is None:
        return Bars("", "", ())
    scores = layers[column].astype(float)
    scores = scores[scores > 0.0].nlargest(SHOWN_BARS)
    finite = [math.log10(s) for s in scores if s < NOTHING_ALLOWED]
    low, high = min(finite, default=0.0) - 0.3, max(finite, default=1.0)
    by_name = _with_places(layers).loc[scores.index].to_dict(orient="records")
    causes = {name for cause in result.causes[:1] for name in cause.layers}
    if result.error_share is not None:
        causes = set(result.error_share.layers)
    elif len(causes) > MOST_CAUSES:  # a mark on every row says nothing
        causes = set()
    pinned, is_score = set(result.pinned), column == "sensitivity"
    rows = []
    for row, score in zip(by_name, scores, strict=True):
        part = 1.0 if score >= NOTHING_ALLOWED else (math.log10(score) - low) / (high - low)
        name = str(row["layer"])
        rows.append(
            Bar(
                layer=name,
                op=str(row["op"]),
                place=", ".join(str(row[c]) for c in ("module", "where") if row.get(c)),
                score=brief(score) if is_score else text.number(score),
                width=round(100.0 * part, 1),
                fails=is_score and score > 1.0,
                is_cause=name in causes,
                pinned=name in pinned,
            )
        )
    return Bars(_MEASURES[column], "score" if is_score else "error", rows)


def _beyond(layers: pd.DataFrame, precision: Precision) -> list[str]:
    """The layers whose activations or constants are beyond the largest value, in words."""
    limit, found = LARGEST.get(precision, math.inf), list[tuple[float, str]]()
    if "ref_max" not in layers:
        return []
    kinds = {"activations": layers[["ref_min", "ref_max"]].abs().max(axis=1)}
    ends = figures.constant_ends(layers)
    if ends is not None:
        kinds["constants"] = ends[1]
    for kind, sizes in kinds.items():
        for name, size in zip(layers["layer"], sizes, strict=True):
            if size > limit:
                found.append((float(size), f"{name}: {kind} up to {size:.3g}"))
    return [words for _, words in sorted(found, reverse=True)]


def _inputs_summary(result: Record) -> str:
    """How many inputs there are, their shapes, and the worst score."""
    table = result.inputs
    if table.empty:
        return ""
    said = [f"{n} {kind}" for kind, n in table["kind"].value_counts().items()]
    lines = [f"{counted(len(table), 'input')}: {', '.join(said)}."]
    if "shapes" in table:
        shapes: dict[str, dict[str, None]] = {}
        for row in table["shapes"]:
            for name, shape in json.loads(row).items():
                shapes.setdefault(name, {})["x".join(map(str, shape)) or "scalar"] = None
        lines += [f"{name}: {some_of(list(found), 4)}." for name, found in shapes.items()][:8]
    scored = [c for c in table if str(c).startswith("plan_score_")]
    if scored and table[scored].notna().any(axis=None):
        scores = table[scored].max(axis=1)
        worst = table["input"].iloc[int(scores.argmax())]
        lines.append(f"The worst with the answer is {worst}: {times(float(scores.max()))}.")
    return " ".join(lines)


def _with_worst(inputs: pd.DataFrame) -> pd.DataFrame:
    """Adds each input's worst score over all runners."""
    for title, start in (("all reduced", "reduced_score_"), ("with the answer", "plan_score_")):
        of_runners = [c for c in inputs if str(c).startswith(start)]
        if of_runners:
            scores = inputs[of_runners].max(axis=1)
            inputs = inputs.assign(**{title: scores.map(brief)})
    return inputs


def _in_words(search: pd.DataFrame) -> pd.DataFrame:
    """The search's evaluations, with plain names of the emulators."""
    return search.assign(runner=search["runner"].replace(_RUNNERS)) if len(search) else search


def _scores(by_requirement: pd.DataFrame) -> Table:
    """The score of each requirement in each baseline."""
    if by_requirement.empty:
        return Table((), ())
    columns = list(dict.fromkeys(name for scores in by_requirement["baselines"] for name in scores))
    rows = zip(by_requirement["requirement"], by_requirement["baselines"], strict=True)
    return Table(columns, [[text, *map(scores.get, columns)] for text, scores in rows])


def _figures(result: Record, given: pd.DataFrame) -> dict[str, figures.Figure]:
    """The plots that have data, by name; ``given`` has the layers of the model as given."""
    # An answer without layers in FP32 is a curve of one point.
    is_curve = len(result.tradeoff) > 1 or result.original_tradeoff.empty
    curve = result.tradeoff if is_curve else result.original_tradeoff
    found = (
        *figures.curve_figures(curve, tables.by_weight(result.choice_rows)),
        figures.errors_figure(given),
        figures.ranges_figure(given, result.precision),
    )
    return {figure.name: figure for figure in found if figure is not None}


@cache
def _policy() -> str:
    """The Content-Security-Policy: nothing is loaded, only the page's own scripts run."""
    digests = [hashlib.sha256(_asset(name).encode()).digest() for name in _SCRIPTS]
    allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    # Plotly and DataTables set inline styles, and Plotly exports pictures as data.
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _script_json(data: Any) -> Markup:
    """JSON for a script element, escaped so that no text can end the element."""
    written = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    for character in "<>&\u2028\u2029":
        written = written.replace(character, f"\\u{ord(character):04x}")
    return Markup(written)


class Table(NamedTuple):
    """Rows under columns; ``left_out`` counts the rows that only the CSV file has."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    left_out: int = 0


def _table(table: pd.DataFrame, columns: Sequence[str], left_out: int = 0) -> Table:
    present = [c for c in columns if c in table]
    rows = text.scores_in_words(table[present].head(SHOWN_ROWS)).to_numpy(dtype=object).tolist()
    return Table(present, rows, max(left_out, len(table) - SHOWN_ROWS))


def _whole(table: pd.DataFrame) -> Table:
    return _table(table, [str(column) for column in table])


def layer_data(table: pd.DataFrame) -> dict[str, Any]:
    """Every layer for the page's script: columns with their kinds, rows of plain values."""
    shown = _with_places(table)
    columns, values = [], []
    for name in (c for c in _LAYERS if c in shown):
        kind = "text" if name in _NAMED else "flag" if name in _FLAGS else "number"
        columns.append({"name": name, "title": _TITLES.get(name, name), "kind": kind})
        values.append([_plain(value, kind) for value in shown[name]])
    return {"columns": columns, "rows": [list(row) for row in zip(*values, strict=True)]}


def _plain(value: Any, kind: str) -> float | int | str | None:
    """A value for JSON: None for unknown, the texts "inf" and "-inf" for infinities."""
    if kind == "text":
        return printable(str(value))
    if pd.isna(value):
        return None
    if kind == "flag":
        return int(bool(value))
    value = float(value)
    if math.isinf(value):
        return "inf" if value > 0.0 else "-inf"
    return int(value) if value.is_integer() and abs(value) < 1e6 else figures.short(value)


def _with_places(table: pd.DataFrame) -> pd.DataFrame:
    """Adds a column ``where``, such as ``net.py:21``, and drops blank columns."""
    where = [""] * len(table)
    if "file" in table:
        rows = zip(table["file"].fillna("").map(str), table["line"], strict=True)
        where = [f"{_base(f)}:{int(n)}" if f and not pd.isna(n) else "" for f, n in rows]
    table = table.assign(where=where)
    blank = [c for c in ("module", "where") if c in table and not table[c].fillna("").any()]
    return table.drop(columns=blank)


def _base(path: str) -> str:
    return (PureWindowsPath(path) if "\\" in path else PurePosixPath(path)).name


class Recipe(NamedTuple):
    """A heading, a text to copy and a note on it."""

    name: str
    text: str
    note: str = ""


def recipes(result: Record) -> list[Recipe]:
    """Ways to ship the plan; empty where no plan meets the requirements."""
    if not result.passed:
        return []
    # It stands beside the plots, where lines are short, and the first two pass by a button.
    build = _folded(build_words(result), width=36)
    required = f"--noTF32 is required: {why}" if (why := why_no_tf32(result)) else ""
    python = _python(profile_of_inputs(result), tf32=allows_tf32(result))
    # As given to the run: relative paths start at the folder in which it was started.
    words = shlex.split(result.command)
    folder = words[words.index("--out") + 1] if "--out" in words[:-1] else ""
    plan = str(Path(folder) / PLAN)
    verify = ["bisect-trt", "verify", result.model, *_input_words(words), "--plan", plan]
    note = "From where the run was started. Exit code 0 if the plan holds."
    return [
        Recipe("trtexec", build, ". ".join(filter(None, [required, "TensorRT 10 and 11."]))),
        Recipe("Python", python, "tensorrt, or tensorrt_rtx."),
        Recipe("Check it in a pipeline", _folded(verify), note),
    ]


_OF_INPUTS = frozenset(
    {
        "--input",
        "--stacked",
        "--infinite",
        "--profile",
        "--image-size",
        "--mean",
        "--std",
        "--scale",
        "--layout",
    }
)
"""Options that say how inputs are read."""


def _input_words(command: Sequence[str]) -> list[str]:
    """The options of a run's command that ``verify`` needs too; the plan has the others."""
    switches = {option.flag for option in options().values() if option.kind is bool}
    words, kept = iter(command[3:]), list[str]()  # after "bisect-trt run MODEL"
    for flag in words:
        value = [] if flag in switches else [next(words, "")]
        if flag in _OF_INPUTS:
            kept += [flag, *value]
    return kept


def _python(profile: Profile, *, tf32: bool) -> str:
    shapes = [
        f"profile.set_shape({name!r}, {', '.join(map(repr, s))})" for name, s in profile.items()
    ]
    if shapes:
        shapes.insert(0, "profile = builder.create_optimization_profile()")
        shapes.append("config.add_optimization_profile(profile)")
    template = text_environment().get_template("build_engine.py.j2")
    return template.render(model=TYPED_MODEL, engine=ENGINE, tf32=tf32, shapes=shapes).rstrip()


def _folded(words: Sequence[str], width: int = 90) -> str:
    """A command for a POSIX shell, folded at ``width`` characters."""
    lines, parts = [""], [shlex.quote(words[0])]
    for word in words[1:]:
        # An option and its value stay on one line.
        if parts[-1].startswith("-") and not word.startswith("-"):
            parts[-1] += f" {shlex.quote(word)}"
        else:
            parts.append(shlex.quote(word))
    for word in parts:
        if len(lines[-1]) + len(word) > width and lines[-1]:
            lines.append("   ")
        lines[-1] += f" {word}" if lines[-1] else word
    return " \\\n".join(lines)
