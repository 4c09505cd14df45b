"""What FP32 is on engines, with and without NVIDIA_TF32_OVERRIDE=0: ``python -m
benchmarks.engines.strict_fp32``.

It needs a GPU with TensorRT, and the plugin for ONNX Runtime where that is to be in the table.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import onnx

from benchmarks.common import DETECTOR, MODELS, table
from bisect_trt.base.errors import BisectError, one_line
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.model.graph import Graph
from bisect_trt.runners.ort_rtx import OrtRtxRunner
from bisect_trt.runners.reference import Reference
from bisect_trt.runners.tensorrt.runner import TensorRTRunner
from fixtures.models import tf32_victim

VARIABLE = "NVIDIA_TF32_OVERRIDE"
PRECISIONS = ("fp32", "tf32", "fp16")


def rows() -> Iterator[tuple[str, ...]]:
    """A row a model and runner of this process, whose environment decides over TF32."""
    fixture = tf32_victim()
    with np.load(MODELS / "page.npz") as stored:
        page = dict(stored)
    models = [("tf32_victim", fixture.model, fixture.inputs), ("det", onnx.load(DETECTOR), page)]
    for name, model, inputs in models:
        samples = [Sample("given", inputs)]
        graph = Graph(model)
        exact = Reference(graph).outputs(samples[0])
        for kind in (TensorRTRunner, OrtRtxRunner):
            try:
                with closing(kind(graph, samples)) as runner:
                    errors = []
                    for precision in PRECISIONS:
                        found = next(iter(runner.outputs(PrecisionPlan(precision), samples)))
                        apart = max(np.abs(found[n] - a).max() for n, a in exact.items())
                        errors.append(f"{apart:.3g}")
            except BisectError as error:
                errors = [one_line(error)]
            yield name, kind.name, os.environ.get(VARIABLE, "not set"), *errors


def main() -> None:
    """Prints the table; each setting has a process of its own."""
    if sys.argv[1:]:
        print("\n".join("\t".join(row) for row in rows()))
        return
    found = []
    for value in (None, "0"):
        environment = {n: v for n, v in os.environ.items() if n != VARIABLE}
        environment |= {VARIABLE: value} if value is not None else {}
        command = [sys.executable, "-m", "benchmarks.engines.strict_fp32", "rows"]
        ended = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        found += [line.split("\t") for line in ended.stdout.splitlines()]
    print("\n".join(table(("model", "runner", VARIABLE, *PRECISIONS), found)))


if __name__ == "__main__":
    main()
