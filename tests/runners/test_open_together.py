"""Two threads make the first run of a session: its segments' sessions are opened on the threads
that also round weights, and nobody waits for the other for ever.
"""

from __future__ import annotations

import subprocess
import sys

from tests.models import ROOT

_TWO = """
import threading
import numpy as np
from onnx import helper, numpy_helper
from bisect_trt.base.plan import Precision
from bisect_trt.base.sample import Sample
from bisect_trt.model.graph import Graph
from bisect_trt.runners.constants import ConstantStore
from bisect_trt.runners.switched_session import SwitchedSession

random, side, nodes, weights, last = np.random.default_rng(0), 1024, [], [], "x"
for i in range(24):
    weight = (random.standard_normal((side, side)) / 32).astype(np.float32)
    weights.append(numpy_helper.from_array(weight, f"w{i}"))
    nodes.append(helper.make_node("MatMul", [last, f"w{i}"], [f"h{i}"], f"m{i}"))
    nodes.append(helper.make_node("Relu", [f"h{i}"], [f"r{i}"], f"r{i}"))
    last = f"r{i}"
given, taken = (helper.make_tensor_value_info(n, 1, [1, side]) for n in ("x", last))
graph = helper.make_graph(nodes, "g", [given], [taken], weights)
model = Graph(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
session = SwitchedSession(model, ConstantStore(model), Precision.FP16, Precision.FP32)
reduced = frozenset(layer.name for layer in model.layers)
samples = [Sample(str(i), {"x": np.ones((1, side), np.float32)}) for i in range(2)]
found = [None, None]


def run(i):
    found[i] = session.run(samples[i], reduced)


threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert np.array_equal(*(f[last] for f in found))
"""


def test_two_first_runs_end() -> None:
    """In a process of its own, which is ended where it hangs."""
    done = subprocess.run(
        [sys.executable, "-c", _TWO], cwd=ROOT, timeout=300, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
