"""Every node model of ONNX's own backend tests that has a float tensor and runs here goes through
all rewrites.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto

from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.graph import list_layers, to_emulated, to_typed
from bisect_trt.model.tensor_types import infer_types
from bisect_trt.runners.emulator import EmulatedRunner
from tests.conftest import run_model, same, session_of
from tests.model.node_models import cases, feed_of

EXPECTED_AT_LEAST = 900
LOWERED = PrecisionPlan("fp16")


def _usable() -> Iterator[tuple[Any, list[Any]]]:
    """The cases in scope with their outputs. Left out, by rule: no FP32 tensor; ONNX Runtime's CPU
    provider cannot run the source model; random.
    """
    for problem in cases().values():
        if TensorProto.FLOAT not in infer_types(problem.model).types.values():
            continue
        try:
            session = session_of(problem.model)
            reference, again = (session.run(None, feed_of(problem)) for _ in range(2))
        except Exception:  # every class of ONNX Runtime's errors means the same here: not runnable
            continue
        if same(reference, again):
            yield problem, reference


def _valid(model: onnx.ModelProto) -> bool:
    try:
        onnx.checker.check_model(model, full_check=True)
    except Exception:
        return False
    return True


def _rewritten_wrongly(
    problem: Any, reference: list[Any], layers: list[str], *, valid: bool
) -> Iterator[str]:
    """What is wrong with the models that hold a plan; ``valid`` if the source itself is."""
    for rewrite in (to_typed, to_emulated):
        reduced = rewrite(problem.model, LOWERED)
        pinned = rewrite(problem.model, PrecisionPlan("fp16", layers))
        if valid and not (_valid(reduced) and _valid(pinned)):
            yield f"{rewrite.__name__} gives an invalid model"
        if not same(run_model(pinned, feed_of(problem)), reference):
            yield f"{rewrite.__name__} with all layers pinned differs from the reference"
        if rewrite is to_emulated:
            try:
                run_model(reduced, feed_of(problem))
            except Exception as error:
                yield f"does not run emulated: {str(error)[:80]}"


def _switched_wrongly(problem: Any, layers: list[str]) -> Iterator[str]:
    """What is wrong with the emulator's one session for all plans: it loads, and with all layers
    pinned it is the reference.
    """
    tensors = [o.type.HasField("tensor_type") for o in problem.model.graph.output]
    arrays = [isinstance(a, np.ndarray) for a in feed_of(problem).values()]
    if not layers or not all(tensors) or not all(arrays):
        return
    try:
        runner = EmulatedRunner(problem.model, threads=1)
        next(runner.outputs(LOWERED, [Sample("s", feed_of(problem))]))
        plan = PrecisionPlan("fp16", layers)
        pinned = list(next(runner.outputs(plan, [Sample("s", feed_of(problem))])).values())
    except Exception as error:
        yield f"does not run with switches: {str(error)[:100]}"
        return
    # As written: ONNX Runtime's optimiser drops roundings where the source itself is partly in
    # float16.
    expected = run_model(
        problem.model, feed_of(problem), ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    )
    pairs = [(a, b) for a, b in zip(pinned, expected, strict=True) if b.dtype.kind == "f"]
    if not all(np.allclose(a, b, rtol=1e-5, atol=1e-6, equal_nan=True) for a, b in pairs):
        yield "with switches, all layers pinned, it differs"


@pytest.mark.slow
def test_node_models(capsys: pytest.CaptureFixture[str]) -> None:
    count = with_layers = 0
    invalid_sources, problems = [], []
    for problem, reference in _usable():
        count += 1
        layers = [layer.name for layer in list_layers(problem.model)]
        with_layers += bool(layers)
        valid = _valid(problem.model)
        if not valid:
            invalid_sources.append(problem.name)
        wrong = [
            *_rewritten_wrongly(problem, reference, layers, valid=valid),
            *_switched_wrongly(problem, layers),
        ]
        problems += [f"{problem.name}: {words}" for words in wrong]
    with capsys.disabled():
        print(
            f"\nONNX backend node models: {count} cases, {with_layers} with layers; sources that "
            f"fail the checker: {invalid_sources}"
        )
    assert problems == []
    assert count >= EXPECTED_AT_LEAST
