"""``import``, and the commands that take a list where a plan may be given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import bisect_trt
from bisect_trt.base.errors import BadInputError
from bisect_trt.base.interrupt import Observer
from bisect_trt.base.outcomes import LISTED
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.graph import list_layers, to_typed
from bisect_trt.model.lifted import load_source
from bisect_trt.settings import Settings
from bisect_trt.steps.import_plan import older_plan
from bisect_trt.steps.problem import load
from bisect_trt.steps.saved_plan import read_plan
from fixtures.encoders import encoder_decomposed
from fixtures.models import residual
from tests.command import call, run_of, saved

FIXTURE = encoder_decomposed()
NAMES = [layer.name for layer in list_layers(FIXTURE.model)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the model and a build script, in which commands run."""
    saved(FIXTURE, tmp_path)
    kept = ",".join(f"{name}:fp32" for name in NAMES[:3])
    (tmp_path / "build.sh").write_text(
        f"trtexec --onnx=m.onnx --fp16 '--layerPrecisions={kept},/nowhere:fp32'\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_list_becomes_a_plan_and_a_table(folder: Path) -> None:
    ended = call("import", "m.onnx", "build.sh", "-o", "plan.json")
    assert ended.exit_code == 0
    assert "build.sh: trtexec, 4 entries: 3 mapped, 0 widened, 1 refused; 3 layers in FP32" in (
        ended.output
    )
    assert "/nowhere" in ended.output and "no layer has this name" in ended.output
    assert NAMES[0] not in ended.output
    plan = read_plan(folder / "plan.json")
    assert plan.plan == PrecisionPlan("fp16", NAMES[:3])
    verbose = call("import", "m.onnx", "build.sh", "-v")
    assert all(name in verbose.output for name in NAMES[:3])


def test_the_written_plan_can_be_exported(folder: Path) -> None:
    call("import", "m.onnx", "build.sh", "-o", "plan.json")
    made = call("export", "m.onnx", "--plan", "plan.json", "--format", "onnx", "-o", "t.onnx")
    assert made.exit_code == 0
    again = call("import", "m.onnx", "t.onnx", "--json")
    assert json.loads(again.output)["pinned"] == sorted(NAMES[:3])


def test_json_has_every_entry(folder: Path) -> None:
    record = json.loads(call("import", "m.onnx", "build.sh", "--json").output)
    counts = {key: record[key] for key in ("mapped", "widened", "refused")}
    assert counts == {"mapped": 3, "widened": 0, "refused": 1}
    assert [entry["status"] for entry in record["entries"]] == [*["mapped"] * 3, "refused"]
    assert record["entries"][0]["layers"] == [NAMES[0]] and record["entries"][0]["line"] == 1


@pytest.mark.parametrize(
    "words",
    [
        ["--fp16", f"--layerPrecisions={NAMES[0]}:fp32"],
        [f"--fp16 --layerPrecisions={NAMES[0]}:fp32"],
        ["--nodes_to_exclude", NAMES[0], "--low_precision_type", "fp16"],
        ["--node_block_list", NAMES[0]],
    ],
)
def test_options_of_other_tools_are_taken_as_they_are(words: list[str], folder: Path) -> None:
    record = json.loads(call("import", "m.onnx", *words, "--json").output)
    assert record["pinned"] == [NAMES[0]]


def test_strict_says_what_is_refused(folder: Path) -> None:
    assert call("import", "m.onnx", "build.sh", "--strict").exit_code == 1
    text = f"--layerPrecisions={NAMES[0]}:fp32"
    assert call("import", "m.onnx", text, "--strict").exit_code == 0


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["nowhere.sh"], "neither a file nor options with a list of layers"),
        (["build.sh", "--form", "script"], "no Python"),
        (["build.sh", "-o", "build.sh"], "would be written over"),
        (["build.sh", "-o", "m.onnx"], "would be written over"),
        (["m.onnx"], "no node of it gives FP16 or BF16 tensors"),
        (["x.npz"], "cannot be read"),
        (["."], "neither a file nor options"),
        ([""], "neither a file nor options"),
        (["--layerPrecisions=/nowhere:fp32"], "none of its 1 entry is a layer of m.onnx"),
        (["build.sh", "--form", "tensorrt"], "is not one of"),
        (["build.sh", "--stric"], "No such option --stric; did you mean --strict?"),
        (["--layerPrecision=x:fp32"], "did you mean --layerPrecisions?"),
        (["--fp16 --layerPrecisions=x:fp32", "-x"], "No such option -x"),
        ([], "Missing argument"),
    ],
)
def test_a_mistake_is_exit_2_and_a_line(words: list[str], reason: str, folder: Path) -> None:
    ended = call("import", "m.onnx", *words)
    assert ended.exit_code == 2
    assert reason in ended.output and "Traceback" not in ended.output


def test_a_reduced_model_is_refused(folder: Path) -> None:
    typed = to_typed(FIXTURE.model, PrecisionPlan("fp16", NAMES[:3]))
    (folder / "t.onnx").write_bytes(typed.SerializeToString())
    ended = call("import", "t.onnx", "build.sh")
    assert ended.exit_code == 2 and "give the FP32 model" in ended.output


def test_bf16_is_the_base_where_it_is_asked_for(folder: Path) -> None:
    call("import", "m.onnx", "build.sh", "-o", "plan.json", "--precision", "bf16")
    assert read_plan(folder / "plan.json").plan == PrecisionPlan("bf16", NAMES[:3])


@pytest.fixture
def mixed(folder: Path) -> Path:
    """A model in BF16 but for three layers."""
    typed = to_typed(FIXTURE.model, PrecisionPlan("bf16", NAMES[:3]))
    (folder / "b.onnx").write_bytes(typed.SerializeToString())
    return folder


GIVEN = ("m.onnx", "--input", "x.npz", "--precision", "fp16")


@pytest.mark.parametrize(
    "words",
    [
        ("import", "m.onnx", "b.onnx", "--precision", "fp16"),
        ("run", *GIVEN, "--start-from", "b.onnx"),
        ("run", *GIVEN, "--reduced", "b.onnx"),
        ("verify", *GIVEN, "--reduced", "b.onnx"),
        ("run", *GIVEN[:4], "tf32", "--start-from", "b.onnx"),
    ],
)
def test_another_precision_than_the_mixed_model_s_is_refused(
    words: tuple[str, ...], mixed: Path
) -> None:
    ended = call(*words)
    asked = "tf32" if "tf32" in words else "fp16"
    assert ended.exit_code == 2
    assert f"--precision {asked}: b.onnx is BF16; leave the option out" in ended.output


def test_python_refuses_another_precision_where_it_is_given(mixed: Path) -> None:
    for option in ("reduced", "start_from"):
        with pytest.raises(BadInputError, match=r"precision='fp16': b\.onnx is BF16"):
            bisect_trt.bisect("m.onnx", "x.npz", precision="fp16", **{option: "b.onnx"})
    with pytest.raises(BadInputError, match=r"precision='fp16': b\.onnx is BF16"):
        bisect_trt.verify("m.onnx", "x.npz", precision="fp16", reduced="b.onnx")


def test_without_a_precision_the_mixed_model_s_is_taken(mixed: Path) -> None:
    record = json.loads(call("import", "m.onnx", "b.onnx", "--json").output)
    assert (record["base"], record["pinned"]) == ("bf16", sorted(NAMES[:3]))
    for option in ("--start-from", "--reduced"):
        settings = Settings("m.onnx", ["x.npz"], **{option[2:].replace("-", "_"): "b.onnx"})
        assert load(settings, Observer()).settings.precision == "bf16"
    ended = call("run", *GIVEN[:3], "--dry-run", "--start-from", "b.onnx")
    assert ended.exit_code == 0


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("name", ["kept.txt", "kept", "kept.json"])
def test_a_plan_is_known_by_its_content(name: str, mark: str, folder: Path) -> None:
    call("import", "m.onnx", "build.sh", "-o", "plan.json")
    (folder / name).write_text(mark + (folder / "plan.json").read_text(), encoding="utf-8")
    older = older_plan(folder / name, lambda: load_source("m.onnx"))
    assert older.imported is None and older.plan == PrecisionPlan("fp16", NAMES[:3])
    ended = call("import", "m.onnx", name)
    assert ended.exit_code == 2 and "is a plan already" in ended.output


@pytest.mark.parametrize("name", ["lists.txt", "lists.json"])
def test_a_list_with_a_mark_of_its_order_of_bytes_is_read(name: str, folder: Path) -> None:
    text = json.dumps({"node_block_list": NAMES[:2]})
    (folder / name).write_text("\ufeff" + text, encoding="utf-8")
    older = older_plan(folder / name, lambda: load_source("m.onnx"))
    assert older.imported is not None and older.plan.pinned == set(NAMES[:2])


def test_verify_takes_a_list_and_says_what_it_is(folder: Path) -> None:
    options = ("--robust", "0", "--augmented", "none", "--runner", "emulated")
    ended = call("verify", "m.onnx", "--input", "x.npz", "--plan", "build.sh", *options)
    assert ended.exit_code == 1  # three layers are too few
    assert "build.sh: trtexec, 4 entries" in ended.output
    assert "1 entry refused, such as '/nowhere'" in ended.output
    found = bisect_trt.verify(
        "m.onnx", "x.npz", "build.sh", robust=0, augmented="none", runner="emulated"
    )
    assert found.plan == PrecisionPlan("fp16", NAMES[:3]) and not found.passed


def listed(tmp_path: Path, kept: list[str]) -> bisect_trt.Result:
    """A run that begins at a list of ``kept``."""
    tmp_path.mkdir(exist_ok=True)
    text = ",".join(f"{name}:fp32" for name in kept)
    (tmp_path / "build.sh").write_text(f"trtexec '--layerPrecisions={text}'\n")
    start = tmp_path / "build.sh"
    return run_of(FIXTURE, tmp_path / "out", robust=0, augmented="none", start_from=start)


def test_run_judges_a_list_beside_its_answer(tmp_path: Path) -> None:
    alone = run_of(FIXTURE, tmp_path / "alone", robust=0, augmented="none")
    needed = sorted(alone.pinned)
    idle = [name for name in NAMES if name not in needed][:4]
    for kept, passes in ((idle, "no"), ([*needed, *idle], "given")):
        result = listed(tmp_path / passes, kept)
        (row,) = (c for c in result.choice_rows if c.name == f"{LISTED} (build.sh)")
        assert set(row.pinned) == set(kept) and row.passes.value == passes
        assert row.worst_score > 1 if passes == "no" else row.worst_score <= 1
        (said,) = (f.message for f in result.findings if f.kind == "list-judged")
        ours = set(result.pinned)
        assert f"{len(kept)} layers in FP32, " in said
        assert f"{len(ours & set(kept))} of them are in the plan" in said
        assert f"{len(set(kept) - ours)} are not needed" in said
        assert f"{len(ours - set(kept))} are missing" in said
        assert f"Recommended: plan, {len(ours)} layers" in said
        record = json.loads((tmp_path / passes / "out" / "run.json").read_text())
        assert f"{LISTED} (build.sh)" in [choice["name"] for choice in record["choices"]]


def test_a_list_that_fails_is_not_where_the_search_begins(tmp_path: Path) -> None:
    alone = run_of(FIXTURE, tmp_path / "alone", robust=0, augmented="none")
    idle = [name for name in NAMES if name not in alone.pinned][:40]
    assert listed(tmp_path / "no", idle).pinned == alone.pinned


def test_a_list_of_another_model_is_refused_by_run(tmp_path: Path) -> None:
    (tmp_path / "build.sh").write_text(f"--layerPrecisions={NAMES[0]}:fp32")
    with pytest.raises(BadInputError, match="none of its 1 entry"):
        run_of(residual(), tmp_path / "out", start_from=tmp_path / "build.sh")
