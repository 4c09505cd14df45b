"""Makes the mixed models beside it of a fixture, by the tools themselves: ``make.py MODEL INPUTS``.

It needs an environment of its own with ``nvidia-modelopt[onnx]==0.47.0`` and
``onnxconverter-common==1.16.0``, and imports nothing of bisect-trt.
"""

from __future__ import annotations

import sys
from pathlib import Path

import onnx

HERE = Path(__file__).parent


def main() -> None:
    """Write one model for each tool and way."""
    from modelopt.onnx.autocast import convert_to_mixed_precision
    from onnxconverter_common.float16 import DEFAULT_OP_BLOCK_LIST, convert_float_to_float16

    model, inputs = sys.argv[1:]
    for keeps in (True, False):
        ends = "" if keeps else "_io"
        made = convert_to_mixed_precision(model, calibration_data=inputs, keep_io_types=keeps)
        onnx.save(made, HERE / f"autocast{ends}.onnx")
        blocked = [*DEFAULT_OP_BLOCK_LIST, "Clip"]
        made = convert_float_to_float16(
            onnx.load(model), keep_io_types=keeps, op_block_list=blocked
        )
        onnx.save(made, HERE / f"float16{ends}.onnx")


if __name__ == "__main__":
    main()
