"""Whether a model of 20,000 small nodes runs to an answer within 2 GB.

``python -m benchmarks.sizes.many_nodes [NODES]`` makes it by seeded code and prints what a whole
run takes; the exit code is 1 where it fails or takes more.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx

from benchmarks.models.model_builder import Builder, Made

NODES = 20_000
LIMIT_BYTES = 2_000_000_000
_RUN = """
import json, resource, subprocess, sys, time
began = time.perf_counter()
code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
print(json.dumps([code, time.perf_counter() - began, peak]))
"""


def chain(nodes: int) -> Made:
    """``nodes`` Add and Mul in turn, every constant its own, so that nothing cancels: the rounding
    errors accumulate.
    """
    random = np.random.default_rng(0)
    to = Builder(random)
    inputs = {"x": random.standard_normal((1, 64)).astype(np.float32)}
    last = "x"
    for number in range(nodes):
        to.scope = f"/block{number // 10}"
        if number % 2:
            factor = (1.0 + 0.02 * random.standard_normal(64)).astype(np.float32)
            last = to.add("Mul", last, to.constant(factor))
        else:
            last = to.add("Add", last, to.normal(64, deviation=0.02))
    return to.model(inputs, [last]), inputs


def main() -> int:
    """Make the model, run it, and say what that took."""
    nodes = int(sys.argv[1]) if len(sys.argv) > 1 else NODES
    with tempfile.TemporaryDirectory() as folder:
        path, inputs, out = (Path(folder) / name for name in ("m.onnx", "x.npz", "out"))
        model, arrays = chain(nodes)
        onnx.save_model(model, str(path))
        np.savez(inputs, **arrays)  # type: ignore[arg-type]
        command = [sys.executable, "-m", "bisect_trt", "run", str(path), "--input", str(inputs)]
        command += ["--runner", "emulated", "--quiet", "--out", str(out)]
        done = subprocess.run(
            [sys.executable, "-c", _RUN, *command], stdout=subprocess.PIPE, text=True, check=True
        )
        code, seconds, peak = json.loads(done.stdout)
        said = json.loads((out / "run.json").read_text(encoding="utf-8")) if code == 0 else {}
    answer = f"{said.get('cause')}, {len(said.get('pinned', ()))} pins"
    print(f"{nodes:,} nodes: exit code {code}, {answer}, {seconds:.0f} s, {peak / 1e6:,.0f} MB")
    return int(code != 0 or peak > LIMIT_BYTES)


if __name__ == "__main__":
    sys.exit(main())
