"""Is the promise of memory kept? Seeded models of many bytes through every command.

``python -m benchmarks.sizes.large [NAMES]`` or ``make bench-large``. The promise: at most 3.5 times
the weights, 3 times a plain inference's activations and 300 MB, as the system counts them (the
largest resident set, mapped files included).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from benchmarks.common import ROOT, machine
from bisect_trt.base.limits import free_bytes, in_words

MB = 1 << 20
_ROOM = 1.3
"""So many times the promise must be free, or the case is left out: others use the machine too."""

PLAIN = """
import re, sys
import numpy as np, onnxruntime as ort
def peak():
    with open("/proc/self/status") as file:
        return int(re.search(r"VmHWM:\\s*(\\d+)", file.read())[1]) * 1024
before = peak()
arrays = np.load(sys.argv[2])
arrays = dict(arrays) if sys.argv[2].endswith(".npz") else {"x": arrays}
ort.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"]).run(None, arrays)
print(peak() - before)
"""
"""What a plain inference of a model on a file of inputs takes, printed in bytes. The peak is of the
process' own memory: what ``getrusage`` says begins with that of whoever started it.
"""


@dataclass(frozen=True)
class Large:
    """A case: ``make`` writes model.onnx and x.npy into a folder and gives the bytes of weights."""

    make: Callable[[Path], int]
    requirement: str
    commands: tuple[str, ...]


def of_weights(layers: int, size: int, *, inside: bool = False) -> Callable[[Path], int]:
    """A chain of matrix products, its weights beside the model or inside it.

    Args:
        layers: how many.
        size: of their square matrices.
        inside: whether the weights are in the model's own file.
    """

    def make(folder: Path) -> int:
        random = np.random.default_rng(0)
        nodes, stored, offset, last = [], [], 0, "x"
        with (folder / "model.data").open("wb") as stream:
            for index in range(layers):
                weight = random.standard_normal((size, size), np.float32) / np.float32(size**0.5)
                tensor = TensorProto(name=f"w{index}", data_type=1, dims=weight.shape)
                if inside:
                    tensor.raw_data = weight.tobytes()
                else:
                    _beside(tensor, offset, weight.nbytes)
                    offset += stream.write(weight.tobytes())
                stored.append(tensor)
                made = [f"m{index}", f"t{index}"]
                nodes.append(helper.make_node("MatMul", [last, f"w{index}"], made[:1], made[0]))
                nodes.append(helper.make_node("Tanh", made[:1], made[1:], made[1]))
                last = made[1]
        _save(folder, nodes, stored, last, (8, size))
        np.save(folder / "x.npy", random.standard_normal((8, size), np.float32))
        return layers * size * size * 4

    return make


def of_input(megabytes: int) -> Callable[[Path], int]:
    """Four nodes over one large input."""

    def make(folder: Path) -> int:
        shape = (1, megabytes // 4, 1024, 1024)
        stored = [
            onnx.numpy_helper.from_array(np.full((1, shape[1], 1, 1), value, np.float32), name)
            for name, value in (("scale", 0.37), ("shift", 0.11))
        ]
        nodes = [
            helper.make_node("Mul", ["x", "scale"], ["m"], "mul"),
            helper.make_node("Add", ["m", "shift"], ["a"], "add"),
            helper.make_node("Tanh", ["a"], ["t"], "tanh"),
            helper.make_node("Mul", ["t", "x"], ["y"], "gate"),
        ]
        _save(folder, nodes, stored, "y", shape)
        random = np.random.default_rng(0)
        stream = np.lib.format.open_memmap(folder / "x.npy", "w+", np.float32, shape)
        for channel in range(shape[1]):
            steps = random.standard_normal((1024, 1024), np.float32) * np.float32(0.05)
            stream[0, channel] = np.cumsum(steps, axis=-1, dtype=np.float32)
        del stream
        return sum(len(t.raw_data) for t in stored)

    return make


ALL = ("inspect", "compare", "run", "verify", "export", "reduce")
CASES = {
    "weights-0.3GB": Large(of_weights(20, 2048), "max_abs<=1e-3", ALL),
    "inside-0.3GB": Large(of_weights(20, 2048, inside=True), "max_abs<=1e-3", ALL),
    "input-0.13GB": Large(of_input(128), "max_abs<=4e-3", ("compare", "run")),
    "weights-2.8GB": Large(of_weights(42, 4096), "max_abs<=1e-3", ALL),
    "input-1GB": Large(of_input(1024), "max_abs<=4e-3", ("compare", "run")),
}


def _beside(tensor: TensorProto, offset: int, length: int) -> None:
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "model.data"), ("offset", offset), ("length", length)):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, str(value)


def _save(
    folder: Path,
    nodes: list[onnx.NodeProto],
    stored: list[TensorProto],
    output: str,
    shape: tuple[int, ...],
) -> None:
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n in ("x", output)]
    graph = helper.make_graph(nodes, "large", values[:1], values[1:], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (folder / "model.onnx").write_bytes(model.SerializeToString())


def measured(arguments: list[str], folder: Path) -> tuple[int, float, int, str]:
    """(exit code, seconds, peak in bytes, standard output) of a process of this Python."""
    began = time.perf_counter()
    root = str(ROOT)
    with (folder / "stdout").open("w+") as out, (folder / "stderr").open("w") as err:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder,
            stdout=out,
            stderr=err,
            env={**os.environ, "PYTHONPATH": root},
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        said = out.read()
    peak = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return process.returncode, time.perf_counter() - began, peak, said


def _arguments(requirement: str) -> Mapping[str, list[str]]:
    tool, given = ["-m", "bisect_trt"], ["--input", "x.npy"]
    asked = ["--requirement", requirement]
    plan = ["--plan", "run/plan.json"]
    always_bad = ["--check", "sh -c 'test ! -f {model}'", "--quiet"]
    return {
        "inspect": [*tool, "inspect", "model.onnx"],
        "compare": [*tool, "compare", "model.onnx", *given, *asked, "--out", "compared"],
        "run": [*tool, "run", "model.onnx", *given, *asked, "--quiet", "--out", "run"],
        "verify": [*tool, "verify", "model.onnx", *given, *plan, "--quiet", "--out", "verified"],
        "export": [*tool, "export", "model.onnx", *plan, "--format", "onnx", "-o", "typed.onnx"],
        "reduce": [*tool, "reduce", "model.onnx", *given, *always_bad, "--out", "reduced"],
    }


def make(name: str, folder: Path) -> int:
    """Write the model and input of the case ``name``; the bytes of its weights."""
    return CASES[name].make(folder)


def rows_of(name: str) -> Iterator[str]:
    """A row for each command of the case ``name``, as it comes."""
    problem = CASES[name]
    with tempfile.TemporaryDirectory(prefix="bisect-trt-large-") as made:
        folder = Path(made)
        # In a process of its own: a child's peak begins with that of whoever started it.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            weights = pool.submit(make, name, folder).result()
        plain = measured(["-c", PLAIN, "model.onnx", "x.npy"], folder)
        activations = max(0, int(plain[3]) - weights)
        promise = 3.5 * weights + 3 * activations + 300e6
        free = free_bytes()
        if free is not None and free < _ROOM * promise:
            yield f"| {name} | left out: {in_words(free)} free | | | |"
            return
        arguments = _arguments(problem.requirement)
        for command in problem.commands:
            code, seconds, peak, _ = measured(arguments[command], folder)
            kept = "yes" if peak <= promise else "no"
            ended = "" if code in (0, 1) else f" (exit code {code})"
            yield (
                f"| {name} | {command}{ended} | {seconds:.0f} | {peak / MB:,.0f} | "
                f"{promise / MB:,.0f} | {kept} |"
            )


def main() -> None:
    """Print the cases named, or all; ``benchmarks/results/scale.md`` keeps the newest table."""
    named = sys.argv[1:]
    unknown = [name for name in named if name not in CASES]
    if unknown:
        sys.exit(f"{unknown[0]}: no such case; there are {', '.join(CASES)}")
    head = [
        f"# Models of many bytes\n\n`make bench-large`, {machine()}\n",
        "The promise: 3.5 times the weights, 3 times a plain inference's activations, 300 MB.\n",
        "| case | command | seconds | peak MB | promise MB | kept |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    print("\n".join(head), flush=True)
    for name in named or CASES:
        for row in rows_of(name):
            print(row, flush=True)


if __name__ == "__main__":
    main()
