"""The whole of report.html: tables, plots, and what to copy."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import pandas as pd
from markupsafe import Markup

from bisect_trt.base.atomic_files import PLAN, REWRITTEN_MODEL, TYPED_MODEL
from bisect_trt.base.display import printable
from bisect_trt.base.outcomes import VANISHING, Finding
from bisect_trt.base.plan import Precision
from bisect_trt.report.figures import (
    Figure,
    baselines_figure,
    channels_figure,
    errors_figure,
    has_modules,
    inputs_figure,
    modules_figure,
    ranges_figure,
    search_figure,
    short,
    tradeoff_figure,
)
from bisect_trt.report.html import answer, asset, environment
from bisect_trt.report.record import Record
from bisect_trt.report.summarise import requirement_scores
from bisect_trt.report.tables import COST_COLUMNS, OUTPUT_COLUMNS, worst_inputs, worst_layers
from bisect_trt.report.text import (
    engine_sentences,
    misses_alone,
    scores_told,
    search_sentences,
    sources,
    unproved,
)
from bisect_trt.settings import options

_MOST_ROWS = 300
_TRADEOFF = ["pins", "set", "given_share", "perturbed_share", "perturbed_lower_bound"]
_TRADEOFF += ["augmented_share", "holdout_share", "p50_score", "p95_score", "worst_score"]
_TRADEOFF += ["latency_ms"]
_SEARCH = ["evaluation", "runner", "on", "base", "pins", "outcome", "score", "seconds", "note"]
_PROOF = [
    "proved",
    "proved_on",
    "proof_evaluation",
    "outcome_without",
    "score_without",
    "missed_on",
]
_LAYERS = ["rank", "sensitivity", "introduced_rel_range", "rel_range", "max_abs", "snr_db"]
_LAYERS += ["finite", "engine_rel_range", "engine_finite", "ref_min", "ref_max", "channels"]


@dataclass(frozen=True)
class Table:
    """``rows`` under ``columns``; ``left_out`` counts those that only the CSV file has."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    left_out: int = 0


def tradeoff_rows(table: pd.DataFrame) -> Table:
    """A row a number of pins."""
    return _table(table.dropna(axis=1, how="all"), _TRADEOFF)


def output_rows(table: pd.DataFrame) -> Table:
    """A row a baseline and output."""
    return _table(table, OUTPUT_COLUMNS)


def cost_rows(table: pd.DataFrame) -> Table:
    """A row an engine."""
    return _table(table, COST_COLUMNS)


def search_rows(table: pd.DataFrame) -> Table:
    """A row an evaluation."""
    return _table(table, _SEARCH)


def input_rows(table: pd.DataFrame) -> Table:
    """The inputs that are worst off."""
    worst = worst_inputs(table)
    shown = _table(worst, [str(c) for c in worst if c not in ("shapes", "sha256")])
    return Table(shown.columns, shown.rows, len(table) - len(worst))


def worst_layer_rows(table: pd.DataFrame) -> Table:
    """The layers that matter most, for readers without scripts."""
    worst = worst_layers(table)
    shown = _table(worst, [str(c) for c in worst])
    return Table(shown.columns, shown.rows, len(table) - len(worst))


def pin_rows(result: Record) -> Table:
    """The certificate: each pin with the evaluation that failed without it; where none is proved,
    with what each layer does alone, the worst first.
    """
    pins = result.pins
    if pins.empty:
        return Table((), ())
    known = [c for c in ("sensitivity", "module", "file", "line") if c in result.layers]
    told = pins.merge(result.layers[["layer", *known]], on="layer", how="left")
    told["where"] = _places(told)
    proof = [c for c in _PROOF if c != "proved" or not pins["proved"].all()]
    if not pins["proved"].any():
        proof = []
        if "sensitivity" in told:
            told = told.sort_values("sensitivity", ascending=False, kind="stable")
    shown = _table(_without_blank(told, ("module", "where")), [*_NAMED, "sensitivity", *proof])
    return replace(shown, columns=[_TITLES.get(c, c) for c in shown.columns])


_NAMED = ["layer", "op", "module", "where"]
_TITLES = {
    "sensitivity": "sensitivity",
    "introduced_rel_range": "own error / range",
    "rel_range": "error / range",
    "max_abs": "largest error",
    "snr_db": "SNR, dB",
    "engine_rel_range": "engine error / range",
    "engine_finite": "engine finite",
    "ref_min": "smallest value",
    "ref_max": "largest value",
}
"""Of columns in the page; its tooltips say what they are called in layers.csv."""
_FLAGS = frozenset({"pinned", "source", "finite", "engine_finite"})


def layer_data(table: pd.DataFrame) -> dict[str, Any]:
    """Every layer, as the page's script reads it: columns with their kinds, rows of plain values.
    Infinities are the texts "inf" and "-inf".
    """
    told = table.copy()
    told["where"] = _places(told)
    told = _without_blank(told, ("module", "where"))
    columns = [c for c in (*_NAMED, "pinned", "source", *_LAYERS) if c in told]
    kinds = ["text" if c in _NAMED else "flag" if c in _FLAGS else "number" for c in columns]
    made = [_values(told[c], kind) for c, kind in zip(columns, kinds, strict=True)]
    return {
        "columns": [
            {"name": c, "title": _TITLES.get(c, c), "kind": k}
            for c, k in zip(columns, kinds, strict=True)
        ],
        "rows": [list(row) for row in zip(*made, strict=True)],
    }


def _values(column: pd.Series[Any], kind: str) -> list[Any]:
    if kind == "text":
        return [printable(str(v)) for v in column]
    if kind == "flag":
        return [None if pd.isna(v) else int(bool(v)) for v in column]
    return [_number(float("nan") if v is pd.NA else float(v)) for v in column]


def _number(value: float) -> float | int | str | None:
    if math.isnan(value):
        return None
    if math.isinf(value):
        return "inf" if value > 0.0 else "-inf"
    return int(value) if value.is_integer() and abs(value) < 1e6 else short(value)


def _places(table: pd.DataFrame) -> list[str]:
    """``net.py:21``: the file's own name is enough to find it by, the path is in layers.csv."""
    if "file" not in table:
        return [""] * len(table)
    rows = zip(table["file"].fillna(""), table["line"], strict=True)
    return [f"{_base(str(f))}:{int(line)}" if f and not pd.isna(line) else "" for f, line in rows]


def _base(path: str) -> str:
    return (PureWindowsPath(path) if "\\" in path else PurePosixPath(path)).name


def _without_blank(table: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """``table`` without those of ``names`` that no row has a word in."""
    blank = [n for n in names if n in table and not (table[n].fillna("") != "").any()]
    return table.drop(columns=blank)


def _table(table: pd.DataFrame, columns: Sequence[str]) -> Table:
    present = [c for c in columns if c in table]
    rows = scores_told(table[present].head(_MOST_ROWS)).to_numpy(dtype=object).tolist()
    return Table(present, rows, max(0, len(table) - _MOST_ROWS))


_ENGINE = "model.engine"
_FROM = "From where the run was started."
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Recipe:
    """``name`` for a heading, ``text`` to copy, and what to know about it (``note``)."""

    name: str
    text: str
    note: str = ""


def recipes(result: Record) -> list[Recipe]:
    """How to ship the plan; nothing where none meets the requirements."""
    if not result.passed:
        return []
    tf32 = Precision.TF32 in (result.plan.base, result.plan.pin_precision)
    shapes = profile_of_inputs(result)
    found = [
        Recipe("trtexec", _trtexec(shapes, tf32=tf32), "TensorRT 10 and 11."),
        Recipe("Python", _python(shapes, tf32=tf32), "tensorrt, or tensorrt_rtx."),
        Recipe("polygraphy", _polygraphy(shapes, tf32=tf32)),
        Recipe(
            "Check it in a pipeline", _verify(result), f"{_FROM} Exit code 0 if the plan holds."
        ),
    ]
    plan = shlex.quote(_plan(result))
    model = result.model
    if result.rewritten:  # the plan is of its layers
        model = str(Path(_plan(result)).with_name(REWRITTEN_MODEL))
    weak = f"bisect-trt export {shlex.quote(model)} --plan {plan} --format trtexec"
    found.append(
        Recipe("TensorRT 8.6 to 10, weakly typed", weak, f"{_FROM} Prints trtexec's arguments.")
    )
    return found


def profile_of_inputs(result: Record) -> dict[str, tuple[Shape, Shape, Shape]]:
    """The smallest, usual and largest shape that the inputs had, of each graph input whose shape
    the model leaves open.
    """
    if "shapes" not in result.inputs:
        return {}
    seen = [json.loads(text) for text in result.inputs["shapes"]]
    found = {}
    for name in result.dynamic_inputs:
        shapes = [tuple(int(d) for d in one[name]) for one in seen if name in one]
        if shapes and len({len(shape) for shape in shapes}) == 1:
            each = list(zip(*shapes, strict=True))
            found[name] = (tuple(map(min, each)), shapes[0], tuple(map(max, each)))
    return found


Profile = Mapping[str, tuple[Shape, Shape, Shape]]
_PARTS = ("min", "opt", "max")


def _trtexec(profile: Profile, *, tf32: bool) -> str:
    words = ["trtexec", f"--onnx={TYPED_MODEL}", "--stronglyTyped"]
    words += [] if tf32 else ["--noTF32"]
    for place, part in enumerate(_PARTS):
        shapes = [f"{n}:{'x'.join(map(str, s[place]))}" for n, s in profile.items() if s[place]]
        words += [f"--{part}Shapes={','.join(shapes)}"] if shapes else []
    return _joined([*words, f"--saveEngine={_ENGINE}"])


def _polygraphy(profile: Profile, *, tf32: bool) -> str:
    words = ["polygraphy", "convert", TYPED_MODEL, "--strongly-typed"]
    words += ["--tf32"] if tf32 else []
    for place, part in enumerate(_PARTS):
        shapes = [f"{n}:[{','.join(map(str, s[place]))}]" for n, s in profile.items()]
        words += [f"--trt-{part}-shapes", *shapes] if shapes else []
    return _joined([*words, "-o", _ENGINE])


_OF_INPUTS = frozenset({"--input", "--stacked", "--infinite", "--rewrite", "--profile"})
"""How the inputs are read and run; what is asked of them the plan says."""


def _verify(result: Record) -> str:
    """The same inputs; the command of the run begins with "bisect-trt run MODEL"."""
    switches = {its.flag for its in options().values() if its.kind is bool}
    words, kept = iter(shlex.split(result.command)[3:]), list[str]()
    for flag in words:
        value = [] if flag in switches else [next(words, "")]
        kept += [flag, *value] if flag in _OF_INPUTS else []
    return _joined(["bisect-trt", "verify", result.model, *kept, "--plan", _plan(result)])


def _plan(result: Record) -> str:
    """Its path from where the run was started, as those of the model and its inputs are."""
    words = shlex.split(result.command)
    folder = words[words.index("--out") + 1] if "--out" in words[:-1] else ""
    return str(Path(folder) / PLAN)


def folded(command: str) -> str:
    """A long command of a POSIX shell on lines of their own."""
    return _joined(shlex.split(command))


def _joined(words: Sequence[str]) -> str:
    """For a POSIX shell, folded where lines would become long."""
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


def _python(profile: Profile, *, tf32: bool) -> str:
    names = "\n".join(
        f"profile.set_shape({name!r}, {low!r}, {usual!r}, {high!r})"
        for name, (low, usual, high) in profile.items()
    )
    shapes = ""
    if names:
        made = "profile = builder.create_optimization_profile()"
        shapes = f"{made}\n{names}\nconfig.add_optimization_profile(profile)\n"
    flag = "set_flag" if tf32 else "clear_flag"
    return re.sub(
        r"\n{3,}",
        "\n\n",
        f"""import tensorrt as trt

logger = trt.Logger(trt.Logger.WARNING)
builder = trt.Builder(logger)
typed = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
network = builder.create_network(0 if typed is None else 1 << int(typed))
parser = trt.OnnxParser(network, logger)
if not parser.parse_from_file({TYPED_MODEL!r}):
    raise RuntimeError(parser.get_error(0).desc())
config = builder.create_builder_config()
config.{flag}(trt.BuilderFlag.TF32)
{shapes}engine = builder.build_serialized_network(network, config)
with open({_ENGINE!r}, "wb") as file:
    file.write(engine)
""",
    ).rstrip()


_SCRIPTS = ("plotly-basic.min.js", "dataTables.min.js", "report.js")
_STYLES = ("dataTables.min.css", "report.css", "answer.css")


def as_html(result: Record) -> str:
    """The page. Names from models and paths are text in it: templates escape, the data that
    scripts read is JSON, and no other script than the page's own may run.
    """
    figures = _figures(result)
    data = {"figures": [f.as_json() for f in figures.values()], "layers": layer_data(result.layers)}
    template = environment().get_template("report.html.j2")
    return template.render(
        **answer(result),
        figures=figures,
        tradeoff=tradeoff_rows(result.tradeoff),
        baselines=list(result.outputs["baseline"].unique()) if len(result.outputs) else [],
        scores=requirement_scores(result.by_requirement, result.outputs),
        outputs=output_rows(result.outputs),
        by_modules=len(result.layers) > 0 and has_modules(result.layers),
        inputs=input_rows(result.inputs),
        searched=search_sentences(result),
        search=search_rows(result.search),
        pins=pin_rows(result),
        unproved=unproved(result),
        alone=misses_alone(result.layers),
        sources=sources(result.layers),
        proved=bool(result.pins["proved"].any()),
        cost=cost_rows(result.cost),
        engine=engine_sentences(result),
        layers=worst_layer_rows(result.layers),
        findings=_by_kind(result.findings),
        recipes=recipes(result),
        command=folded(result.command) if result.command else "",
        scripts=[asset(name) for name in _SCRIPTS],
        styles=[asset(name) for name in _STYLES],
        policy=_policy(),
        data=_script_json(data),
    )


def _by_kind(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Findings of one kind together, those first that the headline says; constants that partly
    vanish are many and harmless, and come last.
    """
    kinds: dict[str, list[Finding]] = {}
    for finding in sorted(findings, key=lambda f: (not f.weighty, f.kind == VANISHING)):
        kinds.setdefault(finding.kind, []).append(finding)
    return list(kinds.values())


def _figures(result: Record) -> dict[str, Figure]:
    """Those that there is something to draw of, by name."""
    found = (
        tradeoff_figure(result.tradeoff),
        baselines_figure(result.outputs),
        errors_figure(result.layers),
        modules_figure(result.layers),
        ranges_figure(result.layers, result.precision),
        channels_figure(result.layers, result.precision),
        inputs_figure(result.inputs),
        search_figure(result.search),
    )
    return {figure.name: figure for figure in found if figure is not None}


@cache
def _policy() -> str:
    """The Content-Security-Policy: nothing is loaded, and nothing runs but the page's own scripts,
    told by their hashes.
    """
    hashes = [
        base64.b64encode(hashlib.sha256(asset(name).encode()).digest()).decode()
        for name in _SCRIPTS
    ]
    allowed = " ".join(f"'sha256-{h}'" for h in hashes)
    # Plotly and DataTables set styles; pictures are made in the page.
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _script_json(data: Any) -> Markup:
    """JSON as a script element holds it: nothing in it can end the element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)
