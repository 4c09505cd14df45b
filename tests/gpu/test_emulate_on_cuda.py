"""The emulator on ONNX Runtime's CUDA provider, held against the one on the CPU; skipped, with the
reason, where CUDA cannot be used. About a minute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pandas as pd
import pytest

import bisect_trt
from bisect_trt.base.errors import MachineError
from bisect_trt.base.outcomes import ValidationVerdict
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.graph import list_layers
from bisect_trt.metrics.parser import parse_requirements
from bisect_trt.metrics.rounding import rounded
from bisect_trt.model.emulated import rounding_model
from bisect_trt.model.graph import Graph
from bisect_trt.runners.device import cuda_device
from bisect_trt.runners.device_check import (
    awkward_numbers,
    strictness,
    why_not_on_cuda,
    wrong_roundings,
)
from bisect_trt.runners.doctor import examine
from bisect_trt.runners.emulator import EmulatedRunner
from bisect_trt.runners.ort_session import run_all, session_as_written
from bisect_trt.runners.reference import Reference
from fixtures.encoders import encoder_decomposed
from fixtures.fixture import Fixture
from fixtures.models import ALL, residual, unsavable

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
CUDA = cuda_device("the GPU")
REDUCED = (Precision.FP16, Precision.BF16, Precision.TF32)


@pytest.fixture(scope="module", autouse=True)
def gpu() -> None:
    reason = why_not_on_cuda()
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("precision", REDUCED)
def test_every_rounding_is_numpy_s_bit_for_bit(precision: Precision) -> None:
    assert wrong_roundings(CUDA, precision) == 0


@pytest.mark.parametrize("precision", [Precision.FP16, Precision.BF16])
def test_no_optimisation_folds_a_rounding(precision: Precision) -> None:
    """Sessions of the emulator are not optimised; should one ever be, the casts stay there too."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    session = ort.InferenceSession(
        rounding_model(precision).SerializeToString(), options, providers=CUDA.providers
    )
    numbers = awkward_numbers()
    np.testing.assert_array_equal(
        session.run(None, {"x": numbers})[0].view(np.uint32)[~np.isnan(numbers)],
        rounded(numbers, precision).view(np.uint32)[~np.isnan(numbers)],
    )


def test_fp32_is_strict() -> None:
    found = strictness(CUDA)
    print(found)
    assert found.is_strict and found.product < 1e-5 and found.convolution < 5e-5


def test_tf32_would_be_noticed() -> None:
    options = tuple({**dict(CUDA.options), "use_tf32": "1"}.items())
    loose = strictness(replace(CUDA, options=options))
    print(loose)
    assert not loose.is_strict


def test_doctor_says_so() -> None:
    check = next(c for c in examine() if c.name == "emulator on cuda")
    assert check.works, check.detail


@cache
def emulators(make: Callable[[], Fixture]) -> tuple[Fixture, EmulatedRunner, EmulatedRunner]:
    fixture = make()
    base = Precision(fixture.precision)
    return (
        fixture,
        EmulatedRunner(fixture.model, base),
        EmulatedRunner(fixture.model, base, device=CUDA),
    )


def test_verdicts_are_the_cpu_s() -> None:
    """Of every fixture, everything reduced, everything pinned, and seeded sets between; a score
    within two per cent of the line may fall to either side.
    """
    asked = told_apart = 0
    for make in ALL:
        if make is unsavable:  # chaotic by design: no two arithmetics agree on it
            continue
        fixture, here, there = emulators(make)
        requirements = parse_requirements(
            (fixture.require,), [o.name for o in fixture.model.graph.output]
        )
        sample = Sample("s", fixture.inputs)
        layers = [layer.name for layer in list_layers(fixture.model)]
        exact = next(here.outputs(PrecisionPlan("fp32"), [sample]))
        random = np.random.default_rng(0)
        sets = [[], layers] + [
            random.choice(layers, int(share * len(layers)), replace=False).tolist()
            for share in (0.1, 0.3, 0.5, 0.7, 0.9, 0.95)
        ]
        for pins in sets:
            plan = PrecisionPlan(fixture.precision, pins)
            scores = [
                requirements.score(exact, next(runner.outputs(plan, [sample])))
                for runner in (here, there)
            ]
            near = abs(scores[0] - 1.0) < 0.02
            asked += 1
            apart = (scores[0] <= 1.0) is not (scores[1] <= 1.0)
            told_apart += apart
            assert near or not apart, (fixture.name, len(pins), scores)
    print(f"verdicts: {asked - told_apart} of {asked} alike")
    assert asked >= 8 * (len(ALL) - 1) and told_apart <= 0.02 * asked


@pytest.mark.parametrize("make", [residual, encoder_decomposed], ids=lambda f: f.__name__)
def test_layers_effects_rank_as_on_the_cpu(make: Callable[[], Fixture]) -> None:
    fixture, here, there = emulators(make)
    sample = Sample("s", fixture.inputs)
    layers = [layer.name for layer in list_layers(fixture.model)]
    exact = next(here.outputs(PrecisionPlan("fp32"), [sample]))
    found = []
    for runner in (here, there):
        errors = {
            name: max(
                float(np.sqrt(np.mean((out[n].astype(np.float64) - exact[n]) ** 2))) for n in exact
            )
            for name, out in runner.sensitivities(sample, Precision.FP16, layers)
            if out is not None
        }
        found.append(pd.Series(errors))
    finite = np.isfinite(found[0]) & np.isfinite(found[1])
    assert (np.isfinite(found[0]) == np.isfinite(found[1])).all()
    # Below what FP32 itself is off by, the order is that of FP32's own roundings.
    noise = 1e-6 * max(float(np.abs(a).max()) for a in exact.values())
    heard = finite & (found[0] > noise)
    rank = found[0][heard].rank().corr(found[1][heard].rank())
    print(f"{fixture.name}: rank correlation {rank:.4f} over {int(heard.sum())} layers")
    assert rank > 0.99


def test_the_same_plan_gets_the_same_answer() -> None:
    fixture, _, there = emulators(residual)
    sample, plan = Sample("s", fixture.inputs), PrecisionPlan(Precision.FP16)
    again = EmulatedRunner(fixture.model, device=CUDA)
    answers = [next(r.outputs(plan, [sample])) for r in (there, there, again)]
    for other in answers[1:]:
        assert all(np.array_equal(answers[0][n], other[n], equal_nan=True) for n in other)


def test_a_set_found_on_the_gpu_holds_on_the_cpu(tmp_path: Path) -> None:
    """Another order of sums may lead to another set: what is tested on new copies is the same."""
    fixture = residual()

    def run(emulate_on: str) -> bisect_trt.Result:
        return bisect_trt.bisect(
            fixture.model,
            fixture.inputs,
            require=fixture.require,
            runner="emulated",
            out=tmp_path / emulate_on,
            emulate_on=emulate_on,
        )

    there = run("cuda")
    assert there.passed and there.versions["emulated on"]
    assert (
        there.validation is not None and there.validation.word is not ValidationVerdict.OVERFITTED
    )
    assert (
        min(there.validation.perturbed.lower_bound, there.validation.augmented.lower_bound) >= 0.95
    )
    sample = Sample("given", fixture.inputs)
    outputs = next(EmulatedRunner(fixture.model).outputs(there.plan, [sample]))
    exact = Reference(Graph(fixture.model), None).outputs(sample)
    requirements = parse_requirements([fixture.require], tuple(exact))
    assert requirements.score(exact, outputs) <= 1.0
    assert run("cuda").new_evaluations == 0


def test_workers_on_the_gpu(tmp_path: Path) -> None:
    fixture = residual()
    result = bisect_trt.bisect(
        fixture.model,
        fixture.inputs,
        require=fixture.require,
        runner="emulated",
        out=tmp_path,
        robust=0,
        emulate_on="cuda",
        workers=2,
    )
    assert result.passed and result.versions["emulated on"]


def test_a_session_beside_holds_its_limit() -> None:
    """What is asked for beyond the limit is refused, and says what to do; the GPU goes on."""
    tight = EmulatedRunner(residual().model, device=cuda_device("tight", 0, 1))
    with pytest.raises(MachineError, match=r"out of memory|GPU failed"):
        next(tight.outputs(PrecisionPlan("fp32"), [Sample("s", residual().inputs)]))
    model = rounding_model(Precision.FP16)
    session = session_as_written(model, "a rounding", device=CUDA)
    assert run_all(session, {"x": np.float32([1.0])}, "a rounding")["y"] == 1.0
