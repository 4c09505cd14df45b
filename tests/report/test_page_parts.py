"""The page's tables and plots as data, where a browser is not needed to see that they are right."""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from bisect_trt.base.outcomes import Cause, Finding
from bisect_trt.base.plan import Precision
from bisect_trt.report.figures import (
    channels_figure,
    errors_figure,
    label,
    modules_figure,
    ranges_figure,
    tradeoff_figure,
)
from bisect_trt.report.html import as_html, layer_data, pin_rows
from bisect_trt.report.tables import requirement_scores
from bisect_trt.report.terminal import print_verdict
from bisect_trt.report.text import misses_alone, sources, unproved
from tests.report.synthetic import synthetic_result

RESULT = synthetic_result(80)


def test_a_requirement_is_scored_by_output_and_baseline() -> None:
    found = requirement_scores(RESULT.by_requirement, RESULT.outputs)
    assert [(r.requirement, r.output) for r in found] == [
        ("max_abs<=1e-2", "logits"),
        ("max_abs<=1e-2", "boxes"),
        ("logits:cosine>=0.999", "logits"),
    ]
    fp32, tf32, fp16, plan, _ = found[0].cells
    assert fp32 and tf32 and fp16 and plan
    assert (tf32.value, plan.score) == (pytest.approx(6e-3), pytest.approx(0.7))
    assert math.isinf(fp16.score)  # not finite, whatever the number says
    assert requirement_scores(RESULT.by_requirement, pd.DataFrame()) == []


def test_what_no_output_s_errors_tell_is_scored_for_all_together() -> None:
    texts = ["accuracy>=0.9", "top1@mean>=0.99", "max_abs@mean<=1", "atol=1,rtol=1", "argmax>=0.5"]
    table = pd.DataFrame({"requirement": texts, "baselines": [{"fp32": 0.1, "plan": 0.8}] * 5})
    found = requirement_scores(table, RESULT.outputs)
    assert [(r.requirement, r.output) for r in found] == [(text, "") for text in texts]
    fp32, tf32, _, plan, _ = found[0].cells
    assert fp32 and plan and (fp32.score, tf32, plan.score) == (0.1, None, 0.8)
    page = as_html(replace(RESULT, by_requirement=table))
    assert "<td>together</td>" in page and "0.8 \u00d7</td>" in page


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
    for figure in (
        ranges_figure(RESULT.layers, precision),
        channels_figure(RESULT.layers, precision),
    ):
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


def test_a_module_s_box_is_as_wide_as_its_layers() -> None:
    figure = modules_figure(RESULT.layers)
    assert figure is not None
    boxes = {
        re.sub("<.*", "", text): (x - width / 2, width, base)
        for trace in figure.data
        for text, x, width, base in zip(
            trace["text"], trace["x"], trace["width"], trace["base"], strict=True
        )
    }
    assert boxes["the model"] == (0, 80, 0) and boxes["encoder"] == (0, 80, 1)
    assert boxes["0"] == (0, 40, 3) and boxes["1"] == (40, 40, 3)


def test_without_modules_the_boxes_are_operators() -> None:
    figure = modules_figure(RESULT.layers.assign(module="", scope=""))
    assert figure is not None
    text = {t.partition("<")[0] for trace in figure.data for t in trace["text"]}
    assert text == {"the model", "Conv", "MatMul", "Add", "Softmax", "Pow"}


def test_labels_are_text_to_plotly() -> None:
    assert label("<b>") == "&lt;b&gt;" and "\u202e" not in label("a\u202eb")
    assert len(label("x" * 5000)) == 65


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
        assert f'<section id="{name}"' not in page


def test_pins_that_nothing_ranked_are_not_called_ranked() -> None:
    # As a search that was cut short leaves them.
    pins = RESULT.pins.assign(proved=False, outcome_without="", score_without=math.nan)
    cut = replace(RESULT, pins=pins, complete=False)
    for result, words in ((cut, "not yet proved"), (replace(cut, ranked=True), "ranked, not")):
        console = Console(file=io.StringIO(), width=200)
        print_verdict(console, result)
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        for text in (as_html(result), shown):
            assert words in text and ("ranked" in text.partition("Suspicion")[0]) == result.ranked
    assert f"Pinned layers: {unproved(cut)}</h2>" in as_html(cut)


def test_a_verdict_on_all_outputs_stands_once() -> None:
    console = Console(file=io.StringIO(), width=200)
    print_verdict(console, RESULT)
    shown = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    (logits,) = (i for i, line in enumerate(shown) if line.startswith("fp16 "))
    assert shown[logits].split()[1:3] == ["logits", "non-finite"]
    assert shown[logits + 1].split()[0] == "boxes" and "non-finite" not in shown[logits + 1]


def test_unproved_pins_stand_the_most_harmful_first() -> None:
    unproven = replace(RESULT, pins=RESULT.pins.assign(proved=False))
    table = pin_rows(unproven)
    scores = [row[table.columns.index("sensitivity")] for row in table.rows]
    assert scores == sorted(scores, reverse=True) and len(scores) == 4
    assert [
        row[0] for row in pin_rows(RESULT).rows
    ] == RESULT.pinned  # a certificate's are in order


def test_numbers_of_pins_do_not_stand_on_each_other() -> None:
    rows = RESULT.tradeoff.iloc[[0, 1, 2, 3, 3, 4]].assign(
        pins=[0, 2, 8, 32, 124, 128], set=["ranking"] * 4 + ["answer", "ranking"]
    )
    figure = tradeoff_figure(rows)
    assert figure is not None
    axis = figure.layout["xaxis"]
    assert axis["ticktext"] == ["0", "2", "8", "32", "124"] and len(axis["tickvals"]) == 5


def test_a_dead_channel_is_no_small_one() -> None:
    layers = RESULT.layers.copy()
    small = [f"channel_peak_{q}" for q in ("min", "p25")]
    layers.loc[0, small] = 0.0  # pinned: a quarter of its channels are zero
    dead = [c for c in layers if str(c).startswith("channel_peak_")]
    layers.loc[20, [*dead, "ref_min", "ref_max"]] = 0.0  # pinned: all are
    figure = channels_figure(layers, Precision.FP16)
    assert figure is not None
    whiskers, bars = figure.data[0]["y"], figure.data[1]
    assert whiskers[0] == pytest.approx(layers.loc[0, "channel_peak_p50"], rel=1e-3)
    assert bars["base"][0] == whiskers[0] and bars["layers"] == [0, 40, 60]
    figure = ranges_figure(layers, Precision.FP16)
    assert figure is not None
    assert figure.data[0]["y"][0] == whiskers[0]  # the band's lower edge
    json.dumps([t["y"] for t in figure.data], allow_nan=False)


def test_what_harms_alone_is_named() -> None:
    layers = pd.DataFrame({"layer": list("abcdef"), "sensitivity": [0.5, 3.0, 1.5, 9.0, 2.0, 0.1]})
    assert misses_alone(layers) == "d, b, e and 1 more miss the requirement alone."
    assert misses_alone(layers.tail(2)) == "e misses the requirement alone."
    assert misses_alone(layers.head(1)).startswith("Of 1 layer measured alone none")
    assert misses_alone(layers.assign(sensitivity=math.nan)) == ""
    assert misses_alone(layers[["layer"]]) == ""


def test_sources_are_named() -> None:
    assert sources(RESULT.layers) == f"Errors start at {RESULT.layers['layer'][60]}."
    assert sources(RESULT.layers.assign(source=True)).endswith(" and 77 more.")
    assert sources(RESULT.layers.assign(source=False)) == sources(RESULT.layers[["layer"]]) == ""
    assert sources(RESULT.layers) in as_html(RESULT)


def test_constants_that_partly_vanish_come_last() -> None:
    findings = [Finding("weight-underflow", "a", "vanishing"), Finding("tf32", "", "turn it off")]
    page = as_html(replace(RESULT, findings=findings))
    assert page.index("turn it off") < page.index("vanishing")
