"""Runs one peer on one model, in the peers' own environment: ``peer_worker.py TOOL MODEL INPUTS
ATOL RTOL CONVERTED``.

Prints one line of JSON: seconds, sessions made, and why it gave no model, if it gave none. Imports
nothing of bisect-trt.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort


def autocast(model: Path, inputs: Path, _atol: float, _rtol: float) -> onnx.ModelProto:
    """ModelOpt's rules, with its defaults and the inputs as calibration data."""
    from modelopt.onnx.autocast import convert_to_mixed_precision

    return convert_to_mixed_precision(str(model), calibration_data=str(inputs), keep_io_types=True)


def auto_mixed_precision(model: Path, inputs: Path, atol: float, rtol: float) -> onnx.ModelProto:
    """onnxconverter-common's bisection of segments."""
    from onnxconverter_common.auto_mixed_precision import auto_convert_mixed_precision

    with np.load(inputs) as arrays:
        feed = {name: arrays[name] for name in arrays.files}
    return auto_convert_mixed_precision(
        onnx.load(model), feed, rtol=rtol, atol=atol, keep_io_types=True
    )


def slim(model: Path, _inputs: Path, _atol: float, _rtol: float) -> onnx.ModelProto:
    """No peer: the preparation without which the one above stops with an error on these models."""
    import onnxslim

    slimmed = onnxslim.slim(onnx.load(model))
    del slimmed.graph.value_info[:]  # they say FP32 of tensors that the peer retypes
    return slimmed


def main() -> None:
    """Run, save, report."""
    tool, model, inputs, atol, rtol, converted = sys.argv[1:]
    made = 0
    plain = ort.InferenceSession

    class Counted(plain):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **options: Any) -> None:
            nonlocal made
            made += 1
            super().__init__(*args, **options)

    ort.InferenceSession = Counted
    logging.disable(logging.CRITICAL)
    began, failure = time.perf_counter(), ""
    try:
        result = globals()[tool](Path(model), Path(inputs), float(atol), float(rtol))
        seconds = time.perf_counter() - began
        onnx.save(result, converted)
    except Exception as error:
        seconds, failure = (
            time.perf_counter() - began,
            f"{type(error).__name__}: {error}".splitlines()[0][:160],
        )
    print(json.dumps({"seconds": seconds, "sessions": made, "failure": failure}))


if __name__ == "__main__":
    main()
