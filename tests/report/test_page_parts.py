"""The page's tables and plots as data, where a browser is not needed to see that they are right."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from bisect_trt.base.outcomes import Cause, Finding
from bisect_trt.base.plan import Precision
from bisect_trt.report.choices import Passes
from bisect_trt.report.figures import curve_figures, errors_figure, ranges_figure
from bisect_trt.report.html import as_html, layer_data
from bisect_trt.report.markdown import as_markdown
from bisect_trt.report.record import Record
from bisect_trt.report.tables import cures_table, shown_pins
from bisect_trt.report.terminal import print_verdict
from bisect_trt.report.text import sensitivity_sentences, sources, unproved
from tests.report.synthetic import synthetic_result, with_choices

RESULT = synthetic_result(80)


def test_a_requirement_is_scored_in_each_baseline() -> None:
    table = RESULT.by_requirement.assign(baselines=[{"fp32": 0.1, "plan": 0.8}, {"fp32": 3.0}])
    page = as_html(replace(RESULT, by_requirement=table))
    assert '<td class="n good">0.8 \u00d7</td>' in page
    assert '<td class="n wrong">3 \u00d7</td><td></td>' in page


def test_the_layers_are_all_there_as_plain_json() -> None:
    data = layer_data(RESULT.layers)
    names = [c["name"] for c in data["columns"]]
    assert len(data["rows"]) == 80 and names[:4] == ["layer", "op", "module", "where"]
    broken = data["rows"][62]
    assert broken[names.index("max_abs")] == "inf" and broken[names.index("snr_db")] is None
    assert broken[names.index("finite")] == 0 and broken[names.index("where")] == "net.py:162"
    json.dumps(data, allow_nan=False)
    # Columns that no layer has a word in are left out.
    blank = layer_data(RESULT.layers.assign(module="", file="", line=pd.NA))
    assert not {"module", "where"} & {c["name"] for c in blank["columns"]}


def test_zero_and_infinite_errors_leave_gaps() -> None:
    layers = RESULT.layers.copy()
    layers.loc[3, "rel_range"] = 0.0
    figure = errors_figure(layers)
    assert figure is not None
    line = figure.data[0]["y"]
    assert line[3] is None and line[62] is None and line[4] is not None
    marks = {t["name"]: t["x"] for t in figure.data if t["mode"] == "markers"}
    assert marks["not finite"] == [61, 62, 63, 64] and marks["pinned"] == [0, 20, 40, 60]
    assert next(x for name, x in marks.items() if name.startswith("source")) == [60]


def test_what_is_left_of_a_layer_that_overflowed_is_no_small_error() -> None:
    layers = RESULT.layers.assign(nonfinite=0)
    layers.loc[61, ["rel_range", "introduced_rel_range"]] = 1e-6  # the rest of it is right
    layers.loc[61, "introduced_finite"] = False
    layers.loc[62, ["max_abs", "rel_range"]] = np.nan  # nothing of it is finite
    layers.loc[63, ["max_abs", "rel_range", "nonfinite"]] = np.nan  # it was not measured
    figure = errors_figure(layers)
    assert figure is not None
    everything, own, *marks = figure.data
    assert everything["y"][61] is None and own["y"][61] is None and own["y"][60] is not None
    broken = next(t for t in marks if t["name"] == "not finite")
    assert broken["x"] == [61, 62, 64]
    assert min(broken["y"]) > max(v for v in everything["y"] if v is not None)


@pytest.mark.parametrize("precision", [Precision.FP16, Precision.BF16, Precision.TF32])
def test_ranges_show_the_precision_s_limits(precision: Precision) -> None:
    figure = ranges_figure(RESULT.layers, precision)
    assert figure is not None
    lines = [s["y0"] for s in figure.layout.get("shapes", ())]
    assert (
        lines
        == {
            "fp16": [65504.0, 2.0**-24],
            "bf16": [float(np.ldexp(255.0, 120)), 2.0**-133],
            "tf32": [],
        }[precision.value]
    )


def test_ranges_show_constants_beyond_the_limit() -> None:
    layers = RESULT.layers.assign(constant_min=np.nan, constant_max=np.nan)
    layers.loc[7, ["constant_min", "constant_max"]] = 3e-9, 9.79e7
    layers.loc[8, ["constant_min", "constant_max"]] = 1.0, 3.4e38  # a mask
    figure = ranges_figure(layers, Precision.FP16)
    assert figure is not None
    marks = {t["name"]: dict(zip(t["x"], t["y"], strict=True)) for t in figure.data if "x" in t}
    assert marks["constants, the largest"][7] == marks["beyond the limit"][7] == 9.79e7
    top, bottom = 65504.0 * 1e5, 2.0**-24 / 10.0  # the edges of the plot
    assert marks["constants, the largest"][8] == pytest.approx(top, rel=1e-3)
    assert marks["constants, the smallest"] == pytest.approx({7: bottom, 8: 1.0}, rel=1e-3)
    assert set(marks["beyond the limit"]) == {7, 8}
    low, high = figure.layout["yaxis"]["range"]
    assert low < math.log10(bottom) and math.log10(top) < high
    page = as_html(replace(RESULT, layers=layers))
    name = f"{layers['layer'][7]}: constants up to 9.79e+07"
    assert "Beyond the largest value: " in page and name in page


def test_the_model_as_given_shows_what_a_repair_removed() -> None:
    given = RESULT.layers.copy()
    given.loc[5, ["layer", "sensitivity", "constant_max"]] = "culprit", 100.0, 9.79e7
    page = as_html(replace(RESULT, original_layers=given))
    bars = page[page.index('id="sensitive"') : page.index('id="ranges"')]
    assert ", in the model as given</h2>" in bars
    assert bars[bars.index("<tbody>") :].split("<bdi>")[1].startswith("culprit<")
    assert bars.count("<tr") == 1 + 20 and '<td class="n">100 \u00d7 <small>fails' in bars
    assert "culprit: constants up to 9.79e+07" in page


def test_choices_stand_on_the_curves_of_error() -> None:
    result = with_choices(RESULT)
    by_layers, by_time = curve_figures(result.tradeoff, result.choice_rows)
    assert [t["name"] for t in by_time.data[:2]] == ["worst error", "95th percentile"]
    (line,) = by_layers.layout["shapes"]
    assert line["y0"] == line["y1"] == 1.0  # the tolerance
    spots = {t["text"][0]: t for t in by_layers.data if t["name"] == "choice"}
    assert list(spots) == ["A", "C", "B"]  # the recommended one on top
    # What is no number is at the top, where the axis says so: 9 would be three times the worst.
    assert spots["A"]["y"] == [27.0] and spots["A"]["marker"]["symbol"] == "square"
    for figure in (by_layers, by_time):
        assert figure.layout["yaxis"]["range"][1] == pytest.approx(math.log10(27.0))
        assert [note["text"] for note in figure.layout["annotations"]] == ["tolerance", "no number"]
    numbers = [replace(row, worst_score=min(row.worst_score, 9.0)) for row in result.choice_rows]
    layout = curve_figures(result.tradeoff, numbers)[0].layout
    assert [note["text"] for note in layout["annotations"]] == ["tolerance"]
    assert layout["yaxis"]["range"][1] > math.log10(9.0)
    assert spots["B"]["y"] == [0.81] and spots["B"]["marker"]["symbol"] == "circle"
    assert spots["C"]["y"] == [0.01] and spots["C"]["x"] == [pytest.approx(math.log10(81), 1e-3)]
    assert {t["text"][0]: t["x"] for t in by_time.data if t["name"] == "choice"} == {
        "A": [1.0],
        "B": [1.1],
        "C": [2.1],
    }
    predicted = [replace(row, latency_ms=None) for row in result.choice_rows]
    time = curve_figures(result.tradeoff, predicted)[1]
    assert [t["x"] for t in time.data if t["name"] == "choice"] == [[0.0], [1.0], [0.1]]
    assert "predicted" in time.alt
    unknown = [replace(row, saving_kept=None) for row in predicted]
    assert [f.name for f in curve_figures(result.tradeoff, unknown)] == ["layers-plot"]
    assert curve_figures(result.tradeoff, ()) == []


def test_marks_that_would_cover_each_other_are_one_if_both_pass() -> None:
    rows = with_choices(RESULT).choice_rows
    twin = replace(rows[1], recommended=False, worst_score=0.8)
    figure = curve_figures(pd.DataFrame(), [*rows, twin])[0]
    assert [t["text"] for t in figure.data] == [["A"], ["C"], ["BD"]]
    failing = replace(twin, passes=Passes.NO)
    figure = curve_figures(pd.DataFrame(), [*rows, failing])[0]
    assert sorted(t["text"][0] for t in figure.data) == ["A", "B", "C", "D"]


def test_every_cure_is_compared_or_said_not_to_be_tried() -> None:
    result = with_choices(RESULT)
    tried = result.by_requirement.assign(baselines=[{"tf32": 0.3}, {"tensorrt tf32": 0.6}])
    table = cures_table(replace(result, by_requirement=tried)).set_index("cure")
    assert table["passes"].to_dict() == {
        "plain FP16": "no",
        "graph repaired": "not tried",
        "weights rounded to fit": "not tried",
        "layers in FP32": "validated",
        "BF16": "not tried",
        "TF32": "your inputs",
        "FP32": "your inputs",
    }
    assert table.loc["TF32", "worst score"] == "0.6 \u00d7"
    assert table.loc["layers in FP32", ["FP32 layers", "ms"]].to_list() == [4, "1.100"]
    assert "plain BF16" in cures_table(replace(result, precision=Precision.BF16))["cure"].to_list()
    assert as_html(result).index('id="cures"') > as_html(result).index('id="repeat"')


def test_the_page_has_no_names_of_runners_inside() -> None:
    names = {"emulated": 3, "emulated-whole": 2}
    search = RESULT.search.assign(runner="emulated-whole")
    inputs = RESULT.inputs.assign(**{"plan_score_emulated-whole": 1.5})
    page = as_html(replace(RESULT, evaluations=names, search=search, inputs=inputs))
    assert "second emulator: 2 evaluations" in page and "emulated-whole" not in page
    assert "1.5 \u00d7" in page  # the worst of all runners


def test_two_thousand_layers_stay_under_eight_megabytes() -> None:
    assert len(as_html(synthetic_result(2000)).encode()) < 8e6


def test_a_run_that_ended_early_has_a_page() -> None:
    bare = pd.DataFrame([{"layer": "a", "op": "Add", "scope": "", "pinned": False, "module": ""}])
    early = replace(
        RESULT,
        cause=Cause.GOLDEN_MISMATCH,
        passed=False,
        layers=bare,
        outputs=pd.DataFrame(),
        search=pd.DataFrame(),
        pins=RESULT.pins.head(0),
        cost=pd.DataFrame(),
        engine=None,
        search_facts=None,
        validation=None,
        inputs=pd.DataFrame(),
        tradeoff=pd.DataFrame(),
        findings=(),
        score=math.nan,
        base_score=math.nan,
    )
    page = as_html(early)
    assert "nothing was searched" in page and 'id="repeat"' in page
    for name in ("tradeoff", "baselines", "errors", "certificate", "ship", "engines"):
        assert f'<details id="{name}"' not in page
    for name in ("curve", "build", "sensitive", "ranges", "inputs"):
        assert f'<section id="{name}"' not in page


def test_pins_that_nothing_ranked_are_not_called_ranked() -> None:
    # As a search that was cut short leaves them.
    pins = RESULT.pins.assign(proved=False, outcome_without="", score_without=math.nan)
    cut = replace(RESULT, pins=pins, complete=False)
    for result, words in (
        (cut, "not yet proved"),
        (replace(cut, ranked=True), "necessity not tested"),
    ):
        console = Console(file=io.StringIO(), width=200)
        print_verdict(console, result, verbose=True)
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        for text in (as_html(result), shown):
            assert words in text and ("not tested" in text) == result.ranked
    assert f"Pinned layers: {unproved(cut)}</summary>" in as_html(cut)


def test_a_verdict_on_all_outputs_stands_once() -> None:
    console = Console(file=io.StringIO(), width=200)
    print_verdict(console, RESULT, verbose=True)
    shown = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    (logits,) = (i for i, line in enumerate(shown) if line.startswith("fp16 "))
    assert shown[logits].split()[1:3] == ["logits", "non-finite"]
    assert shown[logits + 1].split()[0] == "boxes" and "non-finite" not in shown[logits + 1]


def on_screen(result: Record) -> list[list[str]]:
    """The words of each line on a wide screen, with the details."""
    console = Console(file=io.StringIO(), width=200)
    print_verdict(console, result, verbose=True)
    return [line.split() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def test_pins_stand_the_most_harmful_first_everywhere() -> None:
    """Of four pins one is held, one is finite, one infinite and one was not measured alone."""
    layers = RESULT.layers.assign(sensitivity=math.nan, rank=RESULT.layers.index + 1)
    layers.loc[[20, 40], "sensitivity"] = [2.5, math.inf]
    pins = RESULT.pins.assign(held=[True, False, False, False])
    order = [RESULT.pinned[place] for place in (2, 1, 3, 0)]
    for proved in (True, False):
        result = replace(RESULT, layers=layers, pins=pins.assign(proved=proved))
        assert shown_pins(result)["layer"].to_list() == order
        shown = {line[0]: line[2] for line in on_screen(result) if line and line[0] in order}
        assert list(shown.items()) == list(zip(order, ("no", "2.5", "not", "not"), strict=True))
        for text in (as_markdown(result).split("## Pinned layers")[1], as_html(result)):
            names = text[text.index("ordered by sensitivity") :]
            assert sorted(order, key=names.index) == order
            assert "not measured alone follow by rank. " in names.replace("\n- ", " ")
            assert "Not measured, and last: 1 layer (held from the start)." in names
    assert RESULT.pinned == result.pinned  # plan.json and run.json keep the network's order


def test_without_sensitivities_pins_have_no_column_of_them() -> None:
    unmeasured = replace(RESULT, layers=RESULT.layers.assign(sensitivity=math.nan))
    assert sensitivity_sentences(unmeasured) == []
    assert not any("sensitivity," in line for line in on_screen(unmeasured))
    assert any("sensitivity," in line for line in on_screen(RESULT))


def test_a_dead_channel_is_no_small_one() -> None:
    layers = RESULT.layers.copy()
    small = [f"channel_peak_{q}" for q in ("min", "p25")]
    layers.loc[0, small] = 0.0  # pinned: a quarter of its channels are zero
    dead = [c for c in layers if str(c).startswith("channel_peak_")]
    layers.loc[20, [*dead, "ref_min", "ref_max"]] = 0.0  # pinned: all are
    figure = ranges_figure(layers, Precision.FP16)
    assert figure is not None
    lower_edge = figure.data[0]["y"]
    assert lower_edge[0] == pytest.approx(layers.loc[0, "channel_peak_p50"], rel=1e-3)
    json.dumps([t["y"] for t in figure.data], allow_nan=False)


def test_sources_are_named() -> None:
    assert sources(RESULT.layers) == f"Errors start at {RESULT.layers['layer'][60]}."
    assert sources(RESULT.layers.assign(source=True)).endswith(" and 77 more.")
    assert sources(RESULT.layers.assign(source=False)) == sources(RESULT.layers[["layer"]]) == ""
    assert sources(RESULT.layers) in as_html(RESULT)


def test_constants_that_partly_vanish_come_last() -> None:
    findings = [Finding("weight-underflow", "a", "vanishing"), Finding("tf32", "", "turn it off")]
    page = as_html(replace(RESULT, findings=findings))
    assert page.index("turn it off") < page.index("vanishing")
