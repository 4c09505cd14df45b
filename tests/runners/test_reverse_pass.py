"""A reverse pass gives the signed effects that runs of each layer alone give, to first order."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from bisect_trt.base.errors import RunnerFailedError
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.metrics.error_sample import ErrorSample
from bisect_trt.metrics.parser import parse_requirements
from bisect_trt.model.graph import Graph
from bisect_trt.runners.constants import ConstantStore
from bisect_trt.runners.emulator import EmulatedRunner
from bisect_trt.runners.node_by_node import NodeByNode
from bisect_trt.runners.reverse_pass import first_order_effects
from fixtures.build import GraphBuilder
from fixtures.cases.nafnet import nafnet
from fixtures.cases.rtdetr import rtdetr
from fixtures.cases.unimatch import unimatch
from fixtures.encoders import encoder_decomposed, encoder_layernorm
from fixtures.fixture import Fixture, waves
from fixtures.models import residual
from fixtures.subgraphs import branch


def ranks(values: NDArray[np.float64]) -> NDArray[np.intp]:
    return np.argsort(np.argsort(values))


@pytest.mark.parametrize("precision", [Precision.FP16, Precision.BF16, Precision.TF32])
@pytest.mark.parametrize(
    "make", [residual, nafnet, unimatch, encoder_decomposed, encoder_layernorm, rtdetr]
)
def test_effects_are_those_of_each_layer_alone(
    make: Callable[[], Fixture], precision: Precision
) -> None:
    fixture = make()
    runner, sample = EmulatedRunner(fixture.model, precision), Sample("", fixture.inputs)
    random = np.random.default_rng(0)
    exact = dict(next(iter(runner.outputs(PrecisionPlan(Precision.FP32), [sample]))))
    weights = {n: random.standard_normal(o.shape).astype(np.float32) for n, o in exact.items()}
    found = runner.first_order_effects(sample, precision, [weights])
    names = [x.name for x in runner.graph.layers_at(precision)]
    assert found.effects.keys() == set(names)
    covered = [n for n in names if n not in found.uncovered]
    assert found.uncovered == found.broken and len(covered) > 0.8 * len(names)
    expected, given = [], []
    for name, outputs in runner.sensitivities(sample, precision, covered):
        assert outputs is not None
        change = sum(float(np.sum((outputs[n] - exact[n]) * weights[n])) for n in exact)
        if np.isfinite(change):
            expected.append(change)
            given.append(float(found.effects[name][0]))
    # Errors that are not small are not of first order: BF16's are eight times FP16's.
    assert np.corrcoef(ranks(np.abs(expected)), ranks(np.abs(given)))[0, 1] > 0.85
    large = np.abs(expected) > np.median(np.abs(expected))
    assert np.mean(np.sign(expected)[large] == np.sign(given)[large]) > 0.9


def test_layers_before_what_has_no_gradient_are_uncovered() -> None:
    fixture = branch()
    runner, sample = EmulatedRunner(fixture.model), Sample("", fixture.inputs)
    exact = next(iter(runner.outputs(PrecisionPlan(Precision.FP32), [sample])))
    weights = {name: np.ones_like(output) for name, output in exact.items()}
    found = runner.first_order_effects(sample, Precision.FP16, [weights])
    types = {x.name: x.op for x in runner.graph.layers_at(Precision.FP16)}
    # The body overflows; the condition, a step function, has a gradient of zero.
    assert {types[name] for name in found.broken} == {"If"}
    assert {types[name] for name in found.uncovered - found.broken} == {"Relu"}


def test_a_layer_that_overflows_has_no_effect_and_hides_no_other() -> None:
    build = GraphBuilder(0)
    large = build.op("Mul", "x", build.weight(1e3))
    root = build.op("Sqrt", build.op("Mul", large, large))
    model = build.model({"x": [1, 8]}, {root: [1, 8]})
    sample = Sample("", {"x": np.abs(waves(0, 1, 8)) + np.float32(1.0)})
    runner = EmulatedRunner(model)
    (output,) = runner.graph.outputs
    weights = [{output: np.ones((1, 8), np.float32)}]
    found = runner.first_order_effects(sample, Precision.FP16, weights)
    first, square, last = (x.name for x in runner.graph.layers_at(Precision.FP16))
    assert found.broken == found.uncovered == {square, last}
    assert np.isfinite(found.effects[first]).all() and found.effects[first].any()


def test_a_pass_that_would_keep_too_much_is_refused() -> None:
    fixture = residual()
    graph = Graph(fixture.model)
    constants = ConstantStore(graph)
    nodes, sample = NodeByNode(graph, constants, 1), Sample("", fixture.inputs)
    with pytest.raises(RunnerFailedError, match="more than 10 bytes"):
        weights = {name: np.ones(1, np.float32) for name in graph.outputs}
        first_order_effects(
            graph, nodes, constants, sample, Precision.FP16, [weights], most_bytes=10
        )


def test_weights_sum_to_the_chosen_errors() -> None:
    random = np.random.default_rng(0)
    exact = {
        "a": random.standard_normal((3, 5)).astype(np.float32),
        "n": np.arange(4),
        "b": random.standard_normal(40).astype(np.float32),
    }
    other = {
        n: o + (random.integers(0, 3, o.shape) * 0.5).astype(o.dtype) for n, o in exact.items()
    }
    requirements = parse_requirements(["atol=1e-2,rtol=1e-1"], list(exact), {}, {})
    chosen = ErrorSample(requirements, exact, other, 30)
    factors = random.standard_normal(chosen.size)
    weights = chosen.weights(factors)
    assert weights.keys() == {"a", "b"}
    given = sum(float(np.sum(weights[n] * (other[n] - exact[n]))) for n in weights)
    floats = {n: other[n] if n in weights else exact[n] for n in exact}
    assert given == pytest.approx(float(factors @ chosen.errors(floats)), rel=1e-4)
