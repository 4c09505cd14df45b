"""What the given inputs do not cover: sizes, ids, classes, and longer sequences as a test of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import bisect_trt
from bisect_trt.base.outcomes import Tally, ValidationVerdict
from bisect_trt.base.sample import Sample
from bisect_trt.inputs.augmentations import augmented_input, kinds_for
from bisect_trt.inputs.samples import few_ids, untested_sizes
from bisect_trt.model.graph import Graph
from bisect_trt.model.inputs import dynamic_axes, input_specs, length_axes
from fixtures.fixture import waves
from tests.command import call
from tests.copies import EIGHT
from tests.networks import parsed

KINDS = ("given", "perturbed", "augmented")


def model(shape: str, body: str = "y = Tanh(x)", out: str = "", **weights: Any) -> onnx.ModelProto:
    return parsed(body, f"float[{shape}] x", f"float[{out or shape}] y", **weights)


def test_the_sizes_of_dynamic_axes_are_told() -> None:
    specs = input_specs(model("batch, 3, L"))
    samples = [Sample(str(n), {"x": waves(n, 1, 3, n)}) for n in (48, 128, 64)]
    (found,) = untested_sizes(specs, samples)
    assert found.message.startswith("axis L was tested from 48 to 128 only")
    (one,) = untested_sizes(specs, samples[:1])
    assert "was tested at 48 only" in one.message
    assert untested_sizes(input_specs(model("1, 3, 8")), samples) == []
    assert [name for _, _, name in dynamic_axes(input_specs(model("n, 8")))] == []
    counted = model("a, 3, b, c")
    for axis, dim in enumerate(counted.graph.input[0].type.tensor_type.shape.dim):
        dim.dim_param = f"p2o.DynamicDimension.{axis}" if axis != 1 else ""
    assert [name for _, _, name in dynamic_axes(input_specs(counted))] == ["1", "2", "3"]
    assert length_axes(specs) == {"x": 2}
    assert length_axes(input_specs(model("1, 3, H, W"))) == {}, "an image has no length"


def test_longer_sequences_are_augmented_inputs() -> None:
    arrays = {"x": waves(1, 1, 8, 16), "mask": np.ones((1, 8), np.int64)}
    assert "longer" not in kinds_for(arrays)
    lengths = {"x": 1, "mask": 1}
    assert "longer" in kinds_for(arrays, lengths=lengths)
    sizes = set()
    for seed in range(20):
        made = augmented_input("longer", arrays, [], np.random.default_rng(seed), lengths=lengths)
        times = made["x"].shape[1] // 8
        assert made["mask"].shape == (1, 8 * times)
        np.testing.assert_allclose(made["x"][:, :8], made["x"][:, 8:16], atol=0.02)
        sizes.add(times)
    assert sizes == {2, 3, 4}


def test_a_model_that_takes_no_longer_ones_is_tested_without(tmp_path: Path) -> None:
    """Its positions are a table of 16 rows."""
    body = "s = Shape<start = 1, end = 2>(x) p = Slice(table, zero, s) y = Add(x, p)"
    network = model("1, L, 4", body, table=waves(3, 16, 4), zero=np.array([0]))
    inputs = [{"x": waves(n, 1, n, 4)} for n in (9, 12, 16)]
    result = bisect_trt.bisect(network, inputs, runner="emulated", out=tmp_path, limits=EIGHT)
    assert result.passed and result.validation is not None and result.validation.augmented.tested


def classifier(bias: float) -> tuple[onnx.ModelProto, list[dict[str, np.ndarray]]]:
    random = np.random.default_rng(0)
    weight = random.normal(0, 0.3, (64, 5)).astype(np.float32)
    body, offset = "l = MatMul(x, w) b = Add(l, c) y = Softmax(b)", np.float32([0, 0, bias, 0, 0])
    return model("1, 64", body, "1, 5", w=weight, c=offset), [
        {"x": waves(seed, 1, 64)} for seed in range(8)
    ]


def test_inputs_of_one_class_are_told_and_are_not_enough(tmp_path: Path) -> None:
    network, inputs = classifier(20.0)
    network.metadata_props.append(onnx.StringStringEntryProto(key="names", value="{2: 'python'}"))
    onnx.save(network, tmp_path / "m.onnx")
    for number, arrays in enumerate(inputs):
        np.savez(tmp_path / f"{number}.npz", **arrays)
    told = call(
        *("run", str(tmp_path / "m.onnx"), "--input", str(tmp_path / "*.npz")),
        *("--runner", "emulated", "--out", str(tmp_path / "run")),
        limits=EIGHT,
    )
    first = " ".join(told.output.split())
    assert "All 8 inputs are class 2 of 5 by output 'y': inputs of other classes" in first
    assert first.startswith("NEEDS MORE DATA")
    network, inputs = classifier(0.0)
    varied = bisect_trt.bisect(
        network, inputs, runner="emulated", out=tmp_path / "varied", limits=EIGHT
    )
    assert not any(f.kind == "alike" for f in varied.findings)
    assert varied.validation is not None and not varied.validation.alike
    robust = replace(varied.validation, **{k: Tally(80, 80, 0.96, 0.1) for k in KINDS})
    assert robust.word is ValidationVerdict.VALIDATED
    assert replace(robust, alike=True).word is ValidationVerdict.INCONCLUSIVE


def test_outputs_that_are_nearly_the_same_are_told(tmp_path: Path) -> None:
    base = waves(5, 1, 256)
    near = [{"x": base + np.float32(0.01) * waves(n, 1, 256)} for n in range(6)]
    far = [{"x": waves(n, 1, 256)} for n in range(6)]
    for inputs, expected in ((near, True), (far, False)):
        result = bisect_trt.bisect(
            model("1, 256"), inputs, runner="emulated", out=tmp_path / str(expected), limits=EIGHT
        )
        said = [f.message for f in result.findings if f.kind == "alike"]
        assert bool(said) == expected
        assert not expected or "nearly the same for all 6 inputs" in said[0]


def test_ids_from_a_corner_of_the_vocabulary_are_told() -> None:
    table = np.zeros((5000, 4), np.float32)
    body = "e = Gather(table, ids) y = Tanh(e)"
    graph = Graph(parsed(body, "int64[1, L] ids", "float[1, L, 4] y", table=table))
    corner = [Sample(str(n), {"ids": np.array([[100 + n, 300, 120]])}) for n in range(4)]
    (found,) = few_ids(graph, corner)
    assert "ids from 100 to 300 of 5,000 in 'ids'" in found.message
    spread = [Sample(str(n), {"ids": np.array([[n * 1200, 4999, 7]])}) for n in range(4)]
    assert few_ids(graph, spread) == []


def test_inspect_and_dry_run_say_it_too(tmp_path: Path) -> None:
    onnx.save(model("1, 3, L"), tmp_path / "m.onnx")
    np.savez(tmp_path / "x.npz", x=waves(1, 1, 3, 50))
    seen = call("inspect", str(tmp_path / "m.onnx"))
    assert "dynamic axes: L of input 'x'" in " ".join(seen.output.split())
    priced = call(
        *("run", str(tmp_path / "m.onnx"), "--input", str(tmp_path / "x.npz")),
        *("--runner", "emulated", "--dry-run"),
    )
    assert "note: axis L was tested at 50 only" in priced.output


def test_what_depends_on_no_input_is_no_sign(tmp_path: Path) -> None:
    outputs, anchors = "float[1, 64] y, float[4] anchors", np.float32([1, 2, 3, 4])
    network = parsed("y = Tanh(x) anchors = Identity(a)", "float[1, 64] x", outputs, a=anchors)
    inputs = [{"x": waves(n, 1, 64)} for n in range(4)]
    result = bisect_trt.bisect(network, inputs, runner="emulated", out=tmp_path, limits=EIGHT)
    assert not any(f.kind == "alike" for f in result.findings)


def test_what_the_default_hides_is_said(tmp_path: Path) -> None:
    """An output that hardly varies beside its mean."""
    constants = {"far": np.float32(2900.0), "most": np.float32(2610.0)}
    kelvin = model("1, 64", "[far] k = Add(x, far) [near] y = Sub(k, most)", **constants)
    inputs = [{"x": waves(n, 1, 64)} for n in range(4)]
    result = bisect_trt.bisect(
        kelvin, inputs, runner="emulated", out=tmp_path / "kelvin", limits=EIGHT
    )
    assert result.passed and not result.pinned
    (told,) = (f.message for f in result.findings if f.kind == "offset")
    assert "around 289.9" in told and "--requirement 'y:max_abs<=X'" in told
    assert "Output 'y' varies by" in result._repr_markdown_()
