"""Layers that miss the requirement by themselves come first, on whichever input they do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import bisect_trt
from bisect_trt.base.outcomes import Cause
from bisect_trt.steps.sensitivity import begin_at_layers
from fixtures.build import GraphBuilder
from fixtures.fixture import waves
from tests.copies import EIGHT, FEW, FEWEST


def scaled(places: int, *factors: float) -> list[dict[str, np.ndarray]]:
    return [{"x": waves(1, 1, places) * np.float32(factor)} for factor in factors]


def squared(limit: float) -> onnx.ModelProto:
    """A square that overflows beyond ``limit``, and what undoes it."""
    build = GraphBuilder(0)
    root = 255.0 / limit
    large = build.op("Mul", "x", build.weight(root))
    square = build.op("Mul", large, large)
    back = build.op("Sqrt", square)
    return build.model({"x": [1, 32]}, {back: [1, 32]})


def test_an_overflow_that_few_given_inputs_show_is_one(tmp_path: Path) -> None:
    """The table looks at the first and the last of five; the third is beyond the range."""
    given = scaled(32, 0.5, 0.4, 2.0, 0.6, 0.3)
    limit = 1.2 * float(np.abs(given[0]["x"]).max())
    result = bisect_trt.bisect(
        squared(limit), given, runner="emulated", out=tmp_path / "run", limits=FEWEST
    )
    assert result.cause is Cause.OVERFLOW and "/Mul_1" in result.sentence


def test_an_overflow_that_only_draws_show_is_one(tmp_path: Path) -> None:
    given = scaled(32, 0.97, 0.98, 0.99, 1.0)
    limit = 1.02 * float(np.abs(given[3]["x"]).max())
    result = bisect_trt.bisect(
        squared(limit), given, runner="emulated", out=tmp_path / "run", limits=FEW
    )
    assert result.cause is Cause.OVERFLOW and "/Mul_1" in result.sentence
    assert "The given inputs pass, but" in result.sentence and "/Mul_1" in result.pinned


@pytest.mark.parametrize(("share", "passes"), [(0.7, False), (1.05, True)])
def test_a_mask_that_overflows_is_no_cause_because_draws_do_worse(
    tmp_path: Path, share: float, passes: bool
) -> None:
    """-1e9 becomes -inf in FP16, and a Softmax makes zero of either. The score of the given input
    with it pinned was held against that of copies, which miss by more: "overflow".
    """
    build = GraphBuilder(0)
    query, key = (build.op("MatMul", "x", build.normal(16, 16, scale=2.0)) for _ in range(2))
    scores = build.op("MatMul", query, build.op("Transpose", key, perm=[1, 0]))
    open_ = build.op("Greater", "mask", build.weight(0.5))
    bias = build.op("Where", open_, build.weight(0.0), build.weight(-1e9))
    weights = build.op("Softmax", build.op("Add", scores, bias), axis=-1)
    seen = build.op("MatMul", weights, build.op("MatMul", "x", build.normal(16, 4, scale=30.0)))
    model = build.model({"x": [12, 16], "mask": [1, 12]}, {seen: [12, 4]})
    mask = (np.arange(12) < 9).astype(np.float32)[None]
    given = {"x": np.cumsum(0.3 * waves(0, 12, 16), axis=0).astype(np.float32), "mask": mask}
    loose = {"require": "max_abs<=1", "out": tmp_path / "loose", "robust": 0}
    error = bisect_trt.bisect(model, given, runner="emulated", **loose, limits=FEW).base_score
    asked = {"require": f"max_abs<={error * share:g}", "runner": "emulated"}
    result = bisect_trt.bisect(model, given, out=tmp_path / "run", **asked, limits=FEW)
    assert (result.base_score <= 1.0) is passes
    assert result.cause is not Cause.OVERFLOW, result.sentence


BRANCHES = 40


def normalised(build: GraphBuilder, name: str) -> str:
    """``name`` over its root mean square; where its squares overflow, zero, which is finite."""
    square = build.op("Mul", name, name)
    root = build.op("Sqrt", build.op("ReduceMean", square, keepdims=1))
    return build.op("Div", name, root)


def model() -> onnx.ModelProto:
    """Two normalisations, the second scaled down, beside branches that round a little."""
    build, random = GraphBuilder(0), np.random.default_rng(1)
    outputs = dict[str, list[int]]()
    for name, scale in (("a", 1.0), ("b", 0.1)):
        build.scope = f"/{name}"
        outputs[build.op("Mul", normalised(build, name), build.weight(scale))] = [1, 16]
    build.scope = "/n"
    for _ in range(BRANCHES):
        outputs[build.op("MatMul", "z", build.weight(random.normal(size=(16, 8))))] = [1, 8]
    return build.model({"a": [1, 16], "b": [1, 16], "z": [1, 16]}, outputs)


def inputs(large: dict[int, str]) -> list[dict[str, np.ndarray]]:
    """Six inputs; of those at some places the named tensor's squares leave the range."""
    random, made = np.random.default_rng(2), []
    for place in range(6):
        arrays = {n: random.uniform(1.0, 2.0, (1, 16)).astype(np.float32) for n in "abz"}
        if place in large:
            arrays[large[place]] *= np.float32(400.0)
        made.append(arrays)
    return made


def test_what_fresh_draws_refuse_by_far_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A set that passed the search set grew to what the score of a draw that overflows would ask
    for, had the error been spread.
    """
    given = inputs({0: "a"})
    limit = np.float32(np.sqrt(65504.0))
    given[3]["b"] = np.full((1, 16), limit * np.float32(0.9996), np.float32)
    result = bisect_trt.bisect(
        model(),
        given,
        require="max_abs<=2e-2",
        augmented="none",
        runner="emulated",
        out=tmp_path / "run",
        limits=EIGHT,
    )
    assert result.passed and len(result.pinned) <= 8


@pytest.mark.parametrize(
    ("nodes", "seconds", "threads", "begins"),
    [
        (672, 0.033, 2, True),  # the demo's model
        (672, 0.033, 4, False),  # whole runs use four cores, the interpreter one
        (2000, 0.033, 2, False),  # many small nodes
        (2000, 0.061, 2, True),
    ],
)
def test_runs_begin_at_their_layer_where_the_interpreter_is_no_bottleneck(
    nodes: int, seconds: float, threads: int, begins: bool
) -> None:
    assert begin_at_layers(nodes, seconds, threads) == begins
