"""Runs a model as it is written; in a module of its own, so that ``tests.fuzz`` needs little."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx
import onnxruntime as ort
from numpy.typing import NDArray


def run(model: onnx.ModelProto, feed: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The outputs of ``model``, executed as written on ONNX Runtime."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options)
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, feed), strict=True))
