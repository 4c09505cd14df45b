"""Every node model of ONNX's own backend tests that has a float tensor and runs here goes through
both rewrites.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, numpy_helper
from onnx.backend.test.loader import load_model_tests

from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.core.sample import Sample
from bisect_trt.graph import list_layers, to_emulated, to_typed
from bisect_trt.graph.tensor_types import infer_types
from bisect_trt.runners.emulator.runner import EmulatedRunner
from tests.conftest import run_model, same

CASES = {case.name: case for case in load_model_tests(kind="node")}
EXPECTED_AT_LEAST = 900


def _feed(case: Any) -> dict[str, Any]:
    values = zip(case.model.graph.input, case.data_sets[0][0], strict=False)
    arrays = {
        i.name: numpy_helper.to_array(v) if isinstance(v, TensorProto) else v for i, v in values
    }
    # A fresh copy each time: some kernels (BatchNormalization in training mode) write into their
    # inputs.
    return {
        n: np.array(a, copy=True) if isinstance(a, np.ndarray) else a for n, a in arrays.items()
    }


def _usable() -> Iterator[tuple[str, Any, list[Any]]]:
    """The cases in scope. Left out, by rule: no FP32 tensor; ONNX Runtime's CPU provider cannot run
    the source model; random.
    """
    for name, case in CASES.items():
        if TensorProto.FLOAT not in infer_types(case.model).types.values():
            continue
        try:
            reference = run_model(case.model, _feed(case))
        except Exception:  # every class of ONNX Runtime's errors means the same here: not runnable
            continue
        if same(reference, run_model(case.model, _feed(case))):
            yield name, case, reference


def _valid(model: onnx.ModelProto) -> bool:
    try:
        onnx.checker.check_model(model, full_check=True)
    except Exception:
        return False
    return True


@pytest.mark.timeout(300)
def test_node_models(capsys: pytest.CaptureFixture[str]) -> None:
    count = with_layers = 0
    invalid_sources, problems = [], []
    for name, case, reference in _usable():
        count += 1
        layers = [layer.name for layer in list_layers(case.model)]
        with_layers += bool(layers)
        check = _valid(case.model)
        if not check:
            invalid_sources.append(name)
        for rewrite in (to_typed, to_emulated):
            lowered = rewrite(case.model, PrecisionPlan("fp16"))
            pinned = rewrite(case.model, PrecisionPlan("fp16", layers))
            if check and not (_valid(lowered) and _valid(pinned)):
                problems.append(f"{name}: {rewrite.__name__} gives an invalid model")
            if not same(run_model(pinned, _feed(case)), reference):
                problems.append(
                    f"{name}: {rewrite.__name__} with all layers pinned differs from the reference"
                )
    with capsys.disabled():
        print(
            f"\nONNX backend node models: {count} cases, {with_layers} with layers; sources that "
            f"fail the checker: {invalid_sources}"
        )
    assert problems == []
    assert count >= EXPECTED_AT_LEAST


@pytest.mark.timeout(300)
def test_every_emulated_node_model_runs() -> None:
    failed = []
    for name, case, _ in _usable():
        try:
            run_model(to_emulated(case.model, PrecisionPlan("fp16")), _feed(case))
        except Exception as error:
            failed.append((name, str(error)[:80]))
    assert failed == []


@pytest.mark.timeout(300)
def test_every_node_model_runs_with_switches() -> None:
    """The emulator's one session for all plans: it loads, and with all layers pinned it is the
    reference.
    """
    problems = []
    for name, case, _ in _usable():
        layers = [layer.name for layer in list_layers(case.model)]
        tensors = [o.type.HasField("tensor_type") for o in case.model.graph.output]
        if (
            not layers
            or not all(tensors)
            or not all(isinstance(a, np.ndarray) for a in _feed(case).values())
        ):
            continue
        try:
            runner = EmulatedRunner(case.model)
            next(runner.outputs(PrecisionPlan("fp16"), [Sample("s", _feed(case))]))
            pinned = list(
                next(
                    runner.outputs(PrecisionPlan("fp16", layers), [Sample("s", _feed(case))])
                ).values()
            )
        except Exception as error:
            problems.append(f"{name}: {str(error)[:100]}")
            continue
        # As written: ONNX Runtime's optimiser drops roundings where the source itself is partly in
        # float16.
        expected = run_model(case.model, _feed(case), ort.GraphOptimizationLevel.ORT_DISABLE_ALL)
        pairs = [(a, b) for a, b in zip(pinned, expected, strict=True) if b.dtype.kind == "f"]
        if not all(np.allclose(a, b, rtol=1e-5, atol=1e-6, equal_nan=True) for a, b in pairs):
            problems.append(f"{name}: pinned differs")
    assert problems == []
