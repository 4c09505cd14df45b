"""``bisect-trt reduce`` as a stranger calls it, with a command of the user's or none."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result

import bisect_trt
from bisect_trt.base.errors import BadInputError
from bisect_trt.cli import main
from tests.conftest import HANG_S
from tests.networks import branching
from tests.planted import residual

CHECK = """
import sys
sys.path.insert(0, {root!r})
import numpy as np, onnx
from bisect_trt.runners.reference import outputs_of
from tests.planted import with_wrong_kernel
inputs, expected = np.load(sys.argv[2]), np.load(sys.argv[3])
found = outputs_of(with_wrong_kernel(onnx.load(sys.argv[1]), 0.05), dict(inputs), "subgraph")
worst = max(float(np.abs(found[n] - expected[n]).max()) for n in found)
print("off by", worst)
sys.exit(worst > 1e-3)
"""


def files(folder: Path) -> list[str]:
    model, arrays = residual(5, [3])
    onnx.save(model, folder / "m.onnx")
    np.savez(folder / "x.npz", **arrays)
    return [str(folder / "m.onnx"), "--input", str(folder / "x.npz"), "--out", str(folder / "r")]


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["reduce", *arguments])


def checking(folder: Path) -> str:
    root = str(Path(__file__).resolve().parents[2])
    (folder / "check.py").write_text(CHECK.format(root=root))
    words = [sys.executable, str(folder / "check.py"), "{model}", "{inputs}", "{expected}"]
    return shlex.join(words)


def test_a_command_says_what_is_bad(tmp_path: Path) -> None:
    arguments = files(tmp_path)
    result = call(*arguments, "--check", checking(tmp_path), "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert [n["name"] for n in record["nodes"]] == ["conv3", "relu3", "add3"]
    assert record["suspect"] == "check" and record["builds"] <= 16
    assert record["subgraph"]["failure"].startswith("exit code 1: off by 0.0")
    assert not (tmp_path / "r" / "run.py").exists()
    model = onnx.load(tmp_path / "r" / "model.onnx")
    assert [n.op_type for n in model.graph.node] == ["Conv", "Relu", "Add"]
    page = (tmp_path / "r" / "README.md").read_text()
    assert page.startswith("# The check calls a model of 3 nodes (Conv, Relu, Add) bad.")


def test_the_screen_and_silence(tmp_path: Path) -> None:
    arguments = [*files(tmp_path), "--check", "false {model}"]
    said = " ".join(call(*arguments).output.split())
    assert "Fails the check with 1 of 20 nodes: conv0 (Conv); nothing can be left out." in said
    assert "No subgraph that was tried was ever fine" in said
    quiet = call(*arguments, "--quiet")
    assert quiet.exit_code == 0 and quiet.output == ""


def test_the_path_is_appended_and_what_cannot_be_judged_is_kept(tmp_path: Path) -> None:
    """Bad with conv3; without its predecessor the command has no word on it."""
    script = tmp_path / "check.py"
    script.write_text(
        "import sys, onnx\n"
        "assert len(sys.argv) == 2\n"
        "names = {n.name for n in onnx.load(sys.argv[1]).graph.node}\n"
        "code = 0 if 'conv3' not in names else 1 if 'relu2' in names else 7\n"
        f"open({str(tmp_path / 'codes')!r}, 'a').write(str(code))\n"
        "sys.exit(code)\n"
    )
    check = shlex.join([sys.executable, str(script)])
    result = call(*files(tmp_path), "--check", check, "--json")
    assert result.exit_code == 0, result.output
    kept = {n["name"] for n in json.loads(result.stdout)["nodes"]}
    assert {"conv3", "relu2"} <= kept and len(kept) < 20
    assert set((tmp_path / "codes").read_text()) == {"0", "1", "7"}


def test_a_check_that_never_fails_leaves_nothing(tmp_path: Path) -> None:
    result = call(*files(tmp_path), "--check", "true {model}")
    assert result.exit_code == 1
    assert "The whole model passes the check (exit code 0)" in " ".join(result.output.split())
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--check", "no-such-command {model}"], 2, "'no-such-command' cannot be started"),
        (["--check", " "], 2, "an empty command"),
        (["--check", "sh -c 'exit 3'"], 2, "exit code 3 for the whole model"),
        (["--check", "sh -c 'kill -9 $$'"], 2, "signal 9 for the whole model"),
        (["--check", "a ' {model}"], 2, "No closing quotation"),
        (
            ["--check", "sh -c 'sleep 3600' {model}", "--evaluation-timeout", "0.5"],
            2,
            "no end after 0.5 s",
        ),
        (["--check", "false {model}", "--precision", "fp16"], 2, "leave --precision out"),
        (["--check", "false {model}", "--max-builds", "0"], 2, "raise --max-builds"),
        (["--runner", "emulated"], 2, "or give a --check of your own"),
        (["--precision", "fp8"], 2, "Invalid value for '--precision'"),
    ],
)
def test_mistakes_are_told_in_one_line(
    tmp_path: Path, arguments: list[str], code: int, words: str
) -> None:
    result = call(*files(tmp_path), *arguments)
    assert result.exit_code == code and words in result.output
    assert "Traceback" not in result.output and not (tmp_path / "r").exists()


def test_inputs_are_needed_and_checked(tmp_path: Path) -> None:
    model, *_ = files(tmp_path)
    missing = call(model, "--check", "false {model}")
    assert missing.exit_code == 2 and "Missing option '--input'" in missing.output
    np.savez(tmp_path / "y.npz", y=np.zeros(3, np.float32))
    wrong = call(model, "--input", str(tmp_path / "y.npz"), "--check", "false {model}")
    assert wrong.exit_code == 2 and "input 'x' is missing" in wrong.output


def test_another_s_folder_is_refused_before_anything_runs(tmp_path: Path) -> None:
    arguments = files(tmp_path)
    result = call(*arguments[:3], "--out", str(tmp_path), "--check", "touch {model}.seen")
    assert result.exit_code == 2 and "which no `bisect-trt reduce` wrote" in result.output


def test_what_does_not_build_needs_no_gpu(tmp_path: Path) -> None:
    model, arrays = branching()
    onnx.save(model, tmp_path / "m.onnx")
    np.savez(tmp_path / "x.npz", **arrays)
    arguments = [str(tmp_path / "m.onnx"), "--input", str(tmp_path / "x.npz")]
    arguments += ["--out", str(tmp_path / "r"), "--trt-module", "tensorrt_rtx", "--json"]
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["suspect"] == "failed" and record["nodes"] == [{"name": "choose", "op": "If"}]


def test_in_a_notebook(tmp_path: Path) -> None:
    model, arrays = residual(5, [3])
    found = bisect_trt.reduce(model, arrays, check="true {model}", out=tmp_path / "r")
    assert found.suspect is None
    command = checking(tmp_path)
    found = bisect_trt.reduce(model, arrays, check=command, out=tmp_path / "r", max_builds=5)
    assert (tmp_path / "r" / "reduce.json").exists()
    assert not found.complete and found.builds == 5
    with pytest.raises(TypeError, match="unexpected keyword argument 'requires'"):
        bisect_trt.reduce(model, arrays, requires="x")
    for call in (bisect_trt.reduce, bisect_trt.cure):
        with pytest.raises(BadInputError, match="precision='fp8': it is one of fp32, tf32"):
            call(model, arrays, precision="fp8")


def test_an_interruption_leaves_the_smallest_piece_so_far(tmp_path: Path) -> None:
    """Ctrl-C in the fourth call of the check: three subgraphs were judged by then."""
    script = tmp_path / "slow.py"
    script.write_text(
        "import pathlib, sys, time\n"
        f"calls = pathlib.Path({str(tmp_path / 'calls')!r})\n"
        "calls.write_text(calls.read_text() + 'x' if calls.exists() else 'x')\n"
        "time.sleep(3600 if len(calls.read_text()) == 4 else 0)\n"
        "sys.exit(b'relu3' in open(sys.argv[1], 'rb').read())\n"
    )
    command = [sys.executable, "-m", "bisect_trt", "reduce", *files(tmp_path)]
    command += ["--check", shlex.join([sys.executable, str(script), "{model}"])]
    root = str(Path(__file__).resolve().parents[2])
    with subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE, text=True) as child:
        calls = tmp_path / "calls"
        while not (calls.exists() and len(calls.read_text()) == 4):
            assert child.poll() is None
            time.sleep(0.05)
        child.send_signal(signal.SIGINT)
        assert child.wait(HANG_S) == 130
    record = json.loads((tmp_path / "r" / "reduce.json").read_text())
    assert record["interrupted"] and not record["complete"]
    left = [n["name"] for n in record["nodes"]]
    assert "relu3" in left and 1 < len(left) < 20
