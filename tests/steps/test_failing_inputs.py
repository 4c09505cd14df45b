"""Layers that few inputs need: a prefix of the ranking does not pin all that stands before them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import bisect_trt
from bisect_trt.base.display import counted
from fixtures.build import GraphBuilder

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


@pytest.mark.slow
@pytest.mark.usefixtures("eight_draws")
@pytest.mark.parametrize(
    ("aggregate", "large"), [("", {0: "a", 4: "b"}), ("@p95", {4: "b"}), ("@mean", {4: "a"})]
)
def test_what_one_input_needs_is_pinned_without_what_disturbs_others_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aggregate: str, large: dict[int, str]
) -> None:
    """Each layer alone was measured on the input that misses by most, where the other's overflow
    is not seen: all branches stood before it, and were pinned.
    """
    monkeypatch.setattr("bisect_trt.steps.failing_inputs.ranked_count", lambda _: 2)
    result = bisect_trt.bisect(
        model(),
        inputs(large),
        require=f"max_abs{aggregate}<=2e-2",
        augmented="none",
        runner="emulated",
        out=tmp_path / "run",
    )
    assert result.passed and {f"/{name}/Mul" for name in large.values()} <= set(result.pinned)
    assert len(result.pinned) <= 8, f"{counted(len(result.pinned), 'pin')}: {result.pinned}"


@pytest.mark.usefixtures("eight_draws")
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
    )
    assert result.passed and len(result.pinned) <= 8
