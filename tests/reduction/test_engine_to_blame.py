"""A run in which the engine is to blame ends with the smallest subgraph that does it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from numpy.typing import NDArray

import bisect_trt
from bisect_trt.base.limits import Limits
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.model.graph import Graph
from bisect_trt.reduction.oracle import EngineTrials
from bisect_trt.runners.base import Repeated
from bisect_trt.runners.reference import outputs_of
from tests.planted import PlantedRunner, residual


class Planted(PlantedRunner):
    """The planted engine, with a process that can be replaced."""

    name = "tensorrt"

    def start_afresh(self) -> None:
        """Each object is a process already, and wrong in all of them."""


def trials(settings: Any, precision: Any, graph: Any, samples: Any, budget: Any) -> EngineTrials:
    return EngineTrials(PlantedRunner, precision, precision, budget)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setattr("bisect_trt.reduction.reduce.engine_trials", trials)

    def made(planted: Sequence[int], **options: Any) -> bisect_trt.Result:
        model, arrays = residual(6, planted)

        def opened(*_: Any) -> Planted:
            return Planted(Graph(model), [])

        monkeypatch.setattr("bisect_trt.steps.context.open_engine", opened)
        return bisect_trt.bisect(
            model, arrays, require="max_abs<=1e-4", robust=0, out=tmp_path / "run", **options
        )

    return made


def test_a_wrong_engine_ends_with_its_piece(run: Any) -> None:
    result = run([3])
    assert result.cause.value == "not-precision" and result.exit_code == 1
    found = json.loads((Path(result.folder) / "reproducer" / "reduce.json").read_text())
    assert [node["name"] for node in found["nodes"]] == ["conv3", "relu3", "add3"]
    told = [f.message for f in result.findings if f.kind == "reduced"]
    assert told and "3 of 24 nodes" in told[0] and "reproducer/" in told[0]
    assert "3 of 24 nodes" in (Path(result.folder) / "report.md").read_text()


def test_the_piece_of_an_earlier_run_goes(run: Any) -> None:
    folder = Path(run([3]).folder)
    assert (folder / "reproducer").is_dir()
    assert run([]).cause.value != "not-precision"
    assert not (folder / "reproducer").exists()


@pytest.mark.parametrize("builds", [0, 15])
def test_max_builds_bounds_it(run: Any, builds: int) -> None:
    result = run([3], max_builds=builds)
    assert result.cause.value == "not-precision"
    there = (Path(result.folder) / "reproducer" / "reduce.json").exists()
    assert there == (builds > 0)
    if there:
        found = json.loads((Path(result.folder) / "reproducer" / "reduce.json").read_text())
        assert found["builds"] <= builds and not found["complete"]


def test_the_time_bounds_it(run: Any) -> None:
    result = run([3], limits=Limits(reduction_time_s=1e-9))
    assert result.cause.value == "not-precision"
    assert not (Path(result.folder) / "reproducer").exists()


def test_no_time_for_the_whole_leaves_the_answer(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(settings: Any, precision: Any, graph: Any, samples: Any, budget: Any) -> EngineTrials:
        budget.spent = 10_000
        return trials(settings, precision, graph, samples, budget)

    monkeypatch.setattr("bisect_trt.reduction.reduce.engine_trials", slow)
    result = run([3])
    assert result.cause.value == "not-precision"
    assert not (Path(result.folder) / "reproducer").exists()


def test_an_engine_that_is_right_afterwards_is_said_to_be(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Right(PlantedRunner):
        """As written."""

        def outputs(
            self, plan: PrecisionPlan, samples: Sequence[Sample]
        ) -> Iterator[Mapping[str, NDArray[Any]]]:
            for sample in samples:
                yield Repeated(outputs_of(self._graph.proto, sample.arrays, "right"), 6)

    def right(settings: Any, precision: Any, graph: Any, samples: Any, budget: Any) -> EngineTrials:
        return EngineTrials(Right, precision, precision, budget)

    monkeypatch.setattr("bisect_trt.reduction.reduce.engine_trials", right)
    result = run([3])
    assert result.cause.value == "not-precision"
    assert not (Path(result.folder) / "reproducer").exists()
    told = [f.message for f in result.findings if f.kind == "reduced"]
    assert told and "is right: 66 runs in 11 fresh processes" in told[0]
