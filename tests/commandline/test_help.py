"""What ``--help`` says, and that it waits for no library."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

import pytest
from click.testing import CliRunner

from bisect_trt.cli import main
from bisect_trt.usage import GROUPS, ToolCommand

HEAVY = ("numpy", "onnx", "onnxruntime", "pandas", "rich", "jinja2")
RARE = {
    "--certify",
    "--emulate-on",
    "--evaluation-timeout",
    "--infinite",
    "--max-builds",
    "--ray",
    "--stacked",
    "--trt-module",
    "--typing",
}


def test_help_imports_no_library_of_models() -> None:
    script = (
        "import sys\n"
        "from contextlib import suppress\n"
        "from bisect_trt.cli import main\n"
        "for name in ('', *main.commands):\n"
        "    with suppress(SystemExit):\n"
        "        main([name, '--help'] if name else ['--help'])\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "[]\n", done.stderr
    assert done.stdout.count("Usage: ") == len(main.commands) + 1


def shown(*words: str) -> str:
    """What a command prints on a terminal of 80 columns."""
    ended = CliRunner(env={"COLUMNS": "80"}).invoke(main, words)
    assert ended.exit_code == 0 and all(len(line) <= 80 for line in ended.output.splitlines())
    return ended.output


def flags(text: str) -> set[str]:
    return set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, flags=re.M))


def test_summaries_are_whole() -> None:
    text = shown("--help")
    for name, command in main.commands.items():
        assert command.short_help and re.search(rf"^  {name} +{command.short_help}$", text, re.M)


@pytest.mark.parametrize("name", main.commands)
def test_options_stand_under_headings_and_rare_ones_apart(name: str) -> None:
    usual, whole = shown(name, "--help"), shown(name, "--help-all")
    every = {o for param in main.commands[name].params for o in param.opts if o.startswith("--")}
    assert flags(whole) == every | {"--help"}
    assert flags(usual) == flags(whole) - RARE
    headings = re.findall(r"^(\w+):$", whole, flags=re.M)
    assert headings == [h for h in (*GROUPS, "Help", "Examples") if h in headings]
    of_help = whole.partition("\nHelp:\n")[2].partition("\nExamples:")[0]
    assert flags(of_help) == {"--help", "--help-all"}


def test_run_has_every_heading_and_rare_option() -> None:
    whole = shown("run", "--help-all")
    assert all(f"\n{heading}:\n" in whole for heading in GROUPS) and flags(whole) >= RARE


@pytest.mark.parametrize("name", main.commands)
def test_examples_are_commands(name: str) -> None:
    command = main.commands[name]
    assert isinstance(command, ToolCommand)
    lines = shown(name, "--help").partition("\nExamples:\n")[2].splitlines()
    assert len(lines) in (2, 3)
    for line in lines:
        program, its, *words = shlex.split(line)
        assert (program, its) == ("bisect-trt", name)
        command.make_context(name, words)  # raises where an option or an argument is wrong


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("model.onnx", "No such command 'model.onnx': did you mean `run model.onnx`?"),
        ("'my model.onnx'", "did you mean `run 'my model.onnx'`?"),
        ("inspct m.onnx", "No such command 'inspct'; did you mean inspect?"),
        ("--input x.npz m.onnx", "--input: write the command first, such as `bisect-trt run"),
        ("run m.onnx --input x.npz --fp16", "--fp16: write --precision fp16"),
        ("verify m.onnx --atol 1e-3", "--atol: write --requirement 'atol=1e-3,rtol=1e-3'"),
        ("run m.onnx --inputs x.npz", "--inputs: write --input FILE, once for each"),
        ("repair m.onnx --input x.npz --output o", "--output: write --out FOLDER"),
        ("cure m.onnx --input x.npz --precision FP16", "did you mean fp16?"),
    ],
)
def test_a_slip_gets_a_hint(line: str, words: str) -> None:
    ended = CliRunner(env={"COLUMNS": "80"}).invoke(main, shlex.split(line))
    assert ended.exit_code == 2 and words in ended.stderr


def test_a_hint_names_only_options_that_the_command_has() -> None:
    ended = CliRunner().invoke(main, ["doctor", "--fp16"])
    assert ended.exit_code == 2 and "--precision" not in ended.stderr


def test_the_shell_completes_commands_and_options() -> None:
    for typed, expected in (("bisect-trt ver", "verify"), ("bisect-trt run --h", "--holdout")):
        its = {"_BISECT_TRT_COMPLETE": "bash_complete", "COMP_WORDS": typed}
        its["COMP_CWORD"] = str(len(typed.split()) - 1)
        done = subprocess.run(
            [sys.executable, "-m", "bisect_trt"],
            env={**os.environ, **its},
            capture_output=True,
            text=True,
        )
        assert f"plain,{expected}" in done.stdout.splitlines(), done.stderr
