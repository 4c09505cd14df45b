"""Reductions with an engine that is wrong where we say so: ONNX Runtime with a planted kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from bisect_trt.base.errors import BadInputError, RunnerFailedError
from bisect_trt.base.interrupt import BudgetSpentError, Observer
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.model.graph import Graph
from bisect_trt.reduction.oracle import (
    BAD_SHARE,
    PROCESSES,
    Budget,
    EngineTrials,
    Observation,
    Suspect,
    failure_words,
    what_rounding_explains,
)
from bisect_trt.reduction.reduce import Reduced, reduce_subgraph
from bisect_trt.runners.emulator import EmulatedRunner
from bisect_trt.runners.reference import outputs_of
from fixtures.fixture import Fixture
from fixtures.models import ALL
from tests.conftest import run_model
from tests.planted import PlantedRunner, not_reproducible, residual

Arrays = dict[str, NDArray[np.float32]]


def trials(
    runner: type[PlantedRunner], most: int | None = None, precision: Precision = Precision.FP32
) -> EngineTrials:
    return EngineTrials(runner, precision, precision, Budget(most))


def reduced(
    problem: tuple[onnx.ModelProto, Arrays], runner: type[PlantedRunner], most: int | None = None
) -> Reduced | Observation:
    model, arrays = problem
    return reduce_subgraph(Graph(model), Sample("s", arrays), trials(runner, most), Observer())


@pytest.mark.parametrize(("blocks", "planted"), [(5, 0), (5, 4), (10, 6), (15, 7)])
def test_a_wrong_kernel_ends_with_its_pattern(blocks: int, planted: int) -> None:
    before = PlantedRunner.opened
    found = reduced(residual(blocks, [planted]), PlantedRunner)
    assert isinstance(found, Reduced)
    assert found.suspect is Suspect.WRONG and found.complete and found.of == 4 * blocks
    ops = [(f"{op.lower()}{planted}", op) for op in ("Conv", "Relu", "Add")]
    assert list(found.nodes) == ops
    assert found.builds == PlantedRunner.opened - before
    # The whole and the subgraph in all processes, each subgraph in between once.
    assert found.builds <= 2 * PROCESSES + 25
    assert found.seen.wrong == found.seen.runs == 6 * PROCESSES and found.seen.worst > 1.0
    assert found.seen.differing == 0


def test_two_wrong_kernels_end_with_one() -> None:
    found = reduced(residual(12, [2, 9]), PlantedRunner)
    assert isinstance(found, Reduced) and len(found.nodes) == 3


def test_a_right_engine_is_not_reduced() -> None:
    seen = reduced(residual(6, []), PlantedRunner)
    assert isinstance(seen, Observation) and seen.suspect is None
    assert (seen.processes, seen.runs, seen.wrong) == (PROCESSES, 6 * PROCESSES, 0)
    assert seen.worst < 0.1


@pytest.mark.parametrize("seed", range(3))
def test_an_unsteady_kernel_ends_with_its_pattern(seed: int) -> None:
    found = reduced(residual(8, [5]), not_reproducible(0.6, seed))
    assert isinstance(found, Reduced) and found.suspect is Suspect.NOT_REPRODUCIBLE
    assert [op for _, op in found.nodes] == ["Conv", "Relu", "Add"]
    assert 0 < found.seen.differing < PROCESSES
    assert found.seen.wrong == 2 * found.seen.differing


@pytest.mark.slow
def test_so_many_processes_see_what_they_are_said_to_see() -> None:
    """Engines that are bad in a quarter of the processes: 95 % of them at least are caught."""
    assert (1.0 - BAD_SHARE) ** PROCESSES <= 0.05 < (1.0 - BAD_SHARE) ** (PROCESSES - 1)
    model, arrays = residual(1, [0])
    caught = sum(
        isinstance(reduced((model, arrays), not_reproducible(BAD_SHARE, seed)), Reduced)
        for seed in range(40)
    )
    assert caught >= 34  # of 40, with 38 expected: three deviations


@pytest.mark.parametrize("most", [11, 13, 16, 20])
def test_a_budget_of_builds_ends_with_a_bad_piece(most: int) -> None:
    found = reduced(residual(10, [6]), PlantedRunner, most)
    assert isinstance(found, Reduced)
    assert found.builds == most and not found.complete
    assert {"conv6", "relu6", "add6"} <= {n for n, _ in found.nodes}
    assert found.seen.wrong == found.seen.runs > 0


def test_no_build_at_all_is_the_user_s_mistake() -> None:
    with pytest.raises(BadInputError, match="not even the whole model can be tried on it"):
        reduced(residual(2, [0]), PlantedRunner, 0)


def test_without_builds_left_the_figures_are_those_of_the_search() -> None:
    found = reduced(residual(2, [1]), PlantedRunner, 23)
    assert isinstance(found, Reduced) and len(found.nodes) == 3 and found.complete
    assert found.suspect is Suspect.WRONG and found.seen.processes < PROCESSES


@pytest.mark.parametrize("make", ALL, ids=lambda f: f.__name__)
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.TF32])
def test_rounding_explains_what_rounding_does(
    make: Callable[[], Fixture], precision: Precision
) -> None:
    """ONNX Runtime's optimiser orders sums otherwise: within the allowance of FP32, and so is TF32
    within its own; a value off by a hundredth of the range is not, in FP32.
    """
    fixture = make()
    sample = Sample("s", fixture.inputs)
    expected = outputs_of(fixture.model, sample.arrays, "s")
    allowance = what_rounding_explains(fixture.model, sample, expected, precision)
    if precision is Precision.FP32:
        found = dict(zip(expected, run_model(fixture.model, sample.arrays), strict=True))
    else:
        runner = EmulatedRunner(fixture.model, Precision.TF32)
        found = dict(next(iter(runner.outputs(PrecisionPlan(precision), [sample]))))
    assert allowance.used(expected, found) <= 0.5
    if precision is Precision.FP32 and fixture.name != "unsavable":
        name, array = next(iter(expected.items()))
        off = array.copy()
        off.flat[0] += 1e-2 * float(np.abs(array).max())
        assert allowance.used(expected, {**expected, name: off}) > 1.0


def test_the_same_failure_is_known_by_its_words() -> None:
    """Numbers, lists and the model's names apart; another assertion is another failure."""
    names = {"if_3", "conv"}
    first = "Error Code 4 (layer if_3_OutputLayer: equal ranks, got [1,4,8]) in scope.cpp:145"
    assert failure_words(first, names) == failure_words(
        first.replace("if_3", "conv").replace("4,8", "2"), names
    )
    assert failure_words(first, names) != failure_words(
        first.replace("equal ranks", "equal types"), names
    )
    assert failure_words(first, names) != failure_words(first, {"conv"})


def test_nan_and_other_shapes_are_wrong() -> None:
    model, arrays = residual(1, [])
    sample = Sample("s", arrays)
    expected = outputs_of(model, arrays, "s")
    allowance = what_rounding_explains(model, sample, expected, Precision.FP32)
    (name, array), *_ = expected.items()
    for found in (np.full_like(array, np.nan), array[:, :2], array + np.float32(np.inf)):
        assert allowance.used(expected, {name: found}) == float("inf")
    assert allowance.used(expected, expected) == 0.0


def test_scratch_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    reduced(residual(3, [1]), PlantedRunner)
    assert list(tmp_path.iterdir()) == []


class Ended(Observer):
    """Ends the engine's time, or the user's patience, once the subgraph is found."""

    def __init__(self, how: BaseException) -> None:
        self._how = how
        self.ends = False

    def step(self, name: str) -> None:
        self.ends = name == "the subgraph"

    def check(self) -> None:
        if self.ends:
            raise self._how


@pytest.mark.parametrize("how", [KeyboardInterrupt(), BudgetSpentError()])
def test_a_piece_that_was_found_is_not_lost_while_it_is_with_tables(how: BaseException) -> None:
    observer = Ended(how)

    class Runner(PlantedRunner):
        def outputs(self, *asked: Any) -> Iterator[Mapping[str, NDArray[Any]]]:
            observer.check()
            yield from super().outputs(*asked)

    model, arrays = residual(3, [1])
    asked = trials(Runner)
    found = reduce_subgraph(Graph(model), Sample("s", arrays), asked, observer)
    assert isinstance(found, Reduced) and [op for _, op in found.nodes] == ["Conv", "Relu", "Add"]
    assert found.seen.suspect is Suspect.WRONG
    assert found.interrupted is isinstance(how, KeyboardInterrupt)


def test_a_piece_for_which_there_was_no_memory_is_not_taken_and_ends_nothing() -> None:
    class Runner(PlantedRunner):
        def outputs(self, *asked: Any) -> Iterator[Mapping[str, NDArray[Any]]]:
            if len(self._graph.layers) < 3:
                raise RunnerFailedError("the GPU's memory does not suffice", machine=True)
            yield from super().outputs(*asked)

    model, arrays = residual(3, [1])
    found = reduce_subgraph(Graph(model), Sample("s", arrays), trials(Runner), Observer())
    assert isinstance(found, Reduced) and [op for _, op in found.nodes] == ["Conv", "Relu", "Add"]
