"""Samples that bring what their token ids look up: the same answers, and roundings drawn anew."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.inputs.perturbations import perturbed_lookups
from bisect_trt.model.graph import Graph
from bisect_trt.runners.device import Device
from bisect_trt.runners.emulator import EmulatedRunner
from bisect_trt.runners.reference import Lookups, Reference
from bisect_trt.runners.second_emulator import WholeModelRunner
from bisect_trt.runners.values import owned
from fixtures.tokens import sentence, token_encoder

WORDS = "/embed/Gather"
LOWERED = PrecisionPlan("fp16")


def forms() -> tuple[Graph, Sample, Sample]:
    """The model, a sentence, and the same sentence with what it looks up."""
    graph, given = Graph(token_encoder()), Sample("s", sentence(0))
    return graph, given, Sample("s", {**given.arrays, **Lookups(graph).of(given)})


def concatenated(outputs: dict[str, NDArray[np.float32]]) -> NDArray[np.float64]:
    return np.concatenate([o.ravel() for o in outputs.values()]).astype(np.float64)


def test_what_is_looked_up_and_nothing_behind_it() -> None:
    graph, _, whole = forms()
    nodes = [graph.names[lookup.index] for lookup in graph.lookups]
    assert nodes == [WORDS], "neither a mask that is cast nor what follows from a shape"
    moved = [a.shape for n, a in whole.arrays.items() if n.endswith("__moved")]
    assert moved == [(1, 16, 32)]
    after = graph.after_lookups
    assert [layer.name for layer in after.layers] == [layer.name for layer in graph.layers]
    assert not {lookup.table for lookup in graph.lookups} & set(after.constants)


@pytest.mark.parametrize("base", [Precision.FP16, Precision.BF16, Precision.TF32])
def test_the_tables_own_values_change_no_bit(base: Precision) -> None:
    graph, given, whole = forms()
    layers = [layer.name for layer in graph.layers if base in layer.precisions]
    reference = Reference(graph)
    assert concatenated(dict(reference.outputs(given))).tobytes() == (
        concatenated(dict(reference.outputs(whole))).tobytes()
    )
    plans = [
        PrecisionPlan(base),
        PrecisionPlan(base, layers[::2]),
        PrecisionPlan(base, layers),
        PrecisionPlan("fp32"),
    ]
    if base is not Precision.TF32:
        plans += [PrecisionPlan(base, [WORDS]), PrecisionPlan(base, [WORDS], Precision.TF32)]
    emulator, second = EmulatedRunner(graph, base), WholeModelRunner(graph)
    for plan in plans:
        for runner in (emulator, second):
            plain, begun = (concatenated(dict(o)) for o in runner.outputs(plan, [given, whole]))
            assert plain.tobytes() == begun.tobytes(), (runner.name, plan)
        traces = [
            {v.tensor: v.accumulated for v in emulator.trace(s, plan)} for s in (given, whole)
        ]
        for tensor in traces[0].keys() & traces[1].keys():
            assert traces[0][tensor].tobytes() == traces[1][tensor].tobytes()


def test_a_device_holds_the_weights_once_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    placed: list[tuple[int, ...]] = []

    def counted(array: NDArray[Any], *where: Any) -> ort.OrtValue:
        placed.append(array.shape)
        return owned(array, *where)

    monkeypatch.setattr("bisect_trt.runners.constants.owned", counted)
    graph, given, whole = forms()
    here, there = EmulatedRunner(graph), EmulatedRunner(graph, device=Device(name="planted"))
    for plan in (LOWERED, PrecisionPlan("fp32")):
        one = next(there.outputs(plan, [given]))
        weights = len(placed)
        other = next(there.outputs(plan, [whole]))
        assert len(placed) == weights > 0
        for sample, outputs in ((given, one), (whole, other)):
            expected = next(here.outputs(plan, [sample]))
            assert concatenated(dict(outputs)).tobytes() == concatenated(dict(expected)).tobytes()


def test_each_layer_alone_does_the_same() -> None:
    graph, given, whole = forms()
    runner, wanted = EmulatedRunner(graph), [layer.name for layer in graph.layers]
    sensitivities = [dict(runner.sensitivities(s, Precision.FP16, wanted)) for s in (given, whole)]
    assert list(sensitivities[0]) == list(sensitivities[1]) == wanted
    for layer in wanted:
        plain, begun = (e[layer] for e in sensitivities)
        assert plain is not None and begun is not None
        assert concatenated(dict(plain)).tobytes() == concatenated(dict(begun)).tobytes()


def test_a_draw_moves_the_output_by_about_what_rounding_does() -> None:
    graph, given, _ = forms()
    found = Lookups(graph).of(given)
    reference, runner = Reference(graph), EmulatedRunner(graph)
    exact = concatenated(dict(reference.outputs(given)))
    error = concatenated(dict(next(runner.outputs(LOWERED, [given])))) - exact
    moves, alike = [], []
    for number in range(8):
        moved = perturbed_lookups(found, np.random.default_rng(number))
        sample = Sample("s", {**given.arrays, **moved})
        other = concatenated(dict(reference.outputs(sample)))
        other_error = concatenated(dict(next(runner.outputs(LOWERED, [sample])))) - other
        moves.append((other - exact).std() / error.std())
        alike.append(np.corrcoef(error, other_error)[0, 1])
        assert 0.5 < other_error.std() / error.std() < 2.0
    assert min(moves) > 0.3 and max(moves) < 5.0
    assert abs(float(np.mean(alike))) < 0.5, "the roundings are others"


def test_integers_that_are_only_cast_can_be_moved_and_masks_cannot() -> None:
    pixels = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        g (uint8[1, 8] x) => (float[1, 8] y) { f = Cast <to = 1> (x)  y = Tanh(f) }
    """)
    graph = Graph(pixels)
    assert [lookup.table for lookup in graph.lookups] == [""]
    given = Sample("s", {"x": np.arange(8, dtype=np.uint8)[None]})
    found = Lookups(graph).of(given)
    assert [a.tolist() for a in found.values()] == [[list(range(8))]]
    mask = Lookups(graph).of(Sample("m", {"x": np.uint8([[0, 0, 0, 1, 1, 1, 1, 1]])}))
    moved = perturbed_lookups(mask, np.random.default_rng(0))
    assert all(np.array_equal(moved[n], mask[n]) for n in mask)


def test_a_size_is_never_moved() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        g (uint8[1, 3, 6, 8] x) => (float[1, 3, a, b] y) <float[4] half = {1, 1, 0.5, 0.5}> {
            pixels = Cast <to = 1> (x)
            shape = Shape(x)
            size = Cast <to = 1> (shape)
            smaller = Mul(size, half)
            sizes = Cast <to = 7> (smaller)
            y = Resize <mode = "linear"> (pixels, , , sizes)
        }
    """)
    assert [lookup.tensor for lookup in Graph(model).lookups] == ["pixels"]


def test_indices_that_a_layer_computes_are_left_to_the_model() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        g (int64[1, 4] ids) => (float[1, 4, 2] y)
        <float[4, 2] table = {0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5}> {
            first = Gather(table, ids)
            best = ArgMax <axis = 2, keepdims = 0> (first)
            y = Gather(table, best)
        }
    """)
    graph = Graph(model)
    assert [lookup.tensor for lookup in graph.lookups] == ["first"]
    assert "table" in graph.after_lookups.constants, "the second lookup needs it"
    given = Sample("s", {"ids": np.int64([[0, 1, 2, 3]])})
    whole = Sample("s", {**given.arrays, **Lookups(graph).of(given)})
    plain, begun = EmulatedRunner(graph).outputs(LOWERED, [given, whole])
    assert np.array_equal(plain["y"], begun["y"])


def test_float_inputs_are_looked_up_nowhere() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[2, 4] x) => (float[2, 4] y) { y = Tanh(x) }
    """)
    graph = Graph(model)
    assert graph.lookups == () and graph.taking(["x"]) is graph
    assert Lookups(graph).of(Sample("s", {"x": np.ones((2, 4), np.float32)})) == {}
