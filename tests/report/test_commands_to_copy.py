"""What is offered to copy: shell lines that split into what was meant, and Python that compiles."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import pandas as pd

from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.report.build import build_command, profile_of_inputs
from bisect_trt.report.html import as_html, recipes
from bisect_trt.report.markdown import as_markdown
from bisect_trt.settings import Settings, as_command
from tests.report.synthetic import synthetic_result

SHIPPED = synthetic_result(40)
TEXTS = {r.name: r.text for r in recipes(replace(SHIPPED, plan=PrecisionPlan(Precision.FP16)))}


def words(name: str) -> list[str]:
    return shlex.split(TEXTS[name].replace("\\\n", " "))


def test_a_profile_spans_the_inputs_shapes() -> None:
    shapes = profile_of_inputs(SHIPPED)["x"]
    assert shapes == ((1, 3, 32, 64), (1, 3, 64, 64), (1, 3, 96, 64))
    assert profile_of_inputs(replace(SHIPPED, dynamic_inputs=())) == {}
    assert profile_of_inputs(replace(SHIPPED, inputs=pd.DataFrame())) == {}


def test_the_shapes_of_a_profile_s_median_are_those_of_one_input() -> None:
    """A mask as long as its tokens would not fit the median of the tokens alone."""
    rows = [{"x": [1, x], "mask": [1, x, y]} for x, y in ((9, 1), (1, 30), (5, 2))]
    inputs = pd.DataFrame({"shapes": [json.dumps(row) for row in rows]})
    found = profile_of_inputs(replace(SHIPPED, inputs=inputs, dynamic_inputs=("x", "mask")))
    assert found == {
        "x": ((1, 1), (1, 9), (1, 9)),
        "mask": ((1, 1, 1), (1, 9, 1), (1, 9, 30)),
    }


def test_the_screen_the_report_and_the_page_have_one_build_command() -> None:
    (line,) = (line for line in as_markdown(SHIPPED).splitlines() if line.startswith("Build: "))
    command = next(r.text for r in recipes(SHIPPED) if r.name == "trtexec").replace("\\\n", " ")
    in_folder = shlex.split(build_command(SHIPPED, in_folder=True))
    assert shlex.split(command) == in_folder
    assert shlex.split(line.removeprefix("Build: ")) == in_folder
    assert in_folder[-1] == "--saveEngine=model.engine"
    assert shlex.split(build_command(SHIPPED))[-1] == (
        f"--saveEngine={SHIPPED.folder}/model.engine"
    )


def test_builders_get_the_typed_model_its_shapes_and_no_tf32() -> None:
    assert {"--stronglyTyped", "--noTF32", "--maxShapes=x:1x3x96x64"} <= set(words("trtexec"))
    compile(TEXTS["Python"], "ship.py", "exec")
    assert "clear_flag(trt.BuilderFlag.TF32)" in TEXTS["Python"]
    assert (
        "profile.set_shape('x', (1, 3, 32, 64), (1, 3, 64, 64), (1, 3, 96, 64))" in TEXTS["Python"]
    )


def test_the_page_begins_with_the_build_command() -> None:
    page = as_html(SHIPPED)
    build = page[page.index('<section id="build"') :].partition("</section>")[0]
    command = build.partition("<code>")[2].partition("</code>")[0].replace("\\\n", " ")
    assert shlex.split(command)[:2] == ["trtexec", "--onnx=model.typed.onnx"]
    assert "--noTF32" in shlex.split(command) and 'class="copy">Copy</button>' in build
    assert page.index('id="build"') < page.index('id="sensitive"')
    tf32 = as_html(replace(SHIPPED, plan=PrecisionPlan(Precision.TF32)))
    assert "--noTF32" not in tf32 and "--stronglyTyped" in tf32
    assert 'id="build"' not in as_html(replace(SHIPPED, passed=False))


def test_a_plan_for_tf32_keeps_it() -> None:
    found = {r.name: r.text for r in recipes(replace(SHIPPED, plan=PrecisionPlan(Precision.TF32)))}
    assert "--noTF32" not in found["trtexec"]
    assert "set_flag(trt.BuilderFlag.TF32)" in found["Python"]


def test_nothing_is_offered_where_no_plan_passes() -> None:
    assert recipes(replace(SHIPPED, passed=False)) == []


def test_the_check_takes_the_run_s_inputs() -> None:
    command = (
        "bisect-trt run 'my model.onnx' --input 'a b.npz' --workers 2 --stacked --input pages "
        "--infinite mask --requirement 'max_abs<=1' --out 'made here'"
    )
    odd = replace(SHIPPED, model="my model.onnx", command=command)
    text = next(r.text for r in recipes(odd) if "verify" in r.text).replace("\\\n", " ")
    assert shlex.split(text) == [
        *("bisect-trt", "verify", "my model.onnx", "--input", "a b.npz", "--stacked"),
        *("--input", "pages", "--infinite", "mask", "--plan", "made here/plan.json"),
    ]


def test_a_folded_line_keeps_an_option_beside_its_value() -> None:
    command = f"bisect-trt run model.onnx --input {'long/' * 15}"
    text = next(r.text for r in recipes(replace(SHIPPED, command=command)) if "verify" in r.text)
    lines = [line.strip(" \\") for line in text.split("\n")]
    assert len(lines) > 1 and all(line.startswith("--") for line in lines[1:])
    assert any(line.endswith("--plan plan.json") for line in lines)


def test_a_command_names_what_is_not_the_default() -> None:
    settings = Settings(
        "a b.onnx", ["x.npz", {"x": 1}], require=["max_abs<=1e-2"], stacked=True, workers=2
    )
    assert shlex.split(as_command(settings)) == [
        *("bisect-trt", "run", "a b.onnx", "--input", "x.npz", "--input", "ARRAYS"),
        *("--requirement", "max_abs<=1e-2", "--stacked", "--workers", "2"),
    ]
