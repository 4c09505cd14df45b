"""The reproducer's folder: whole, small, its script short and able to run alone."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from bisect_trt.base.errors import BadInputError
from bisect_trt.base.interrupt import Observer
from bisect_trt.base.plan import Precision
from bisect_trt.base.sample import Sample
from bisect_trt.model.graph import Graph
from bisect_trt.reduction.oracle import Allowance, Budget, EngineTrials
from bisect_trt.reduction.reduce import Reduced, reduce_subgraph
from bisect_trt.report.reduced import FOLDER, write_reproducer
from bisect_trt.runners.reference import outputs_of
from bisect_trt.runners.tensorrt.runner import BuildOnlyRunner
from tests.conftest import HANG_S
from tests.networks import branching
from tests.planted import PlantedRunner, residual


class PlantedTensorRT(PlantedRunner):
    """The same, under TensorRT's name: what is written is for its builder, which is there."""

    def __init__(self, graph: Graph, samples: Sequence[Sample]) -> None:
        super().__init__(graph, samples)
        self.versions = {"tensorrt_rtx": "1.6.1.120", "gpu": "none"}


def reduced(
    blocks: int, channels: int = 4, size: int = 6, precision: Precision = Precision.FP32
) -> Reduced:
    model, arrays = residual(blocks, [1], channels=channels, size=size)
    explained = Precision.TF32 if precision is Precision.FP32 else precision
    trials = EngineTrials(PlantedTensorRT, precision, explained, Budget(None))
    found = reduce_subgraph(Graph(model), Sample("s", arrays), trials, Observer())
    assert isinstance(found, Reduced)
    return found


def run(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(folder / "run.py")]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)


def has_gpu() -> bool:
    try:
        from cuda.bindings import runtime
    except ImportError:
        return False
    return int(runtime.cudaGetDeviceCount()[0]) == 0


def test_the_folder_is_complete(tmp_path: Path) -> None:
    found, folder = reduced(3), tmp_path / "a" / "b"
    write_reproducer(found, folder, "bisect-trt reduce m.onnx")
    names = {p.name for p in folder.iterdir()}
    assert names == {
        "model.onnx",
        "inputs.npz",
        "expected.npz",
        "run.py",
        "README.md",
        "reduce.json",
    }
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["b"]
    model = onnx.load(folder / "model.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert [n.op_type for n in model.graph.node] == ["Conv", "Relu", "Add"]
    with np.load(folder / "inputs.npz") as inputs, np.load(folder / "expected.npz") as expected:
        again = outputs_of(model, dict(inputs), "again")
        assert all(np.array_equal(again[n], a) for n, a in expected.items())
    record = json.loads((folder / "reduce.json").read_text())
    assert record["suspect"] == "wrong" and len(record["nodes"]) == 3 and record["complete"]
    page = (folder / "README.md").read_text()
    assert page.startswith(
        "# tensorrt_rtx 1.6.1.120 at FP32 gives wrong answers on a model of 3 nodes"
    )
    assert "emulated at TF32" in page and "several times" not in page
    assert "bisect-trt reduce m.onnx" in page and "66 of 66 runs wrong" in page


def test_the_script_stands_alone(tmp_path: Path) -> None:
    write_reproducer(reduced(3), tmp_path / "r", "x")
    text = (tmp_path / "r" / "run.py").read_text()
    assert len(text.splitlines()) < 100 and max(map(len, text.splitlines())) <= 110
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module)
    assert imported == {"os", "sys", "numpy", "tensorrt_rtx", "cuda.bindings"}
    done = run(tmp_path / "r")
    if has_gpu():  # nothing is wrong with this subgraph on a real engine
        assert done.returncode == 0 and done.stdout.startswith("right:")
    else:
        assert done.returncode == 3 and len(done.stdout.splitlines()) == 1
        assert done.stdout.startswith("cannot be run here: ") and done.stderr == ""


@pytest.mark.parametrize(
    ("recurrent", "words", "most"),
    [
        (False, "Must have inputs with equal ranks", None),
        (False, "Must have inputs with equal ranks", 6),
        (True, "graphScope.cpp", None),
    ],
)
def test_what_does_not_build_is_said_by_the_script(
    tmp_path: Path, recurrent: bool, words: str, most: int | None
) -> None:
    """TensorRT for RTX needs no GPU to refuse an If whose bodies differ in rank, or fall over one
    with LSTMs; with 6 builds the subgraph is found and cannot be built once more.
    """
    model, arrays = branching(recurrent=recurrent)
    trials = EngineTrials(BuildOnlyRunner, Precision.FP32, Precision.FP32, Budget(most))
    found = reduce_subgraph(Graph(model), Sample("s", arrays), trials, Observer())
    assert isinstance(found, Reduced) and found.nodes == (("choose", "If"),)
    assert words in found.seen.failure and found.builds <= 8
    write_reproducer(found, tmp_path / "r", "x")
    done = run(tmp_path / "r")
    assert done.returncode == 1 and "does not build it" in done.stdout
    assert "does not build or run a model of 1 node" in (tmp_path / "r" / "README.md").read_text()


def test_a_reproducer_takes_the_place_of_another_and_of_nothing_else(tmp_path: Path) -> None:
    found, folder = reduced(2), tmp_path / "r"
    FOLDER.check(folder)
    folder.mkdir()
    FOLDER.check(folder)  # empty
    write_reproducer(found, folder, "first")
    write_reproducer(found, folder, "second")
    assert "second" in (folder / "README.md").read_text()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(BadInputError, match=r"holds notes\.txt, which no"):
        FOLDER.check(folder)
    for name in ("model.onnx", "reduce.json"):
        other = tmp_path / name.replace(".", "_")
        other.mkdir()
        (other / name).write_text("{}")
        with pytest.raises(BadInputError, match=f"holds {name}, which no"):
            FOLDER.check(other)
    with pytest.raises(BadInputError, match="not a folder"):
        FOLDER.check(other / name)
    with pytest.raises(BadInputError, match="would be written over"):
        FOLDER.check(tmp_path / "new", [tmp_path / "new" / "model.onnx"])


def test_the_script_judges_as_the_tool_does(tmp_path: Path) -> None:
    found = reduced(3)
    broken = replace(found.seen, breaks=("y",))
    write_reproducer(replace(found, seen=broken), tmp_path / "r", "bisect-trt reduce m.onnx")
    text = (tmp_path / "r" / "run.py").read_text()
    wanted = [
        part
        for part in ast.parse(text).body
        if (isinstance(part, ast.FunctionDef) and part.name == "share")
        or (isinstance(part, ast.Assign) and "BREAKS" in ast.unparse(part.targets[0]))
    ]
    names: dict[str, Any] = {"np": np}
    exec(compile(ast.Module(wanted, []), "run.py", "exec"), names)
    empty, exact = np.zeros((0, 4), np.float32), np.array([7e4, 1.0], np.float32)
    for name, array, other in (
        ("y", empty, empty),
        ("y", exact, exact),
        ("y", exact, np.array([np.inf, 1.25], np.float32)),
        ("z", exact, np.array([np.inf, 1.25], np.float32)),
        ("z", exact, np.array([7e4, 1.25], np.float32)),
    ):
        allowance = Allowance({name: 0.5}, frozenset({"y"}))
        expected = allowance.used({name: array}, {name: other})
        assert names["share"](name, other, array, 0.5) == expected
