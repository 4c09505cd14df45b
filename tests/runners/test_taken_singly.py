"""Where small tensors are taken singly, sessions have no arena, and give the same numbers."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from bisect_trt.base.limits import SessionHabits, adopt
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.graph import list_layers
from bisect_trt.model.graph import Graph
from bisect_trt.runners import ort_session
from bisect_trt.runners.emulator import EmulatedRunner
from bisect_trt.runners.reference import Reference
from tests.networks import convolutional

MODEL, INPUTS = convolutional(30)
SAMPLES = [
    Sample(str(n), {name: value * np.float32(1 + n / 100) for name, value in INPUTS.items()})
    for n in range(40)  # enough for the session that a plan of many runs gets
]


def all_outputs() -> list[NDArray[np.float32]]:
    """Of the reference, of a plan on many samples, of single layers."""
    layers = [layer.name for layer in list_layers(MODEL)]
    reference, runner = Reference(Graph(MODEL)), EmulatedRunner(MODEL)
    plan = PrecisionPlan(Precision.FP16, frozenset(layers[::3]))
    found = [dict(reference.outputs(sample)) for sample in SAMPLES]
    found += map(dict, runner.outputs(plan, SAMPLES))
    found += (dict(o) for _, o in runner.sensitivities(SAMPLES[0], Precision.FP16, layers) if o)
    return [array for outputs in found for array in outputs.values()]


def test_the_numbers_are_the_same() -> None:
    found = []
    for singly in (False, True):
        adopt(SessionHabits(takes_singly=singly))
        found.append(all_outputs())
    assert len(found[0]) > 2 * len(SAMPLES)
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("singly", [False, True])
def test_an_arena_is_asked_for_and_shrunk_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, singly: bool
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(ort_session, "_register_shared_arena", lambda: asked.append(1))
    adopt(SessionHabits(takes_singly=singly))
    Reference(Graph(MODEL))
    assert bool(asked) is not singly
    assert (ort_session.giving_back() is None) is singly
