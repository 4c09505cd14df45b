"""Cures of engines that are wrong where we say so: ONNX Runtime with a planted kernel."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pandas as pd
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray

import bisect_trt
from bisect_trt.base.errors import BadInputError, RunnerUnavailableError
from bisect_trt.base.interrupt import Observer
from bisect_trt.base.plan import Precision
from bisect_trt.base.sample import Sample
from bisect_trt.cli import main
from bisect_trt.model.graph import Graph
from bisect_trt.reduction.cures import AS_IT_IS, Cures, try_cures
from bisect_trt.reduction.oracle import PROCESSES, Budget, OpenRunner
from bisect_trt.reduction.reduce import tensorrt_trials
from bisect_trt.report.reduced import CURE_FOLDER, headline_of_cures, write_cures
from bisect_trt.runners.reference import outputs_of
from bisect_trt.runners.tensorrt.records import AS_USUAL, EngineOptions
from tests.planted import PlantedRunner, not_reproducible, residual

Problem = tuple[onnx.ModelProto, dict[str, NDArray[np.float32]]]


OpenWith = Callable[[EngineOptions], OpenRunner]


def always(runner: OpenRunner) -> OpenWith:
    """The same engine, however it is built."""
    return lambda options: runner


def cured(
    problem: Problem, opens: OpenWith, suspects: tuple[str, ...] = (), most: int | None = None
) -> Cures:
    model, arrays = problem
    budget, samples = Budget(most), [Sample("s", arrays)]
    return try_cures(
        Graph(model),
        samples,
        suspects,
        lambda options: tensorrt_trials(opens(options), Precision.FP32, budget, 2),
        Observer(),
    )


@pytest.mark.parametrize("suspects", [(), ("conv3", "relu3", "add3"), ("tanh1",)])
def test_a_wrong_fusion_is_cured_by_one_mark(suspects: tuple[str, ...]) -> None:
    """Also where the suspects are the wrong ones."""
    found = cured(residual(6, [3]), always(PlantedRunner), suspects)
    assert found.needed and found.complete
    best = found.smallest
    assert best is not None and best.works and best.marks in {("c3",), ("relu3_out",)}
    assert best.seen.processes == PROCESSES and best.seen.wrong == 0
    assert found.tried[0].name == AS_IT_IS
    assert "1 more output" in headline_of_cures(found)


@pytest.mark.parametrize("suspects", [(), ("conv1", "relu1", "add1")])
def test_two_wrong_fusions_take_two_marks(suspects: tuple[str, ...]) -> None:
    """Also where the one is known: the other looks like it."""
    found = cured(residual(6, [1, 4]), always(PlantedRunner), suspects)
    best = found.smallest
    assert best is not None and len(best.marks) == 2
    assert {name[-1] if name[0] == "c" else name[4] for name in best.marks} == {"1", "4"}


def test_an_unsteady_fusion_is_cured_too() -> None:
    found = cured(residual(5, [2]), always(not_reproducible(0.7, 1)))
    assert found.needed and found.tried[0].seen.differing > 0
    assert found.smallest is not None and found.smallest.marks in {("c2",), ("relu2_out",)}


def test_a_build_option_that_helps_is_found() -> None:
    class Right(PlantedRunner):
        """Nothing is fused at level 0."""

        def __init__(self, graph: Graph, samples: object) -> None:
            marked = onnx.ModelProto()
            marked.CopyFrom(graph.proto)
            for node in marked.graph.node:
                if node.op_type == "Conv":
                    marked.graph.output.append(onnx.ValueInfoProto(name=node.output[0]))
            super().__init__(Graph(marked), [])

    def opens(options: EngineOptions) -> OpenRunner:
        return Right if options.optimisation_level == 0 else PlantedRunner

    found = cured(residual(4, [1]), opens)
    works = {c.name: c.works for c in found.tried}
    assert works["optimisation level 0"] and not works["optimisation level 5"]
    assert not works[AS_IT_IS] and not works["no CUDA graphs"]


def test_what_is_right_as_it_is_needs_no_cure() -> None:
    found = cured(residual(4, []), always(PlantedRunner))
    assert not found.needed and len(found.tried) == 1 and found.smallest is None
    assert "right and reproducible as it is" in headline_of_cures(found)


def test_the_builds_are_bounded() -> None:
    before = PlantedRunner.opened
    found = cured(residual(6, [3]), always(PlantedRunner), most=7)
    assert not found.complete and PlantedRunner.opened - before == 7
    assert "--max-builds ended the search" in headline_of_cures(found)


def test_builds_that_end_among_the_marks_are_told() -> None:
    before = PlantedRunner.opened
    whole = cured(residual(6, [3]), always(PlantedRunner))
    needed = PlantedRunner.opened - before
    assert whole.complete
    for fewer in (2, 3 * PROCESSES):
        found = cured(residual(6, [3]), always(PlantedRunner), most=needed - fewer)
        assert not found.complete and PlantedRunner.opened - before <= 3 * needed
        assert found.smallest is None or found.smallest.works


def test_an_interruption_leaves_what_was_tried(tmp_path: Path) -> None:
    class Stopped(PlantedRunner):
        left = 2 * PROCESSES

        def __init__(self, graph: Graph, samples: object) -> None:
            type(self).left -= 1
            if type(self).left < 0:
                raise KeyboardInterrupt
            super().__init__(graph, [])

    found = cured(residual(6, [3]), always(Stopped))
    assert found.interrupted and not found.complete and 0 < len(found.tried) < 20
    assert "an interruption ended the search" in headline_of_cures(found)
    write_cures(found, tmp_path / "cured")
    assert len(pd.read_csv(tmp_path / "cured" / "cures.csv")) == len(found.tried)


def test_the_cured_model_gives_what_the_original_gave(tmp_path: Path) -> None:
    model, arrays = residual(6, [3])
    found = cured((model, arrays), always(PlantedRunner))
    write_cures(found, tmp_path / "cured")
    shipped = onnx.load(tmp_path / "cured" / "model.cured.onnx")
    onnx.checker.check_model(shipped, full_check=True)
    assert [o.name for o in shipped.graph.output][:1] == [o.name for o in model.graph.output]
    assert len(shipped.graph.output) == 2
    before, after = outputs_of(model, arrays, "a"), outputs_of(shipped, arrays, "b")
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array)
    table = pd.read_csv(tmp_path / "cured" / "cures.csv")
    assert not table["works"].iloc[0] and table["works"].iloc[-1]
    record = json.loads((tmp_path / "cured" / "cures.json").read_text())
    assert record["smallest"] == "1 more output" and len(record["tried"]) == len(table)
    write_cures(found, tmp_path / "cured")  # its own folder may be written again
    CURE_FOLDER.check(tmp_path / "cured")
    (tmp_path / "cured" / "mine.txt").write_text("x")
    with pytest.raises(BadInputError, match=r"mine\.txt"):
        CURE_FOLDER.check(tmp_path / "cured")


def test_the_command_says_what_it_needs(tmp_path: Path) -> None:
    model, arrays = residual(2, [])
    onnx.save(model, tmp_path / "m.onnx")
    np.savez(tmp_path / "x.npz", **arrays)  # type: ignore[arg-type]
    given = [str(tmp_path / "m.onnx"), "--input", str(tmp_path / "x.npz")]
    out = ["--out", str(tmp_path / "out")]
    emulated = CliRunner().invoke(main, ["cure", *given, *out, "--runner", "emulated"])
    assert emulated.exit_code == 2 and "cures are those of TensorRT" in emulated.output
    subgraph = CliRunner().invoke(
        main, ["cure", *given, *out, "--subgraph", str(tmp_path / "none")]
    )
    assert subgraph.exit_code == 2 and "no reproducer" in subgraph.output
    assert not (tmp_path / "out").exists()
    with pytest.raises(RunnerUnavailableError):
        bisect_trt.cure(model, arrays, out=tmp_path / "out")
    assert EngineOptions() == AS_USUAL
