"""The five public stories from complaint to cure: cause, pins, proof, and the cures compared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

import bisect_trt
from bisect_trt.base.outcomes import PLAN, REPAIRED
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.inputs.samples import suspicious_inputs
from bisect_trt.model.patterns import find_patterns
from bisect_trt.report.choices import recommended
from bisect_trt.report.summarise import Result
from fixtures import cases
from fixtures.__main__ import FILES, input_bytes, model_bytes
from fixtures.cases.encoder import encoder
from fixtures.cases.nafnet import nafnet, noisy_photo
from fixtures.cases.unimatch import noise, unimatch
from fixtures.fixture import Fixture
from fixtures.photo import photo
from tests.conftest import run_model, slow_where
from tests.copies import EIGHT
from tests.docs.pages import CASES_RUN
from tests.runners.test_trt_build import check


def run(fixture: Fixture, out: Path, **options: object) -> Result:
    options.setdefault("robust", 0)
    return bisect_trt.bisect(
        fixture.model,
        fixture.inputs,
        precision=fixture.precision,
        require=fixture.require,
        metric=fixture.metrics,
        runner="emulated",
        out=out,
        **options,
        limits=EIGHT,
    )


@pytest.mark.parametrize(
    "name",
    slow_where(lambda n: "RT-DETR" in n, sorted(cases.AUGMENTED.keys() - CASES_RUN.values())),
)
def test_triage_names_the_cause_and_the_answer_holds(name: str, tmp_path: Path) -> None:
    """Those that no page's command runs."""
    fixture = cases.AUGMENTED[name]()
    is_the_answer(run(fixture, tmp_path), fixture)


def is_the_answer(result: Result, fixture: Fixture) -> None:
    """The cause and the original graph's pins are the story's; the answer holds where nothing else
    would, with fewer pins where the graph was repaired.
    """
    assert result.cause.value == fixture.cause, result.sentence
    assert result.passed and result.exit_code == 0
    pinned = next((c.pinned for c in result.choice_rows if c.name == PLAN), tuple(result.pinned))
    if fixture.pins is None:
        assert len(pinned) <= fixture.most_pins
    else:
        assert set(pinned) == fixture.pins
    if result.is_repaired:
        assert len(result.pinned) < len(pinned) and result.score <= 1.0 < result.base_score
    elif result.pinned:
        assert result.complete and result.score <= 1.0 < result.base_score
    elif fixture.cause == "tf32":
        assert result.base_score > 1.0 >= result.score


@pytest.mark.parametrize("make", cases.FILES, ids=lambda f: f().name)
def test_files_are_rebuilt_bit_for_bit(make: Callable[[], Fixture]) -> None:
    fixture = make()
    assert (FILES / f"{fixture.name}.onnx").read_bytes() == model_bytes(fixture)
    inputs = FILES / f"{fixture.name}.npz"
    if inputs.exists():
        assert inputs.read_bytes() == input_bytes(fixture)
    assert sum(p.stat().st_size for p in FILES.iterdir()) < 20e6


@pytest.mark.parametrize(
    "make", slow_where(lambda f: f().name == "rtdetr", cases.FILES), ids=lambda f: f().name
)
def test_tensorrt_parses_types_and_builds_them(make: Callable[[], Fixture]) -> None:
    fixture = make()
    check(fixture.model, fixture.inputs)


@pytest.mark.parametrize("make", [nafnet, encoder], ids=lambda f: f.__name__)
def test_the_found_set_is_smaller_than_every_layernorm(
    make: Callable[[], Fixture], tmp_path: Path
) -> None:
    fixture = make()
    found = run(fixture, tmp_path, repair="none", weights="nearest")
    norms = frozenset(
        name for p in find_patterns(fixture.model) if p.kind == "LayerNorm" for name in p.layers
    )
    assert found.pinned and set(found.pinned) < norms
    prober_score = bisect_trt.verify(
        fixture.model,
        fixture.inputs,
        PrecisionPlan("fp16", norms),
        require=fixture.require,
        runner="emulated",
        out=tmp_path / "all",
        limits=EIGHT,
    )
    assert prober_score.passed


@pytest.mark.parametrize("make", [nafnet, encoder], ids=lambda f: f.__name__)
def test_layernorm_as_one_operator_is_a_cure_without_pins(
    make: Callable[[], Fixture], tmp_path: Path
) -> None:
    fixture = make()
    result = run(fixture, tmp_path, repair="layernorm")
    is_the_answer(result, fixture)
    chosen = recommended(result.choice_rows)
    assert chosen is not None and chosen.name == REPAIRED and not chosen.pinned
    assert result.pinned == [] and chosen.worst_score == result.score
    assert "LayerNormalization" not in {node.op_type for node in fixture.model.graph.node}
    repaired = onnx.load(tmp_path / "model.repaired.onnx")
    assert "LayerNormalization" in {node.op_type for node in repaired.graph.node}
    before = run_model(fixture.model, fixture.inputs)[0]
    after = run_model(repaired, fixture.inputs)[0]
    assert np.abs(after - before).max() <= 1e-6 * np.abs(before).max()


def test_noise_exaggerates_the_error_and_is_warned_of(tmp_path: Path) -> None:
    """What people feed when they have no photo: the error is another one, and the tool says why not
    to trust it.
    """
    fixture, random = unimatch(), noise()
    assert suspicious_inputs([Sample("photo", fixture.inputs)]) == []
    assert len(suspicious_inputs([Sample("noise", random)])) == 2
    both = suspicious_inputs([Sample("one", random), Sample("other", random)])
    assert len(both) == 2 and all(line.startswith("one and 1 more: ") for line in both)
    whole = {n: np.rint(a * 16).astype(np.float32) for n, a in random.items()}
    assert suspicious_inputs([Sample("grey values", whole)]) == []
    scores = []
    for number, inputs in enumerate((fixture.inputs, random)):
        result = bisect_trt.bisect(
            fixture.model,
            inputs,
            require="epe<=1e3",
            metric=fixture.metrics,
            runner="emulated",
            out=tmp_path / str(number),
            robust=0,
        )
        rows = result.outputs
        scores.append(float(rows.loc[rows["baseline"] == "fp16", "max_abs"].iloc[0]))
        assert any(f.kind == "input" for f in result.findings) is (number == 1)
    assert scores[1] > 1.5 * scores[0]


def test_the_noisy_photo_is_a_photo() -> None:
    image = noisy_photo()
    assert image.min() >= 0.0 and image.max() <= 1.0
    assert 20.0 < -10.0 * np.log10(np.mean((image - photo(64, 64)) ** 2)) < 30.0


def test_what_correlates_along_some_axis_is_no_noise() -> None:
    """Features of speech: none tells of the next, each of itself a step of time later."""
    steps = np.random.default_rng(0).standard_normal((1, 200, 16))
    walk = np.cumsum(steps, axis=1).astype(np.float32)
    assert suspicious_inputs([Sample("walk", {"x": walk})]) == []
    assert len(suspicious_inputs([Sample("noise", {"x": steps.astype(np.float32)})])) == 1
