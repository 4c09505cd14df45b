"""The files of a run: what reads them gets what was found, and names in them are data."""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
from collections.abc import Iterator
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from bisect_trt import Result
from bisect_trt.base.display import cell, printable, uncell
from bisect_trt.base.errors import BadInputError
from bisect_trt.base.outcomes import Verdict
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.evaluate.result import Evaluation
from bisect_trt.metrics.errors import tensor_error
from bisect_trt.report.columns import TABLES, as_page, from_csv, to_csv
from bisect_trt.report.files import to_json
from bisect_trt.report.html import as_html
from bisect_trt.report.junit import as_junit
from bisect_trt.report.markdown import as_markdown
from bisect_trt.report.record import read_run
from bisect_trt.report.tables import cost_table
from bisect_trt.steps import engine_layer_errors as engine_layer_errors
from fixtures.encoders import encoder_decomposed
from fixtures.fixture import Fixture
from fixtures.models import healthy, unsavable
from tests.command import run_of
from tests.conftest import Finished

HOSTILE = (
    "=HYPERLINK(A1)",
    "+1",
    "-2+3",
    "@SUM(A1)",
    "'=quoted",
    "\tx",
    "a\rb",
    'say "hi", twice',
    "<script>alert(1)</script>",
    "<img src=x onerror=y>",
    "](http://evil)",
    "![x](http://evil/y.png)",
    "a|b`c`*d*_e_",
    "\u202eright to left",
    "\uff1dwide",
    "é" * 40,
    "# no heading",
    "&lt;b&gt;",
)


def hostile() -> Fixture:
    """The encoder with names that something would obey, its culprits among them."""
    fixture = encoder_decomposed()
    assert fixture.pins is not None
    culprits = [n for n in fixture.model.graph.node if n.name in fixture.pins]
    for node, name in zip(culprits, HOSTILE, strict=False):
        node.name = name
    others = [n for n in fixture.model.graph.node if n.op_type == "MatMul"]
    for node, name in zip(others, HOSTILE[len(culprits) :], strict=False):
        node.name = name
    return fixture


run = partial(run_of, robust=0)


@pytest.fixture(scope="module")
def runs(finished: Finished, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """One that ends with pins, one with nothing to pin and a validated answer, one that fails."""
    made = {
        "pins": run(hostile(), tmp_path_factory.mktemp("pins")),
        "none": run(healthy(), tmp_path_factory.mktemp("none"), robust=0.9),
        "fails": finished(unsavable),
    }
    return made


NAMES = ("pins", "none", "fails")


@pytest.mark.parametrize("name", NAMES)
def test_run_json_is_what_the_schema_says(runs: dict[str, Result], name: str) -> None:
    text = resources.files("bisect_trt.report").joinpath("schema/run.schema.json").read_text()
    schema = json.loads(text)
    checker = jsonschema.Draft202012Validator
    checker.check_schema(schema)
    saved = json.loads((runs[name].folder / "run.json").read_text())
    checker(schema).validate(saved)
    with pytest.raises(jsonschema.ValidationError, match="surprise"):
        checker(schema).validate({**saved, "surprise": 1})
    del saved["validation"]["perturbed"]
    with pytest.raises(jsonschema.ValidationError, match="perturbed"):
        checker(schema).validate(saved)


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_alone_gives_the_documents_again(runs: dict[str, Result], name: str) -> None:
    made, again = runs[name], read_run(runs[name].folder)
    assert again.plan == made.plan and again.plan.held == made.plan.held
    kept = json.loads(to_json(again.as_json()))
    saved = json.loads((made.folder / "run.json").read_text())
    assert kept == saved
    for document, render in (
        ("report.html", as_html),
        ("report.md", as_markdown),
        ("junit.xml", as_junit),
    ):
        assert render(again) == (made.folder / document).read_text(encoding="utf-8"), document


@pytest.mark.parametrize("name", NAMES)
def test_csv_files_have_the_documented_columns(runs: dict[str, Result], name: str) -> None:
    for path in runs[name].folder.glob("*.csv"):
        data = path.read_bytes()
        assert data.endswith(b"\r\n") and b"\n" not in data.replace(b"\r\n", b"")
        rows = list(csv.reader(io.StringIO(data.decode(), newline=""), strict=True))
        assert {len(row) for row in rows} == {len(rows[0])}
        columns = TABLES[path.stem]
        for place, column in enumerate(c for c in columns if not c.name.endswith("*")):
            assert column.name in rows[0]
            if path.stem != "inputs":
                assert rows[0][place] == column.name
        assert all(any(c.covers(h) for c in columns) for h in rows[0])
        for value in (v for row in rows[1:] for v in row):
            if value[:1] in tuple("=+-@\t\r") and value:
                float(value)  # a number, else a formula


DTYPES = {
    "text": "object str",
    "number": "float64",
    "count": "int64 Int64 float64",
    "flag": "bool",
    "mapping": "object",
}
"""How a table of ``Result`` holds each kind; a count that is not always known is a float."""


@pytest.mark.parametrize("name", NAMES)
def test_tables_have_the_documented_columns(runs: dict[str, Result], name: str) -> None:
    for result in (runs[name], read_run(runs[name].folder)):
        for frame, columns in TABLES.items():
            table = result.cost if frame == "engines" else getattr(result, frame)
            places = [[c.covers(n) for c in columns].index(True) for n in table]
            assert places == sorted(places), frame
            if table.empty:
                continue
            assert {c.name for c in columns if c.always} <= set(table), frame
            for column, place in zip(table, places, strict=True):
                wanted = DTYPES[columns[place].kind].split()
                assert str(table[column].dtype) in wanted, (frame, column)


def test_every_column_is_documented() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "columns.md"
    assert page.read_text() == as_page(), "python -m bisect_trt.report.columns > docs/columns.md"


def test_numbers_are_exact_in_csv_files(runs: dict[str, Result]) -> None:
    made = runs["pins"]
    text = (made.folder / "layers.csv").read_bytes().decode()
    read = from_csv(text, TABLES["layers"])
    for name in ("max_abs", "cosine", "sensitivity", "introduced_rmse"):
        np.testing.assert_array_equal(read[name], made.layers[name])
    assert read["layer"].to_list() == [printable(n) for n in made.layers["layer"]]
    assert read["pinned"].dtype == bool and read["rank"].to_list() == made.layers["rank"].to_list()


@given(st.text(), st.floats(), st.booleans())
def test_a_cell_reads_back(text: str, value: float, flag: bool) -> None:
    assert uncell(cell(text)) == printable(text)
    assert not cell(text).startswith(("=", "+", "-", "@", "\t", "\r", "\n"))
    table = pd.DataFrame({"layer": [text], "op": ["x"], "max_abs": [value], "pinned": [flag]})
    read = from_csv(to_csv(table, TABLES["layers"]), TABLES["layers"])
    assert read["layer"].to_list() == [printable(text)] and bool(read["pinned"][0]) is flag
    if not math.isnan(value):
        assert read["max_abs"][0] == value


def test_markdown_shows_names_as_text(runs: dict[str, Result]) -> None:
    parser = MarkdownIt("commonmark", {"html": True}).enable("table")
    tokens = parser.parse((runs["pins"].folder / "report.md").read_text())
    inner = [t for token in tokens for t in (token, *(token.children or ()))]
    kinds = {t.type for t in inner}
    assert not kinds & {"html_block", "html_inline", "link_open", "image"}
    assert {"table_open", "heading_open", "strong_open"} <= kinds
    headings = [tokens[i + 1].content for i, t in enumerate(tokens) if t.type == "heading_open"]
    assert headings[1:] == [
        *("Validation", "Choices", "Pinned layers", "Outputs", "Findings", "Versions")
    ]
    shown = "".join(t.content for t in inner if t.type == "text")
    for name in runs["pins"].pinned:
        assert printable(name) in shown, name


def test_junit_has_a_case_a_requirement_and_a_kind(runs: dict[str, Result]) -> None:
    suites = {n: ElementTree.parse(r.folder / "junit.xml").getroot() for n, r in runs.items()}
    cases = {
        n: {c.get("name"): c.find("failure") for c in suite.iter("testcase")}
        for n, suite in suites.items()
    }
    assert "requirement max_abs<=2e-3" in cases["pins"]
    assert {"holds on given inputs", "holds on perturbed inputs"} <= set(cases["none"])
    assert suites["none"].get("failures") == "0"
    (failed,) = (n for n, failure in cases["fails"].items() if failure is not None)
    assert failed == f"requirement {runs['fails'].requirements[0]}"


def test_junit_tells_which_requirement_is_missed(tmp_path: Path) -> None:
    fixture = unsavable()
    result = run(fixture, tmp_path, require=[fixture.require, "max_abs<=1e9"])
    root = ElementTree.parse(tmp_path / "junit.xml").getroot()
    failed = {c.get("name"): c.find("failure") is not None for c in root.iter("testcase")}
    assert failed == {
        f"requirement {fixture.require}": True,
        "requirement max_abs<=1e9": False,
    }
    reduced = result.by_requirement["reduced_score"]
    assert reduced[1] < 1e-6 and reduced.max() == pytest.approx(result.base_score)


def test_junit_does_not_blame_what_fp32_meets(tmp_path: Path) -> None:
    fixture = encoder_decomposed()
    run(fixture, tmp_path, require=["max_abs<=2e-3", "rmse<=1e-9"])
    root = ElementTree.parse(tmp_path / "junit.xml").getroot()
    failed = {c.get("name"): c.find("failure") is not None for c in root.iter("testcase")}
    assert failed["requirement max_abs<=2e-3"] is False
    assert failed["requirement rmse<=1e-9"] is True


def test_no_run_is_told_in_one_line(runs: dict[str, Result], tmp_path: Path) -> None:
    for folder, words in ((tmp_path / "absent", "no such folder"), (tmp_path, "has no run.json")):
        with pytest.raises(BadInputError, match=words):
            read_run(folder)
    saved = json.loads((runs["none"].folder / "run.json").read_text())
    for text, words in (
        ("{", "cannot be read"),
        ("[]", "in format"),
        ("{}", "in format"),
        (json.dumps({**saved, "format": 99}), "in format"),
        (json.dumps({**saved, "validation": {}}), "damaged"),
        (json.dumps({**saved, "passed": "yes"}), "damaged"),
        (json.dumps(saved), r"damaged \(layers.csv"),
    ):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(BadInputError, match=words):
            read_run(tmp_path)


def test_a_table_torn_inside_quotes_is_damaged(runs: dict[str, Result], tmp_path: Path) -> None:
    folder = tmp_path / "torn"
    shutil.copytree(runs["pins"].folder, folder)
    text = (folder / "inputs.csv").read_text()
    (folder / "inputs.csv").write_text(text.rstrip() + ',"half a ce')
    with pytest.raises(BadInputError, match=r"damaged \(inputs.csv: unexpected end of data\)"):
        read_run(folder)


def test_a_cell_may_be_of_any_length() -> None:
    long = "layer" * 30_000
    (column,) = from_csv(f"layer\n{long}\n", TABLES["pins"])["layer"]
    assert column == long


@pytest.mark.slow
def test_a_run_json_that_was_edited_is_shown_or_refused(
    runs: dict[str, Result], tmp_path: Path
) -> None:
    folder = tmp_path / "edited"
    shutil.copytree(runs["pins"].folder, folder)
    text = (folder / "run.json").read_text()
    read = refused = 0
    for *above, last in _places(json.loads(text)):
        for wrong in (None, "x", 3, -1.5, [], {}, True):
            edited = at = json.loads(text)
            for key in above:
                at = at[key]
            if type(at[last]) is type(wrong):
                continue
            at[last] = wrong
            (folder / "run.json").write_text(json.dumps(edited))
            try:
                record = read_run(folder)
            except BadInputError as error:
                assert "damaged" in str(error) or "in format" in str(error)
                refused += 1
                continue
            assert as_html(record) and as_junit(record)
            read += 1
    assert refused > 500 and read > 10


def _places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each key of a JSON document; of a list's elements, of the first."""
    if isinstance(value, dict) or (isinstance(value, list) and value):
        for key in value if isinstance(value, dict) else (0,):
            yield (*above, key)
            yield from _places(value[key], (*above, key))


def test_the_engine_s_columns_are_documented() -> None:
    error = tensor_error(np.ones(4, np.float32), np.zeros(4, np.float32))
    row = engine_layer_errors._row([error])
    documented = {column.name for column in TABLES["layers"]}
    assert set(row) <= documented
    fields = set(cost_table({"x": _built()}).columns)
    assert fields <= {column.name for column in TABLES["engines"]}


def _built() -> Evaluation:
    seconds = {"write": 1.0, "parse": 1.0, "build": 2.0, "load": 1.0, "context": 1.0, "run": 1.0}
    facts = {"latency_ms": 1.5, "engine_bytes": 1e6, "seconds": seconds}
    plan = PrecisionPlan(Precision.FP16)
    return Evaluation(plan, "tensorrt", Verdict.PASS, 0.5, {}, {}, 9.0, facts=facts)
