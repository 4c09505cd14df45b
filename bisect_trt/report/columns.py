"""The columns of every CSV file, and the files."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from bisect_trt.base.display import cell, uncell
from bisect_trt.base.outcomes import InputKind

TEXT, NUMBER, COUNT, FLAG = "text", "number", "count", "flag"


@dataclass(frozen=True)
class Column:
    """``kind`` is text, number (a float), count (a whole number) or flag (True or False).

    A column that is not ``always`` known is left blank then. A ``name`` that ends in ``*`` stands
    for a column for each runner that was asked.
    """

    name: str
    kind: str
    meaning: str
    always: bool = False

    def covers(self, name: str) -> bool:
        """Whether the column ``name`` is this one, or one of these."""
        return name == self.name or (self.name[-1] == "*" and name.startswith(self.name[:-1]))


def names_in(text: str) -> list[str]:
    """The names of columns in ``text``, between blanks."""
    return text.split()


def _columns(*lines: str, sometimes: Sequence[str] = (), always: str = "") -> tuple[Column, ...]:
    """One line a column: name, kind and meaning; either those that are known ``sometimes`` are
    named, or those (words of one text) that ``always`` are.
    """
    made = []
    for line in lines:
        name, kind, meaning = line.split(maxsplit=2)
        known = name in always.split() if always else name not in sometimes
        made.append(Column(name, kind, meaning, known))
    return tuple(made)


def _errors(prefix: str, *, of: str) -> list[str]:
    return [
        f"{prefix}max_abs number the largest absolute error {of}, in the tensor's units",
        f"{prefix}rmse number its root mean square",
        f"{prefix}rel_range number the largest over the reference's range",
    ]


LAYERS = _columns(
    "layer text the layer's id: the node's name, made unique",
    "op text its ONNX operator",
    "scope text the path of modules that the name spells",
    "max_abs number the largest absolute error with everything reduced, in the tensor's units",
    "mean_abs number the mean absolute error",
    "rmse number the root mean square error",
    "cosine number the cosine between reference and result, in [-1, 1]",
    "snr_db number 10 log10(sum of squares of the reference / of the error), inf for no error",
    "finite flag whether nothing became NaN or infinite",
    "introduced_max_abs number the largest error where the layer's inputs are the reference's",
    "introduced_snr_db number the signal-to-noise ratio of that",
    "ref_min number the smallest value of the reference",
    "ref_max number the largest value of the reference",
    "introduced_finite flag whether right inputs give finite outputs: False is a source",
    "overflows flag whether values that are not finite come from beyond the range, on some input",
    "underflows flag whether they come from small values that became zero, on some input",
    "median_abs number the median absolute error",
    "rel_range number the largest error over the reference's range",
    "nonfinite count elements that became NaN or infinite; -1 where the shape changed",
    "elements count elements of the layer's output",
    "introduced_rmse number the root mean square error where inputs are right",
    "introduced_rel_range number the largest of those over the reference's range",
    "mean_over_samples_max_abs number the mean over the inputs, where the others are the worst",
    "mean_over_samples_rmse number likewise",
    "mean_over_samples_cosine number likewise",
    "channels count channels of the output: the second axis of images, else the last",
    "channel_peak_min number the largest magnitude of the smallest channel, of the reference",
    "channel_peak_p25 number that of the channel a quarter of all are smaller than",
    "channel_peak_p50 number the median of the channels' largest magnitudes",
    "channel_peak_p75 number that of the channel a quarter of all are larger than",
    "channel_peak_max number that of the largest channel",
    "worst_channel count the index of the largest channel, from 0",
    "pinned flag whether the plan keeps the layer in FP32",
    "sensitivity number the final score, in tolerances, when only this layer is reduced: the worst "
    "over the inputs and copies that it was measured on; blank where a metric of all inputs at "
    "once "
    "is asked for",
    "rank count the place in the ranking, 1 the most harmful",
    *_errors("engine_", of="on an engine with marked outputs"),
    "engine_snr_db number the signal-to-noise ratio there",
    "engine_finite flag whether nothing became NaN or infinite there",
    "engine_nonfinite count elements that did",
    "engine_mean_over_samples_rmse number the mean over the inputs",
    "source flag whether it is wrong (not finite, or below 20 dB) though all it reads is right",
    "module text the path of the module in the user's code, from the exporter's metadata or names",
    "module_class text the class of that module",
    "file text the source file, the innermost outside installed packages",
    "line count the line in it",
    "code text what stands there, where the exporter says it",
    always="layer op scope pinned module module_class file line code",
)

OUTPUTS = _columns(
    "baseline text what ran: a precision, or the plan; with the runner's name where an engine did",
    "output text the graph output; blank where the baseline could not be run",
    "outcome text pass, fail, non-finite, build-failed, crashed, timed-out or unsure",
    "score number the whole baseline's score in tolerances: at most 1 passes",
    "max_abs number the largest absolute error, in the output's units",
    "mean_abs number the mean absolute error",
    "median_abs number the median absolute error",
    "rmse number the root mean square error",
    "rel_range number the largest error over the reference's range",
    "cosine number the cosine between reference and result, in [-1, 1]",
    "snr_db number 10 log10(sum of squares of the reference / of the error), inf for no error",
    "psnr_db number 20 log10(the reference's range / rmse), inf for no error",
    "nonfinite count elements that became NaN or infinite; -1 where the shape changed",
    "elements count elements of the output",
    "ref_min number the smallest value of the reference",
    "ref_max number the largest value of the reference",
    "ref_nonfinite count elements of the reference that are not finite",
    "finite flag whether nothing became NaN or infinite",
    "mean_over_samples_max_abs number the mean over the inputs, where the others are the worst",
    "mean_over_samples_rmse number likewise",
    "mean_over_samples_cosine number likewise",
    always="baseline output outcome score",
)

SEARCH = _columns(
    "evaluation count the place in the search, from 0",
    "runner text what executed the plan",
    "on text the given inputs, or a search set",
    "base text what unpinned layers ran in",
    "pins count layers in FP32",
    "outcome text as in outputs.csv",
    "score number in tolerances: at most 1 passes",
    "seconds number of the evaluation",
    "note text why it could not be run; of a search set how many of its samples miss",
    "pinned text the layers as a JSON list; over 64, how many",
)

PINS = _columns(
    "layer text the layer's id",
    "op text its ONNX operator",
    "scope text the path of modules that the name spells",
    "held flag whether it is held there from the start: by --keep-fp32, or since the engine "
    "does not "
    "take it reduced",
    "proved flag whether the same set without it was run and failed",
    "proved_on text which runner showed it",
    "tolerance_share number the share of the tolerance that this evaluation was held to",
    "outcome_without text what the set without it showed",
    "score_without number its score in tolerances: more than `tolerance_share`",
    "proof_evaluation count the evaluation's place in search.csv; -1 without a proof",
    "missed_on text the input or copy that has this score",
    "of_all_given flag whether it is the worst of all given inputs; else one that told ended the "
    "evaluation, and others may be worse",
    "inherited flag whether it only moves values between layers that are kept in FP32",
)

ENGINES = _columns(
    "engine text what was built",
    "outcome text as in outputs.csv",
    "pins count layers in FP32",
    "latency_ms number the median of its runs",
    "engine_mb number its size in 10^6 bytes",
    "write_s number seconds to write the model",
    "parse_s number to parse it; empty where it was built ahead",
    "build_s number to build the engine; empty where it was built ahead",
    "load_s number to load it",
    "context_s number to make its context",
    "run_s number of all runs",
    "evaluation_s number of the whole evaluation",
    "own_share number the share of that which is the tool's own",
    always="engine outcome pins latency_ms engine_mb",
)

INPUTS = _columns(
    "input text the input's name",
    "kind text given, or holdout",
    "reduced_score_* number the score in tolerances with everything reduced, by runner",
    "plan_score_* number the score under the plan, by runner",
    "passed flag whether the plan meets the requirement on it; left out where a condition is on "
    "all inputs together; where nothing else is asked, and no input has a score, these are blank",
    "shapes text the shapes of its arrays by graph input, as JSON",
    "sha256 text the digest of its names, types, shapes and values",
    always="input kind shapes sha256",
)


def _shares(kind: InputKind) -> list[str]:
    bound = "the share of all such inputs at least, 95 % confidence"
    if kind is InputKind.GIVEN:
        bound = "always blank: the search saw these, so they bound nothing"
    return [
        f"{kind}_passed count inputs ({kind}) that meet the requirement",
        f"{kind}_tested count of so many",
        f"{kind}_share number the first over the second",
        f"{kind}_lower_bound number {bound}",
    ]


TRADEOFF = _columns(
    "pins count layers in FP32",
    "set text ranking: so many of the ranked layers; answer: the plan that was written",
    *_shares(InputKind.GIVEN),
    *_shares(InputKind.HOLDOUT),
    *_shares(InputKind.PERTURBED),
    *_shares(InputKind.AUGMENTED),
    "p50_score number the median score over all of these (of the answer's test, over a part of its "
    "copies), in tolerances",
    "p95_score number what 95 % of those keep to",
    "worst_score number the largest of all",
    "latency_ms number of the engine of these pins, where one was built",
    "relative_bytes number bytes read and written, over those of everything reduced",
    "given_missed text the given inputs that miss, worst first: three, and how many more",
    "estimated_latency_ms number what an engine of these pins may take: between those of nothing "
    "and of everything pinned, by the bytes; blank where these were not built",
    sometimes=("relative_bytes", "given_missed", "estimated_latency_ms"),
)

REQUIREMENTS = _columns(
    "requirement text as it was written",
    "reduced_score number its score in tolerances with everything reduced",
    "plan_score number its score under the plan, blank where none was found",
    "baselines mapping its score by baseline, for those that every sample ran on",
)

TABLES = {
    "layers": LAYERS,
    "outputs": OUTPUTS,
    "search": SEARCH,
    "pins": PINS,
    "engines": ENGINES,
    "inputs": INPUTS,
    "tradeoff": TRADEOFF,
}

FRAMES = {("cost" if name == "engines" else name): its for name, its in TABLES.items()}
FRAMES["by_requirement"] = REQUIREMENTS
"""The columns of the tables of ``Result``, by their names there."""


def as_page() -> str:
    """The content of docs/columns.md."""
    lines = [
        "# Columns of the CSV files",
        "",
        "Printed by `python -m bisect_trt.report.columns`. The files are RFC 4180 (comma,",
        "CRLF, quotes where needed) in UTF-8, a header first. Numbers are written to read back",
        "exactly; `inf` and `-inf` are infinities, a blank cell is unknown, flags are `True` and",
        "`False`. Text that a spreadsheet would take for a formula begins with `'`, and so does",
        "text that begins with `'` itself; control characters are spelled out.",
        "A score of 1e9 is a miss where none is allowed, as of a decision that changed; no other",
        "finite score is so large: 9.99e8 stands for all that are larger.",
        "Columns keep their order and names; new ones come at the end.",
        "",
        "In a notebook the tables of `Result` are pandas DataFrames of the same columns, without",
        "those that the run knows nothing of: `result.layers` is layers.csv and so on,",
        "`result.cost` is engines.csv, and `result.by_requirement` is in run.json.",
    ]
    titles = {
        **{f"{name}.csv": its for name, its in TABLES.items()},
        "by_requirement": REQUIREMENTS,
    }
    for title, columns in titles.items():
        lines += ["", f"## {title}", "", "| column | kind | meaning |", "| --- | --- | --- |"]
        lines += [f"| `{c.name}` | {c.kind} | {c.meaning} |" for c in columns]
    return "\n".join(lines) + "\n"


def to_csv(table: pd.DataFrame, columns: Sequence[Column]) -> str:
    """``table`` with all of ``columns`` in their order, blank where it has none of them; others of
    its own come last.
    """
    shown: list[tuple[str, str]] = []
    for column in columns:
        own = [str(c) for c in table.columns if column.covers(str(c))]
        shown += [(name, column.kind) for name in own or [column.name] if name[-1] != "*"]
    named = {name for name, _ in shown}
    shown += [(str(c), "") for c in table.columns if str(c) not in named]
    text = io.StringIO()
    write = csv.writer(text, lineterminator="\r\n").writerow
    write([cell(name) for name, _ in shown])
    blank = [None] * len(table)
    values = [table[n].to_list() if n in table else blank for n, _ in shown]
    for row in zip(*values, strict=True):
        write([_written(v, kind) for v, (_, kind) in zip(row, shown, strict=True)])
    return text.getvalue()


def from_csv(text: str, columns: Sequence[Column]) -> pd.DataFrame:
    """What :func:`to_csv` wrote, its names with control characters still spelled out.

    Raises:
        ValueError: a cell is not of its column's kind, or a row has other cells than the header.
    """
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # names may be of any length
    try:
        rows = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except csv.Error as error:  # torn inside quotes
        raise ValueError(str(error)) from error
    if not rows:
        return pd.DataFrame()
    found: dict[str, Any] = {}
    for place, name in enumerate(uncell(n) for n in rows[0]):
        column = next((c for c in columns if c.covers(name)), Column(name, TEXT, ""))
        cells = [row[place] if len(row) == len(rows[0]) else _torn() for row in rows[1:]]
        if column.always or any(cells):
            found[name] = _read(cells, column.kind)
    return pd.DataFrame(found)


def _torn() -> str:
    raise ValueError("a row has other cells than the header")


def _written(value: Any, kind: str) -> str:
    if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, str):
        return cell(value)
    if kind == COUNT and math.isfinite(value):
        return str(int(value))
    if kind == NUMBER or isinstance(value, float):
        return repr(float(value))
    return str(value)


def _read(cells: Sequence[str], kind: str) -> list[Any]:
    if kind == TEXT:
        return [uncell(c) for c in cells]
    if kind == FLAG:
        return [{"True": True, "False": False, "": math.nan}[c] for c in cells]
    whole = kind == COUNT and all(cells)
    return [int(c) if whole else float(c or "nan") for c in cells]


if __name__ == "__main__":
    import sys

    sys.stdout.write(as_page())
