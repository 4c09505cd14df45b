"""The screen of a run: its verdict, its width, its length and its exit code."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from pathlib import Path

import pytest

from bisect_trt.base.interrupt import STAGES
from bisect_trt.base.outcomes import Cause, Finding, Tally
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.metrics.parser import parse_known
from bisect_trt.report.build import build_command, why_no_tf32
from bisect_trt.report.choices import Choice, Passes
from bisect_trt.report.first_lines import verdict_line
from bisect_trt.report.junit import as_junit
from bisect_trt.report.record import Record
from bisect_trt.report.tables import choices_table
from bisect_trt.report.terminal import MAX_LINES, ProgressObserver, plain, print_verdict
from tests.report.synthetic import synthetic_result

RESULT = synthetic_result(40)
FP16, FP32 = PrecisionPlan(Precision.FP16), PrecisionPlan(Precision.FP32)


def shown(result: Record, width: int = 80, **more: bool) -> list[str]:
    """The screen's lines."""
    text = io.StringIO()
    print_verdict(plain(file=text, width=width), result, **more)
    return text.getvalue().splitlines()


def row(name: str, score: float, passes: Passes, **more: object) -> Choice:
    """A row of the choices."""
    fields = {"plan": FP16, "pinned": (), "repaired": False, **more}
    return Choice(name=name, worst_score=score, passes=passes, **fields)  # type: ignore[arg-type]


ROWS = (
    row("as it is", 100.0, Passes.NO),
    row("BF16", 6.0, Passes.NO),
    row("plan", 0.5, Passes.VALIDATED, pinned=("a",)),
    row("FP32", 0.0, Passes.GIVEN, plan=FP32, pinned=("a", "b")),
    row("repaired", 0.5, Passes.VALIDATED, repaired=True, recommended=True),
)


def test_the_verdict_comes_first_in_words_and_is_what_run_json_says() -> None:
    assert RESULT.validation is not None
    few = replace(RESULT.validation, holdout=Tally(11, 12, 0.66, 1.2, "x"))
    missed = replace(RESULT.validation, perturbed=Tally(20, 64, 0.2, 3.0, "x"))
    for result, verdict, code in (
        (RESULT, "VALIDATED with 2 of 40 layers in FP32", 0),
        (replace(RESULT, validation=few), "NEEDS MORE DATA with 2 of", 1),
        (replace(RESULT, validation=missed), "PASSES YOUR INPUTS ONLY with 2 of", 1),
        (replace(RESULT, validation=None), "NOT VALIDATED with 2 of", 1),
        (replace(RESULT, passed=False), "CANNOT BE MET", 1),
        (replace(RESULT, passed=False, cause=Cause.ENGINE_FAILED), "NOT JUDGED: TensorRT does", 1),
    ):
        assert shown(result)[0].startswith(verdict), verdict
        # With --strict only what is validated is 0; without it what is met is.
        assert replace(result, strict=True).exit_code == code
        assert result.exit_code == (0 if result.passed else 1)
        # What --strict alone refuses is said, and is a failure for CI too.
        asks = replace(result, strict=True)
        refuses = result.passed and code == 1
        assert any("--strict asks" in line for line in shown(asks)) == refuses
        assert ('message="exit code 1, since --strict' in as_junit(asks)) == refuses
    assert verdict_line(replace(RESULT, choice_rows=ROWS, pins=RESULT.pins.head(0))) == (
        "VALIDATED after repair"
    )


def test_a_screen_has_at_most_25_lines_and_no_name_is_broken() -> None:
    name = "encoder.layers.0.attention.self.query.with.a.very.long.name.that.goes.on.and.on.MatMul"
    notes = [Finding(f"kind {k}", "", f"finding {k} " + "of many words " * 9) for k in range(9)]
    result = replace(RESULT, sentence=f"FP16 overflows in {name}.", findings=notes)
    result = replace(result, choice_rows=ROWS, dynamic_inputs=())
    lines = shown(result)
    assert len(lines) + sum(len(line) > 80 for line in lines) <= MAX_LINES
    assert any(name in line for line in lines)
    assert lines[-1].endswith("-v shows all")
    assert not any("\x1b" in line for line in lines)
    whole = " ".join(" ".join(shown(result, verbose=True)).split())
    assert whole.count("of many words") == 5 * 9


def test_rows_are_sorted_and_errors_are_in_the_requirement_s_unit() -> None:
    table = choices_table(ROWS, ["fold-bn"], ["snr_db>=40"])
    assert table["choice"].to_list() == [
        *("FP16 as it is", "repaired (fold-bn)", "1 layer in FP32", "BF16", "FP32"),
    ]
    assert table[""].to_list() == ["", ">", "", "", ""]
    assert table["worst SNR"].to_list() == ["0.0 dB", "46.0 dB", "46.0 dB", "24.4 dB", "exact"]
    largest = choices_table(ROWS, ["fold-bn"], ["max_abs<=0.01"])
    assert largest["worst max_abs"].to_list()[:2] == ["1", "0.005"]
    several = choices_table(ROWS, ["fold-bn"], ["max_abs<=0.01", "cosine>=0.9"])
    assert several["worst score"].to_list()[1] == "0.5 of tolerance"


@pytest.mark.parametrize(
    "text", ["max_abs<=0.01", "snr_db>=40", "cosine>=0.999", "y:rmse@mean<=2", "psnr_db>=30"]
)
def test_a_value_is_the_inverse_of_its_score(text: str) -> None:
    item = parse_known(text)
    assert item is not None
    for score in (1e-3, 0.5, 1.0, 7.0):
        assert item.score_of(item.value_at(score)) == pytest.approx(score, rel=1e-6)
    assert math.isnan(item.value_at(math.inf))


def test_a_metric_of_the_user_has_no_unit_here() -> None:
    assert parse_known("my_metric<=0.1") is None


def test_tf32_is_off_in_the_command_where_it_alone_fails() -> None:
    free = replace(RESULT, pins=RESULT.pins.head(0), choice_rows=())
    outputs = free.outputs.assign(score=free.outputs["score"].where(~is_tf32(free), 1.12))
    failing = replace(free, outputs=outputs)
    assert "--noTF32" not in build_command(free) and why_no_tf32(free) == ""
    assert "--stronglyTyped --noTF32" in build_command(failing)
    words = "--noTF32 is required: TF32 alone uses 1.12 of the tolerance"
    assert words in " ".join(" ".join(shown(failing)).split())
    # What stays in FP32 was judged in strict FP32.
    assert "--noTF32" in build_command(RESULT)


def is_tf32(result: Record) -> object:
    """The rows of the outputs with everything in TF32."""
    return result.outputs["baseline"].eq("tf32")


def test_a_log_names_the_stage_and_its_number() -> None:
    text = io.StringIO()
    with ProgressObserver(plain(file=text, width=200), quiet=False, interval_s=0.01) as observer:
        for stage in STAGES:
            observer.stage(stage)
        observer.step("tradeoff")
        while "tradeoff" not in text.getvalue():
            pass
    assert "] 5/5 validation: tradeoff" in text.getvalue()


def test_a_folder_with_a_space_is_quoted(tmp_path: Path) -> None:
    spaced = replace(RESULT, folder=tmp_path / "my run")
    assert f"'--onnx={tmp_path}/my run/model.typed.onnx'" in build_command(spaced)
