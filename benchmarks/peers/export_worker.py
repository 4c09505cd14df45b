"""Converts one model with one tool and the list that `export` wrote, in the peers' environment:
``export_worker.py TOOL MODEL LIST CONVERTED``.

Prints the tool's version. Imports nothing of bisect-trt.
"""

from __future__ import annotations

import json
import logging
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx


def autocast(model: str, **arguments: Any) -> onnx.ModelProto:
    """ModelOpt's AutoCast."""
    from modelopt.onnx.autocast import convert_to_mixed_precision

    return convert_to_mixed_precision(model, **arguments)


def transformers(model: str, **arguments: Any) -> onnx.ModelProto:
    """The converter of ONNX Runtime's transformers."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    return convert_float_to_float16(onnx.load(model), **arguments)


def common(model: str, **arguments: Any) -> onnx.ModelProto:
    """onnxconverter-common's converter."""
    from onnxconverter_common.float16 import convert_float_to_float16

    return convert_float_to_float16(onnx.load(model), **arguments)


PACKAGE = {
    "autocast": "nvidia-modelopt",
    "transformers": "onnxruntime",
    "common": "onnxconverter-common",
}


def main() -> None:
    """Convert, save, say the version."""
    tool, model, arguments, converted = sys.argv[1:]
    logging.disable(logging.CRITICAL)
    made = globals()[tool](model, **json.loads(Path(arguments).read_text()))
    onnx.save(made, converted)
    print(version(PACKAGE[tool]))


if __name__ == "__main__":
    main()
