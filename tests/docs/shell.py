"""A page's commands, run as its reader would."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner

from bisect_trt.base.limits import Limits
from bisect_trt.cli import main
from tests.docs.pages import ROOT

AS_WRITTEN = {
    "docs/how-it-works.md",
    "docs/get-started.md",
    "docs/report.md",
    "docs/cases/2-encoder.md",
}
"""Pages about what a plan holds on. Elsewhere runs keep to the given inputs, which is cheaper."""

OTHERS = {
    "trtexec": {
        "--onnx",
        "--saveEngine",
        "--stronglyTyped",
        "--noTF32",
        "--fp16",
        "--best",
        "--minShapes",
        "--optShapes",
        "--maxShapes",
        "--tuneBuildRoutes",
        "--layerPrecisions",
        "--profilingVerbosity",
        "--exportLayerInfo",
        "--exportProfile",
        "--layerOutputTypes",
    },
    "tensorrt_rtx": {
        "--onnx",
        "--saveEngine",
        "--skipInference",
        "--loadEngine",
        "--runtimeCacheFile",
    },
    "tritonserver": {"--model-repository"},
    "modelopt": {"--nodes_to_exclude", "--op_types_to_exclude"},
    "polygraphy": {"--save-inputs"},
}
"""Options of other tools that pages speak of, from those tools' documentation."""


def ran(command: str, page: str, limits: Limits) -> str:
    """What ``command`` printed; it ends with the exit code that its comment says, 0 without one.

    A command of a pipe or of Python has the usual limits.
    """
    line, _, expected = command.partition("# exit code ")
    words = shlex.split(line, comments=True)
    if words[0] == "bisect-trt" and not set("<>|&;$`") & set("".join(_unquoted(line))):
        ended = CliRunner().invoke(main, [*words[1:], *cheaper(words, page)], obj=limits)
        code, output = ended.exit_code, ended.output
    else:
        tools = Path("tools")
        tools.mkdir(exist_ok=True)
        for name, what in (("bisect-trt", "-m bisect_trt"), ("python", "")):
            (tools / name).write_text(f'#!/bin/sh\nexec {sys.executable} {what} "$@"\n')
            (tools / name).chmod(0o755)
        path = f"{tools.resolve()}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            ["bash", "-ec", line], env=environment, capture_output=True, text=True, check=False
        )
        code, output = done.returncode, done.stdout + done.stderr
    assert code == int(expected or 0), f"{page}: {command}: exit code {code}\n{output}"
    return output


def _unquoted(line: str) -> list[str]:
    return [part for i, part in enumerate(re.split(r"'[^']*'", line)) if part or i]


def cheaper(words: list[str], page: str) -> list[str]:
    """Options that make a command judge as on any machine, and keep to the given inputs."""
    more = []
    if words[1] in ("run", "compare", "verify", "gate") and "--runner" not in words:
        more += ["--runner", "emulated"]
    # The workshop's run: its cache answers.
    known = {"model.onnx", "max_abs<=2e-3"} <= {*words} and "--out" not in words
    fits = known or page in AS_WRITTEN or not {"--robust", "--max-cost"}.isdisjoint(words)
    if words[1] in ("run", "gate") and not fits:
        more += ["--robust", "0", "--augmented", "none"]
    return more


def asks_for_what_is_there(command: str) -> None:
    """What cannot be run here names commands, options, extras and targets that exist."""
    words = shlex.split(command, comments=True)
    if words[0] == "bisect-trt":
        its = main.commands[words[1]]
        its.make_context(words[1], words[2:])
    elif words[0] in OTHERS:
        assert {word.partition("=")[0] for word in words[1:]} <= OTHERS[words[0]], command
    elif words[0] in ("docker", "pipx", "uvx"):
        behind = words[len(words) - words[::-1].index("bisect-trt") :]
        if behind[0] in main.commands:
            main.commands[behind[0]].make_context(behind[0], behind[1:])
        else:
            assert behind in (["."], ["--help"]), command
    elif words[:2] == ["pip", "install"]:
        extras = re.findall(r"\[(.+)\]", words[-1])
        text = (ROOT / "pyproject.toml").read_text()
        assert all(f"\n{extra} = [" in text for extra in extras), command
    else:
        assert words[0] == "make", command
        targets = (ROOT / "Makefile").read_text()
        assert all(f"\n{target}: " in targets for target in words[1:]), command
