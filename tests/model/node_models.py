"""ONNX's own backend models of single operators, read once for all tests of a process."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from onnx import TensorProto, numpy_helper
from onnx.backend.test.loader import load_model_tests


@cache
def cases() -> dict[str, Any]:
    """All of them by name. Making them takes seconds: none but the tests that need them ask."""
    return {problem.name: problem for problem in load_model_tests(kind="node")}


def feed_of(problem: Any) -> dict[str, Any]:
    """A fresh copy of its inputs: some kernels (BatchNormalization in training mode) write into
    theirs.
    """
    values = zip(problem.model.graph.input, problem.data_sets[0][0], strict=False)
    arrays = {
        i.name: numpy_helper.to_array(v) if isinstance(v, TensorProto) else v for i, v in values
    }
    return {
        n: np.array(a, copy=True) if isinstance(a, np.ndarray) else a for n, a in arrays.items()
    }
