"""Asks TensorRT's parser which layers it makes of a model, which needs no GPU."""

from __future__ import annotations

import onnx

from bisect_trt.base.errors import RunnerFailedError, RunnerUnavailableError, one_line
from bisect_trt.model.save import file_form
from bisect_trt.model.trt_names import Network
from bisect_trt.runners.process import IsolatedWorker
from bisect_trt.runners.tensorrt.records import installed_module
from bisect_trt.runners.tensorrt.runner import BUILD_WORKER

PARSE_TIMEOUT_S = 120.0


def parsed_network(model: onnx.ModelProto, module: str | None = None) -> tuple[Network | None, str]:
    """The network that TensorRT's parser makes of ``model``, and its version or why there is none.

    Args:
        model: the ONNX model.
        module: ``tensorrt`` or ``tensorrt_rtx``; whichever is installed if None.

    Raises:
        BadInputError: ``module`` is no such module.
    """
    found = installed_module(module)
    if found is None:
        return None, "TensorRT is not installed here"
    with IsolatedWorker(BUILD_WORKER, {"module": found}) as worker, file_form(model) as source:
        try:
            version = " ".join(*worker.call("describe").items())
            layers = worker.call("network", source, timeout_s=PARSE_TIMEOUT_S)
        except (RunnerFailedError, RunnerUnavailableError) as error:
            return None, one_line(error, 200)
    return Network(tuple(layers), version), version
