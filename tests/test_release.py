"""What is released: the wheel's contents, the GitHub Action's steps, the Dockerfile's sources."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest
import yaml

from bisect_trt.version import __version__
from fixtures.models import conv_clip, healthy
from tests.command import saved

ROOT = Path(__file__).resolve().parents[1]
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
STEPS: list[dict[str, Any]] = ACTION["runs"]["steps"]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "bisect_trt")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built of a copy: a build leaves folders beside its sources."""
    folder = tmp_path_factory.mktemp("build")
    source, dist = folder / "source", folder / "dist"
    source.mkdir()
    kept = ["--exclude=__pycache__", "-C", str(ROOT), *SOURCES]
    packed = subprocess.run(["tar", "cf", "-", *kept], capture_output=True, check=True)
    subprocess.run(["tar", "xf", "-", "-C", str(source)], input=packed.stdout, check=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    command = [*pip, "wheel", "--no-deps", "-w", str(dist), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    if "No matching distribution found for setuptools" in done.stderr:
        pytest.skip("the build fetches setuptools, and there is no network")
    assert done.returncode == 0, done.stderr
    (made,) = dist.glob("*.whl")
    return made


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    assert wheel.name == f"bisect_trt-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
        (about,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(packed.read(about).decode())
        entries = packed.read(about.replace("METADATA", "entry_points.txt")).decode()
    info = about.rpartition("/")[0]
    package = {name for name in names if not name.startswith(f"{info}/")}
    assert package == {
        str(path.relative_to(ROOT))
        for path in (ROOT / "bisect_trt").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert "bisect_trt/py.typed" in package and f"{info}/licenses/LICENSE" in names
    assert "bisect-trt = bisect_trt.__main__:entry" in entries
    assert metadata["Version"] == __version__ and metadata["License-Expression"] == "Apache-2.0"
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    assert metadata.get_payload() == (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_wheel_alone_makes_a_report(wheel: Path, tmp_path: Path) -> None:
    """The templates, the schema and the scripts of the page are in it."""
    place = tmp_path / "place"
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(place)
    words = [*saved(healthy(), tmp_path), "--robust", "0", "--runner", "emulated"]
    code = f"import sys; sys.path.insert(0, {str(place)!r}); import bisect_trt.__main__ as m; "
    code += f"assert m.__file__.startswith({str(place)!r}); m.entry()"
    command = [sys.executable, "-P", "-c", code, "run", *words, "--out", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "<html" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_pages_name_the_version_that_is_released() -> None:
    page = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
    named = re.findall(r"bisect-trt@v([\d.]+)|bisect_trt-([\d.]+)-py3", page)
    assert named and {one or other for one, other in named} == {__version__}
    assert f"bisect-trt@v{__version__}`" in (ROOT / "action.yml").read_text(encoding="utf-8")


def test_the_python_that_it_needs_is_the_first_that_it_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"]))
    assert project["requires-python"] == f">={named[0]}"
    assert named == sorted(named, key=lambda version: int(version[2:]))
    assert ACTION["inputs"]["python-version"]["default"] in named


def test_the_action_names_what_it_takes_and_gives() -> None:
    text = (ROOT / "action.yml").read_text(encoding="utf-8")
    assert set(re.findall(r"inputs\.([\w-]+)", text)) == ACTION["inputs"].keys()
    given = {output["value"] for output in ACTION["outputs"].values()}
    assert given == {f"${{{{ steps.run.outputs.{name} }}}}" for name in ACTION["outputs"]}
    assert any(step.get("id") == "run" for step in STEPS)
    assert ACTION["runs"]["using"] == "composite"
    for step in STEPS:
        assert ("run" in step) is ("shell" in step) is ("uses" not in step)
        # A value that is put into a script is a script of the caller's.
        assert "${{" not in step.get("run", "")
    for step in STEPS[-2:]:  # a failing run is the one whose report is wanted
        assert step["if"] == "always()"


def steps_run(folder: Path, **inputs: str) -> tuple[int, dict[str, str], str]:
    """Runs the action's shell steps but the installation; its exit code, outputs and summary."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    for name, what in (("bisect-trt", "-m bisect_trt"), ("python", "")):
        (tools / name).write_text(f'#!/bin/sh\nexec {sys.executable} {what} "$@"\n')
        (tools / name).chmod(0o755)
    defaults = {name: its.get("default", "") for name, its in ACTION["inputs"].items()}
    values = defaults | inputs
    outputs, summary = folder / "outputs", folder / "summary.md"
    outputs.write_text("")
    summary.write_text("")
    codes = []
    for step in STEPS:
        if "run" not in step or step["name"] == "Install":
            continue
        variables = {
            name: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda m: values[m[1]], value)
            for name, value in step["env"].items()
        }
        variables |= {"GITHUB_OUTPUT": str(outputs), "GITHUB_STEP_SUMMARY": str(summary)}
        variables |= {"RUNNER_TEMP": str(folder)}
        variables |= {"PATH": f"{tools}:/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
        # As GitHub runs `shell: bash`.
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
        done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
        codes.append(done.returncode)
    found = dict(line.split("=", 1) for line in outputs.read_text().splitlines())
    return max(codes), found, summary.read_text()


ARGS = "--robust 0 --runner emulated --repair none --weights nearest"


def test_the_action_runs_reports_and_gives_the_model(tmp_path: Path) -> None:
    model, _, inputs = saved(healthy(), tmp_path)
    (tmp_path / "$(touch harm) two.npz").write_bytes(Path(inputs).read_bytes())
    code, found, summary = steps_run(
        tmp_path,
        model=model,
        input=f"{inputs}\n$(touch harm) two.npz\n",
        requirement="max_abs<=1e-2\ncosine>=0.99",
        args=f"{ARGS} --keep-fp32 '^/mlp/Sigmoid$'",
    )
    assert code == 0 and not (tmp_path / "harm").exists()
    assert found == {"exit-code": "0", "model": "reports/bisect-trt/model.typed.onnx"}
    assert (tmp_path / found["model"]).exists()
    assert summary == (tmp_path / "reports/bisect-trt/report.md").read_text() != ""
    assert "cosine>=0.99" in summary


def test_the_action_fails_as_the_command_does(tmp_path: Path) -> None:
    model, _, inputs = saved(conv_clip(), tmp_path)
    never = {"model": model, "input": inputs, "requirement": "max_abs<=1e-30"}
    code, found, summary = steps_run(tmp_path, **never, args=ARGS)
    assert code == 1 and found["exit-code"] == "1" and summary
    code, found, summary = steps_run(tmp_path, **never, args=f"{ARGS} 'open", out="other")
    assert code == 1 and not found, "words that cannot be read end the step before the run"
    code, found, summary = steps_run(tmp_path, model="absent.onnx", input=inputs, out="other")
    assert (code, found, summary) == (2, {"exit-code": "2"}, "")  # nothing to show


def test_the_image_is_built_from_sources_that_are_there_on_a_base_that_is_asked_for() -> None:
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    words = [line.split() for line in lines if line and not line.startswith("#")]
    assert words[:2] == [["ARG", "BASE"], ["FROM", "${BASE}"]]
    copied = [name for of in words if of[0] == "COPY" for name in of[1:-1]]
    assert sorted(copied) == sorted(SOURCES) and all((ROOT / name).exists() for name in copied)
    sent = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert {f"!{name}" for name in copied} | {"*", "**/__pycache__"} == set(sent)
