"""report.html: its first screen, its tables and plots, and what to copy."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from bisect_trt.base.atomic_files import PLAN, REWRITTEN_MODEL, TYPED_MODEL
from bisect_trt.base.display import counted, printable
from bisect_trt.base.outcomes import VANISHING, Finding, InputKind, Tally, Validation
from bisect_trt.base.plan import Precision
from bisect_trt.metrics.requirements import NOTHING_ALLOWED, brief
from bisect_trt.report import figures, tables, text
from bisect_trt.report.columns import names_in
from bisect_trt.report.headline import files_line, headline, next_step, not_covered
from bisect_trt.report.record import Record
from bisect_trt.settings import options

SHOWN_ROWS = 300
_TRADEOFF = names_in(
    "pins set given_share perturbed_share perturbed_lower_bound augmented_share holdout_share "
    "p50_score p95_score worst_score latency_ms"
)
_SEARCH = names_in("evaluation runner on base pins outcome score seconds note")
_PROOF = names_in("proved proved_on proof_evaluation outcome_without score_without missed_on")
_NAMED = names_in("layer op module where")
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
"""Titles of columns in the page; its tooltips have their names in layers.csv."""

_SCRIPTS = ("plotly-basic.min.js", "dataTables.min.js", "report.js")
_STYLES = ("dataTables.min.css", "report.css", "answer.css")


@cache
def environment() -> Environment:
    """The package's templates for pages; they escape what they are given."""
    # The template's name ends in .j2: what is chosen by endings would escape nothing.
    made = _templates(autoescape=True, finalize=_harmless)
    made.filters |= {"brief": brief, "cell": _cell, "code": _code}
    return made


@cache
def text_environment() -> Environment:
    """The package's templates for files that no browser reads; callers escape."""
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
    """A file of ours or of the libraries, as it stands in the page."""
    return Markup((files("bisect_trt.report") / "assets" / name).read_text(encoding="utf-8"))


def _harmless(value: Any) -> Any:
    """Text without characters that a browser would obey; markup of our own as it is."""
    return printable(value) if type(value) is str else value


def _code(lines: str) -> Markup:
    """Lines of code, with all control characters but line breaks spelled out."""
    return Markup("\n").join(printable(line) for line in lines.split("\n"))


def _cell(value: Any) -> str:
    """A table's cell: words for flags, blank where nothing is known."""
    if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool) or type(value).__name__ == "bool":
        return "yes" if value else "no"
    return text.number(value.item() if hasattr(value, "item") else value)


class Tile(NamedTuple):
    """A figure of the first screen: what it is, its value, and what to know about it."""

    name: str
    value: str
    note: str = ""


def _tiles(result: Record) -> list[Tile]:
    """Cause, the plan's size, before and after, and what it costs."""
    found = [Tile("cause", result.cause.value)]
    if result.passed:
        note = f"of {counted(result.layer_count, 'layer')} stay in FP32"
        found.append(Tile("pins", str(len(result.pinned)), note))
    # A larger score on an input that may miss is not the plan's.
    count = ", on the inputs that count" if result.given_share < 1.0 else ""
    everything = f"everything in {result.precision.value.upper()}{count}"
    scores = (
        ("before", result.base_score, everything),
        ("after", result.score, f"with the plan{count}"),
    )
    for name, score, words in scores:
        if name == "before" or not math.isnan(score):
            of = "tolerance, " if score < NOTHING_ALLOWED else ""
            found.append(Tile(name, brief(score), f"{of}{words}"))
    cost = _cost(result)
    return [*found, cost] if cost is not None else found


def _cost(result: Record) -> Tile | None:
    """The latency, where engines were built."""
    if "latency_ms" in result.cost:
        rows = zip(result.cost["engine"], result.cost["latency_ms"], strict=True)
        latency = {
            str(engine).rpartition(" ")[2]: f"{text.number(float(ms))} ms" for engine, ms in rows
        }
        others = [name for name in ("fp32", result.precision.value) if name in latency]
        if "plan" in latency:
            beside = ", ".join(f"{name.upper()} {latency[name]}" for name in others)
            return Tile("latency", latency["plan"], beside)
    return None


def _tested(validation: Validation | None) -> list[tuple[str, Tally, str, str]]:
    """Each kind of input that was tested: its name, what was found, the bound, the worst input."""
    found: list[tuple[str, Tally, str, str]] = []
    if validation is None:
        return found
    for kind in InputKind:
        its = validation.of(kind)
        if its.tested:
            bound = f"at least {100.0 * its.lower_bound:.1f} % of all"
            # The file's own name: the path is in inputs.csv.
            worst = re.split(r"[\\/]", its.worst)[-1]
            found.append((kind.words, its, "" if kind is InputKind.GIVEN else bound, worst))
    return found


def _answer(result: Record) -> dict[str, Any]:
    """The values of ``answer.html.j2``, the first screen."""
    return {
        "result": result,
        "tone": text.tone(result),
        "headline": headline(result),
        # The first sentence is the table's caption and rows.
        "validation": [*text.validation_sentences(result.validation)[1:], *not_covered(result)],
        "caption": text.caption_of(result.validation),
        "meaning": text.meaning_of(result.validation),
        "next_step": next_step(result),
        "held": _tested(result.validation),
        "tiles": _tiles(result),
        "judged_by": text.judged_by(result),
    }


def as_fragment(result: Record) -> str:
    """The first screen as an element of a notebook's page, in its colours."""
    style = _asset("notebook.css") + _asset("answer.css")
    template = environment().get_template("notebook.html.j2")
    return template.render(style=style, files=files_line(result), **_answer(result))


def as_html(result: Record) -> str:
    """The page. Names from models and paths are text in it.

    Templates escape, the data that scripts read is JSON, and only the page's own scripts run.
    """
    plots = _figures(result)
    data = {"figures": [f.as_json() for f in plots.values()], "layers": layer_data(result.layers)}
    by_kind: dict[str, list[Finding]] = {}
    # Constants that partly vanish are many and harmless.
    for finding in sorted(result.findings, key=lambda f: (not f.weighty, f.kind == VANISHING)):
        by_kind.setdefault(finding.kind, []).append(finding)
    inputs, layers = tables.worst_inputs(result.inputs), tables.worst_layers(result.layers)
    of_inputs = [str(c) for c in inputs if c not in ("shapes", "sha256")]
    return (
        environment()
        .get_template("report.html.j2")
        .render(
            **_answer(result),
            figures=plots,
            tradeoff=_table(result.tradeoff.dropna(axis=1, how="all"), _TRADEOFF),
            baselines=list(result.outputs["baseline"].unique()) if len(result.outputs) else [],
            scores=tables.requirement_scores(result.by_requirement, result.outputs),
            outputs=_table(result.outputs, tables.OUTPUT_COLUMNS),
            by_modules=len(result.layers) > 0 and figures.has_modules(result.layers),
            inputs=_table(inputs, of_inputs, left_out=len(result.inputs) - len(inputs)),
            searched=text.search_sentences(result),
            search=_table(result.search, _SEARCH),
            pins=pin_rows(result),
            unproved=text.unproved(result),
            alone=text.misses_alone(result.layers),
            sources=text.sources(result.layers),
            proved=bool(result.pins["proved"].any()),
            cost=_table(result.cost, tables.COST_COLUMNS),
            engine=text.engine_sentences(result),
            layers=_table(
                layers, list(map(str, layers)), left_out=len(result.layers) - len(layers)
            ),
            findings=list(by_kind.values()),
            recipes=recipes(result),
            command=_folded(shlex.split(result.command)) if result.command else "",
            scripts=[_asset(name) for name in _SCRIPTS],
            styles=[_asset(name) for name in _STYLES],
            policy=_policy(),
            data=_script_json(data),
        )
    )


def _figures(result: Record) -> dict[str, figures.Figure]:
    """The plots that there is something to draw for, by name."""
    found = (
        figures.tradeoff_figure(result.tradeoff),
        figures.baselines_figure(result.outputs),
        figures.errors_figure(result.layers),
        figures.modules_figure(result.layers),
        figures.ranges_figure(result.layers, result.precision),
        figures.channels_figure(result.layers, result.precision),
        figures.inputs_figure(result.inputs),
        figures.search_figure(result.search),
    )
    return {figure.name: figure for figure in found if figure is not None}


@cache
def _policy() -> str:
    """The Content-Security-Policy: nothing is loaded, and only the page's own scripts run."""
    digests = [hashlib.sha256(_asset(name).encode()).digest() for name in _SCRIPTS]
    allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    # Plotly and DataTables set styles; pictures are made in the page.
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _script_json(data: Any) -> Markup:
    """JSON as a script element holds it: nothing in it can end the element."""
    written = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    for character in "<>&\u2028\u2029":
        written = written.replace(character, f"\\u{ord(character):04x}")
    return Markup(written)


class Table(NamedTuple):
    """``rows`` under ``columns``; ``left_out`` counts those that only the CSV file has."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    left_out: int = 0


def _table(table: pd.DataFrame, columns: Sequence[str], left_out: int = 0) -> Table:
    present = [c for c in columns if c in table]
    rows = text.scores_told(table[present].head(SHOWN_ROWS)).to_numpy(dtype=object).tolist()
    return Table(present, rows, max(left_out, len(table) - SHOWN_ROWS))


def pin_rows(result: Record) -> Table:
    """The certificate: each pin with the evaluation that failed without it.

    Where no pin is proved, the pins with their sensitivities, the worst first.
    """
    pins = result.pins
    if pins.empty:
        return Table((), ())
    known = [c for c in ("sensitivity", "module", "file", "line") if c in result.layers]
    shown = _with_places(pins.merge(result.layers[["layer", *known]], on="layer", how="left"))
    proof = [c for c in _PROOF if c != "proved" or not pins["proved"].all()]
    if not pins["proved"].any():
        proof = []
        if "sensitivity" in shown:
            shown = shown.sort_values("sensitivity", ascending=False, kind="stable")
    return _table(shown, [*_NAMED, "sensitivity", *proof])


def layer_data(table: pd.DataFrame) -> dict[str, Any]:
    """Every layer as the page's script reads it: columns with their kinds, rows of plain values."""
    shown = _with_places(table)
    columns, values = [], []
    for name in (c for c in _LAYERS if c in shown):
        kind = "text" if name in _NAMED else "flag" if name in _FLAGS else "number"
        columns.append({"name": name, "title": _TITLES.get(name, name), "kind": kind})
        values.append([_plain(value, kind) for value in shown[name]])
    return {"columns": columns, "rows": [list(row) for row in zip(*values, strict=True)]}


def _plain(value: Any, kind: str) -> float | int | str | None:
    """A value for JSON: None where it is not known, infinities as the texts "inf" and "-inf"."""
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
    """``table`` with ``where`` (such as ``net.py:21``); without blank columns."""
    where = [""] * len(table)
    if "file" in table:
        rows = zip(table["file"].fillna("").map(str), table["line"], strict=True)
        where = [f"{_base(f)}:{int(n)}" if f and not pd.isna(n) else "" for f, n in rows]
    table = table.assign(where=where)
    blank = [c for c in ("module", "where") if c in table and not table[c].fillna("").any()]
    return table.drop(columns=blank)


def _base(path: str) -> str:
    return (PureWindowsPath(path) if "\\" in path else PurePosixPath(path)).name


_ENGINE = "model.engine"
_FROM = "From where the run was started."
Shape = tuple[int, ...]
Profile = Mapping[str, tuple[Shape, Shape, Shape]]


class Recipe(NamedTuple):
    """A heading, the text to copy, and what to know about it."""

    name: str
    text: str
    note: str = ""


def recipes(result: Record) -> list[Recipe]:
    """How to ship the plan; nothing where none meets the requirements."""
    if not result.passed:
        return []
    tf32 = Precision.TF32 in (result.plan.base, result.plan.pin_precision)
    profile = profile_of_inputs(result)
    # Its path from where the run was started, as those of the model and its inputs are.
    words = shlex.split(result.command)
    folder = words[words.index("--out") + 1] if "--out" in words[:-1] else ""
    plan = Path(folder) / PLAN
    # The plan of a rewritten model is of its layers.
    model = str(plan.with_name(REWRITTEN_MODEL)) if result.rewritten else result.model
    weak = ["bisect-trt", "export", model, "--plan", str(plan), "--format", "trtexec"]
    verify = ["bisect-trt", "verify", result.model, *_input_words(words), "--plan", str(plan)]
    holds, arguments = "Exit code 0 if the plan holds.", "Prints trtexec's arguments."
    return [
        Recipe("trtexec", _trtexec(profile, tf32=tf32), "TensorRT 10 and 11."),
        Recipe("Python", _python(profile, tf32=tf32), "tensorrt, or tensorrt_rtx."),
        Recipe("polygraphy", _polygraphy(profile, tf32=tf32)),
        Recipe("Check it in a pipeline", _folded(verify), f"{_FROM} {holds}"),
        Recipe("TensorRT 8.6 to 10, weakly typed", shlex.join(weak), f"{_FROM} {arguments}"),
    ]


def profile_of_inputs(result: Record) -> dict[str, tuple[Shape, Shape, Shape]]:
    """The smallest, usual and largest shape of each graph input that has no static shape."""
    if "shapes" not in result.inputs:
        return {}
    seen = [json.loads(shapes) for shapes in result.inputs["shapes"]]
    found = {}
    for name in result.dynamic_inputs:
        shapes = [tuple(int(d) for d in one[name]) for one in seen if name in one]
        if shapes and len({len(shape) for shape in shapes}) == 1:
            each = list(zip(*shapes, strict=True))
            found[name] = (tuple(map(min, each)), shapes[0], tuple(map(max, each)))
    return found


def _input_words(command: Sequence[str]) -> list[str]:
    """The options of a run that say how its inputs are read; the plan says what is asked."""
    switches = {its.flag for its in options().values() if its.kind is bool}
    words, kept = iter(command[3:]), list[str]()  # behind "bisect-trt run MODEL"
    for flag in words:
        value = [] if flag in switches else [next(words, "")]
        if flag in ("--input", "--stacked", "--infinite", "--rewrite", "--profile"):
            kept += [flag, *value]
    return kept


def _trtexec(profile: Profile, *, tf32: bool) -> str:
    words = ["trtexec", f"--onnx={TYPED_MODEL}", "--stronglyTyped"]
    words += [] if tf32 else ["--noTF32"]
    for place, part in enumerate(("min", "opt", "max")):
        shapes = [f"{n}:{'x'.join(map(str, s[place]))}" for n, s in profile.items() if s[place]]
        words += [f"--{part}Shapes={','.join(shapes)}"] if shapes else []
    return _folded([*words, f"--saveEngine={_ENGINE}"])


def _polygraphy(profile: Profile, *, tf32: bool) -> str:
    words = ["polygraphy", "convert", TYPED_MODEL, "--strongly-typed"]
    words += ["--tf32"] if tf32 else []
    for place, part in enumerate(("min", "opt", "max")):
        shapes = [f"{n}:[{','.join(map(str, s[place]))}]" for n, s in profile.items()]
        words += [f"--trt-{part}-shapes", *shapes] if shapes else []
    return _folded([*words, "-o", _ENGINE])


def _python(profile: Profile, *, tf32: bool) -> str:
    shapes = [
        f"profile.set_shape({name!r}, {', '.join(map(repr, s))})" for name, s in profile.items()
    ]
    if shapes:
        shapes.insert(0, "profile = builder.create_optimization_profile()")
        shapes.append("config.add_optimization_profile(profile)")
    template = text_environment().get_template("build_engine.py.j2")
    return template.render(model=TYPED_MODEL, engine=_ENGINE, tf32=tf32, shapes=shapes).rstrip()


def _folded(words: Sequence[str]) -> str:
    """A command for a POSIX shell, folded where lines would become long."""
    lines, parts = [""], [shlex.quote(words[0])]
    for word in words[1:]:
        # An option's value stays on its line.
        if parts[-1].startswith("-") and not word.startswith("-"):
            parts[-1] += f" {shlex.quote(word)}"
        else:
            parts.append(shlex.quote(word))
    for word in parts:
        if len(lines[-1]) + len(word) > 90 and lines[-1]:
            lines.append("   ")
        lines[-1] += f" {word}" if lines[-1] else word
    return " \\\n".join(lines)
