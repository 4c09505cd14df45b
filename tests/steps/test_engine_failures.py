"""Layers that an engine does not take, and engines that could not be asked."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

import bisect_trt
from bisect_trt.base.errors import (
    BadInputError,
    MachineError,
    RunnerFailedError,
    RunnerUnavailableError,
)
from bisect_trt.base.outcomes import Verdict
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.runners.base import UNSUPPORTED, Repeated
from fixtures.encoders import encoder_decomposed
from fixtures.fixture import Fixture
from fixtures.models import healthy
from tests.engines import Engine, EngineRun, Judged


class Picky(Engine):
    """An engine whose parser refuses ``layers`` where they are reduced, one at a time as it does;
    ``says`` whether it names them, ``hints`` whether its words do.
    """

    def __init__(
        self, fixture: Fixture, layers: Sequence[str], *, says: bool = True, hints: bool = True
    ) -> None:
        super().__init__(fixture)
        self._layers, self._says, self._hints = layers, says, hints
        self._facts: dict[PrecisionPlan, Mapping[str, Any]] = {}

    def outputs(
        self, plan: PrecisionPlan, samples: Sequence[Sample]
    ) -> Iterator[Mapping[str, NDArray[Any]]]:
        refused = [n for n in self._layers if plan.base.is_storage and n not in plan.pinned]
        if refused:
            self.built.append(plan)
            self._facts[plan] = {UNSUPPORTED: refused[:1]} if self._says else {}
            told = refused[0] if self._says or self._hints else "the network"
            raise RunnerFailedError(f"cannot parse {told}", Verdict.BUILD_FAILED)
        return super().outputs(plan, samples)

    def takes(self, sample: Sample) -> bool:
        return True

    def facts(self, plan: PrecisionPlan) -> Mapping[str, Any]:
        return self._facts.get(plan, {})


@pytest.mark.parametrize("robust", [0, 0.95])
def test_what_is_good_enough_but_for_them_pins_nothing_else(
    judged: Judged, tmp_path: Path, robust: float
) -> None:
    """Seven and thirteen layers were pinned for one, and the numbers had been blamed."""
    fixture = healthy()
    unsupported = [node.name for node in fixture.model.graph.node][1:3]
    result, _ = judged(fixture, Picky(fixture, unsupported), robust=robust)
    assert result.passed and sorted(result.pinned) == sorted(unsupported)
    assert result.cause.value == "none" and "with 2 of " in result._repr_markdown_()
    told = [f.message for f in result.findings if f.kind == "held"]
    assert len(told) == 2 and all("does not take" in message for message in told)
    assert f"cannot parse {unsupported[0]}" in told[0]
    assert "--keep-fp32" not in " ".join(told)
    said = json.loads((tmp_path / "run" / "run.json").read_text())
    assert sorted(said["pinned"]) == sorted(unsupported)


def test_what_is_not_is_searched_beside_them(judged: Judged, on_engine: EngineRun) -> None:
    fixture, (alone, _) = encoder_decomposed(), on_engine
    harmless = next(
        node.name
        for node in fixture.model.graph.node
        if node.op_type == "MatMul" and node.name not in alone.pinned
    )
    result, _ = judged(fixture, Picky(fixture, [harmless]))
    assert result.passed and set(result.pinned) == {*alone.pinned, harmless}
    assert result.cause is alone.cause


def test_an_engine_that_names_nothing_is_not_blamed_on_numbers(judged: Judged) -> None:
    fixture = healthy()
    every = [node.name for node in fixture.model.graph.node]
    result, engine = judged(fixture, Picky(fixture, every, says=False))
    assert result.cause.value == "unknown" and "could not be built or run" in result.sentence
    assert set(result.pinned) == set(result.layers["layer"])
    assert len(engine.built) < 20


@pytest.mark.parametrize("says", [True, False])
def test_what_an_engine_does_not_name_is_found_by_engines(
    judged: Judged, on_engine: EngineRun, says: bool
) -> None:
    """All 21 layers were pinned for want of a name."""
    fixture, (named, _) = encoder_decomposed(), on_engine
    nodes = fixture.model.graph.node
    harmless = [n.name for n in nodes if n.op_type == "MatMul" and n.name not in named.pinned][:2]
    engine = Picky(fixture, harmless, says=says, hints=False)
    result, _ = judged(fixture, engine)
    assert result.passed and set(result.pinned) == {*named.pinned, *harmless}
    assert result.cause is named.cause
    told = " ".join(f.message for f in result.findings if f.kind == "held")
    assert all(name in told for name in harmless) and ("by trial" in told) is not says


def test_few_builds_hold_all_layers_of_the_operator(judged: Judged) -> None:
    fixture = encoder_decomposed()
    product = next(n.name for n in fixture.model.graph.node if n.op_type == "MatMul")
    engine = Picky(fixture, [product], says=False, hints=False)
    result, _ = judged(fixture, engine, max_builds=5)
    held = set(result.pins.loc[result.pins["held"], "layer"])
    assert result.passed and product in held
    assert held == {n.name for n in fixture.model.graph.node if n.op_type == "MatMul"}


def test_what_is_asked_to_be_lowered_and_is_not_taken_is_no_matter_of_numbers(
    judged: Judged,
) -> None:
    fixture = healthy()
    name = fixture.model.graph.node[1].name
    with pytest.raises(
        BadInputError, match=rf"keep_reduced: the engine does not take '{name}' in FP16"
    ):
        judged(fixture, Picky(fixture, [name]), keep_reduced=[name])


class OtherShape(Engine):
    """In two of six runs the output that nobody looks at is one shorter."""

    def start_afresh(self) -> None:
        """Each process does so."""

    def outputs(
        self, plan: PrecisionPlan, samples: Sequence[Sample]
    ) -> Iterator[Mapping[str, NDArray[Any]]]:
        for outputs in super().outputs(plan, samples):
            shorter = {**outputs, "beside": outputs["beside"][:-1]}
            yield Repeated(outputs, 6, [(shorter, 2)] if plan.base.is_storage else [])


def test_a_shape_that_nobody_looks_at_makes_no_engine_unsteady(judged: Judged) -> None:
    fixture = healthy()
    model = onnx.ModelProto()
    model.CopyFrom(fixture.model)
    given = model.graph.input[0].name
    model.graph.node.append(helper.make_node("Relu", [given], ["beside"], name="beside"))
    shape = [None, *fixture.inputs[given].shape[1:]]
    model.graph.output.append(helper.make_tensor_value_info("beside", TensorProto.FLOAT, shape))
    output = fixture.model.graph.output[0].name
    other = replace(fixture, model=model, require=f"{output}:max_abs<=1e-2")
    result, _ = judged(other, OtherShape(other))
    assert result.cause.value == "none" and result.passed


def test_memory_that_gave_out_is_no_verdict_and_is_not_remembered(judged: Judged) -> None:
    """It was the plan's: cached as a crash, so that the same command said so again."""

    class Scarce(Engine):
        scarce = True

        def outputs(
            self, plan: PrecisionPlan, samples: Sequence[Sample]
        ) -> Iterator[Mapping[str, NDArray[Any]]]:
            if self.scarce and plan.pinned:
                raise RunnerFailedError("the GPU's memory does not suffice", machine=True)
            return super().outputs(plan, samples)

    fixture = encoder_decomposed()
    engine = Scarce(fixture)
    with pytest.raises(MachineError, match=r"does not suffice; nothing is concluded") as caught:
        judged(fixture, engine)
    assert caught.value.exit_code == 4
    engine.scarce = False
    result, _ = judged(fixture, engine)
    assert result.passed and result.exit_code == 0


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RunnerFailedError("the GPU's memory does not suffice", machine=True), MachineError),
        (RunnerFailedError("the process crashed"), RunnerUnavailableError),
    ],
)
def test_a_full_gpu_is_no_gpu_that_is_missing(
    error: Exception,
    expected: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def opened(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("bisect_trt.steps.open_runners.TensorRTRunner", opened)
    fixture = encoder_decomposed()
    with pytest.raises(expected, match=str(error)):
        bisect_trt.bisect(
            fixture.model,
            fixture.inputs,
            runner="tensorrt",
            out=tmp_path,
            require="max_abs<=1",
        )
