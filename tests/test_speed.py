"""The table of the fastest engines: its rows, with emulated engines and a clock of our own."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest

import bisect_trt
from benchmarks.engines.speed import (
    EXACT,
    OURS,
    REDUCED,
    Bench,
    Case,
    Row,
    as_json,
    judge_of,
    lines,
    requirements,
    row,
    run,
)
from benchmarks.weights import other_layers
from bisect_trt.base.errors import RunnerFailedError
from bisect_trt.base.outcomes import Candidate, Verdict
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.metrics.arrays import Arrays
from bisect_trt.model.graph import Graph
from bisect_trt.model.typed import to_typed
from bisect_trt.runners.emulator import EmulatedRunner
from bisect_trt.runners.tensorrt.timing import RoundTimes
from bisect_trt.steps.fastest import ALL_BUT_MATRIX, HARMFUL_FIRST
from bisect_trt.steps.timing import Build, PlanTime, Timing
from fixtures.encoders import encoder_decomposed
from fixtures.models import residual
from tests.copies import FEWEST as FEWEST_COPIES

FIXTURE = residual()


def emulated(build: Build, samples: Sequence[Sample]) -> list[Arrays]:
    if "broken" in build.graph.proto.graph.name:
        raise RunnerFailedError("no tactic", Verdict.BUILD_FAILED)
    return list(EmulatedRunner(build.graph).outputs(build.plan, samples))


def clock(**ms: float) -> Callable[[Mapping[str, Build], Sample], Timing]:
    """A clock by which each build takes what ``ms`` says, others 2 ms."""

    def timed(builds: Mapping[str, Build], sample: Sample) -> Timing:
        of = {name: (ms.get(name.split()[0], 2.0),) * 3 for name in builds}
        return Timing({name: PlanTime(RoundTimes(t, t)) for name, t in of.items()}, {})

    return timed


def bench(tmp_path: Path, on_clock: Callable[..., Timing]) -> Bench:
    path = tmp_path / "model.onnx"
    onnx.save(FIXTURE.model, path)
    graph = Graph(FIXTURE.model)
    samples = [Sample("0", FIXTURE.inputs)]
    broken = onnx.ModelProto.FromString(FIXTURE.model.SerializeToString())
    broken.graph.name = "broken"
    return Bench(
        name="residual",
        case=Case(lambda _: path, lambda _: FIXTURE.inputs),
        path=path,
        samples=samples,
        judge=judge_of(path, samples, ("snr_db>=40",)),
        standard={
            REDUCED: Build(graph, PrecisionPlan(Precision.FP16)),
            EXACT: Build(graph, PrecisionPlan(Precision.FP32)),
            ALL_BUT_MATRIX: Build(graph, PrecisionPlan(Precision.FP16, other_layers(graph))),
            "AutoCast": Build(Graph(broken), PrecisionPlan(Precision.FP32)),
        },
        failures={},
        on_engine=emulated,
        on_clock=on_clock,
    )


def answer(require: Sequence[str], out: str) -> Any:
    """A run by emulation, with the candidates of one that an engine decides."""
    result = bisect_trt.bisect(
        FIXTURE.model,
        FIXTURE.inputs,
        runner="emulated",
        require=require,
        out=out,
        weights="nearest",
        limits=FEWEST_COPIES,
    )
    every = tuple(layer.name for layer in Graph(FIXTURE.model).layers)
    candidate = Candidate(HARMFUL_FIRST, every[:-1], 0.1, True, 1.0, chosen=False)
    engine = SimpleNamespace(candidates=(candidate,))
    return replace(result, engine=engine)


def made(tmp_path: Path, **ms: float) -> Row:
    of = bench(tmp_path, clock(**ms))
    found = of.outputs(of.standard)
    reduced = found[REDUCED]
    assert not isinstance(reduced, str)
    return row(of, requirements(of, reduced)["better"], found, answer)


def test_a_row_has_each_engine_with_its_time_and_whether_it_passes(tmp_path: Path) -> None:
    found = made(tmp_path, FP16=1.0, FP32=5.0, ours=1.4)
    engines = {engine.name: engine for engine in found.engines}
    assert list(engines) == [REDUCED, EXACT, ALL_BUT_MATRIX, "AutoCast", OURS, HARMFUL_FIRST]
    ours, reduced = engines[OURS], engines[REDUCED]
    assert ours.passes and ours.layers and not reduced.passes and engines[EXACT].passes
    assert ours.saving_kept == pytest.approx(0.9) and reduced.saving_kept == 1.0
    limit = float(found.requirement.removeprefix("snr_db>="))
    assert limit == pytest.approx(reduced.value + 6.0, abs=0.01) and ours.value >= limit
    assert found.is_fastest
    broken = engines["AutoCast"]
    assert not broken.passes and "no tactic" in broken.failure
    data = json.loads(as_json(found))
    assert data["engines"][3]["value"] is None and data["engines"][4]["name"] == OURS
    assert {len(line) for line in lines(found)} == {12}


def test_a_right_engine_that_is_faster_is_said(tmp_path: Path) -> None:
    found = made(tmp_path, FP16=1.0, FP32=5.0, ours=1.4, most=1.3)
    assert found.is_fastest is False
    (line,) = (line for line in lines(found) if line[2].startswith("**ours**"))
    assert "**no**" in line
    wrong = made(tmp_path, FP16=1.0, FP32=5.0, ours=1.4)
    assert wrong.is_fastest  # FP16 is faster, but misses


def test_a_row_that_is_there_is_not_run_again(tmp_path: Path) -> None:
    of = bench(tmp_path, clock(FP16=1.0, FP32=5.0))
    asked: list[str] = []

    def counting(require: Sequence[str], out: str) -> Any:
        asked.extend(require)
        return answer(require, out)

    (tmp_path / "residual.default.json").write_text("{}")
    run(of, tmp_path, counting)
    (text,) = asked
    assert text.startswith("snr_db>=") and text != "snr_db>=40"
    assert json.loads((tmp_path / "residual.better.json").read_text())["requirement"] == text
    run(of, tmp_path, counting)
    assert len(asked) == 1


def test_a_typed_model_keeps_its_types() -> None:
    """So AutoCast's model is built as AutoCast wrote it."""
    fixture = encoder_decomposed()
    graph = Graph(fixture.model)
    pinned = frozenset(layer.name for layer in graph.layers[::3])
    typed = to_typed(graph, PrecisionPlan(Precision.FP16, pinned))
    again = to_typed(Graph(typed), PrecisionPlan(Precision.FP32))
    first, second = (_types(model) for model in (typed, again))
    assert first == second and len(set(first.values())) > 1


def _types(model: onnx.ModelProto) -> dict[str, int]:
    """The types of what nodes give, of constants and of outputs."""
    whole = onnx.shape_inference.infer_shapes(model).graph
    known = {v.name: v.type.tensor_type.elem_type for v in [*whole.value_info, *whole.output]}
    given = {name: known[name] for node in whole.node for name in node.output}
    return given | {constant.name: constant.data_type for constant in whole.initializer}
