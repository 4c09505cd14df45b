"""Our engine as polygraphy's judge: ``polygraphy debug reduce MODEL -o OUT --mode bisect --check
python -m benchmarks.peers.peer_check`` ends with exit code 1 where the piece is wrong or not
reproducible.

Polygraphy writes each piece as polygraphy_debug.onnx and records nothing, so that inner inputs are
seeded noise. The judge is that of ``bisect-trt reduce``, in as many fresh processes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from onnx import helper

from bisect_trt.base.plan import Precision
from bisect_trt.base.sample import Sample
from bisect_trt.model.graph import Graph
from bisect_trt.model.load import load_model
from bisect_trt.reduction.oracle import Budget, EngineTrials, Specimen
from bisect_trt.reduction.reduce import fresh_engines
from bisect_trt.runners.reference import outputs_of
from bisect_trt.settings import Settings

WORKERS = 11


def main() -> None:
    """Judge the piece that polygraphy wrote."""
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "polygraphy_debug.onnx")
    proto = load_model(path).proto
    graph = Graph(proto)
    random = np.random.default_rng(0)
    arrays = {}
    for value in proto.graph.input:
        shape = [d.dim_value or 1 for d in value.type.tensor_type.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        arrays[value.name] = np.asarray(random.standard_normal(shape), dtype)
    expected = outputs_of(proto, arrays, path.name)
    sample = Sample("noise", arrays)
    opens = fresh_engines(Settings(path, [arrays], runner="tensorrt"))
    trials = EngineTrials(opens, Precision.FP32, Precision.TF32, Budget(None), WORKERS)
    seen = trials.look(Specimen(frozenset(graph.names), proto, sample, expected))
    print(f"{len(graph.names)} nodes: {seen.suspect or 'right'}; {seen.wrong} of {seen.runs} wrong")
    sys.exit(1 if seen.suspect is not None else 0)


if __name__ == "__main__":
    main()
