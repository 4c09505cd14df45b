"""Models of many nodes and of real sizes: whole runs, and what an evaluation costs that starts
late.

``python -m benchmarks.sizes.many_nodes [NAMES]`` makes them by seeded code and prints a table of
each; without names all of them (half an hour). ``evaluations`` as the first word leaves out the
whole runs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import onnx

from benchmarks.common import machine
from benchmarks.models.large_models import MAKERS
from benchmarks.models.model_builder import Inputs
from benchmarks.sizes.large import PLAIN
from bisect_trt.base.plan import Precision
from bisect_trt.base.sample import Sample
from bisect_trt.model.graph import Graph
from bisect_trt.model.save import weights_size
from bisect_trt.runners.constants import ConstantStore
from bisect_trt.runners.switched_session import SwitchedSession

LIMITS = {"chain of 20,000": 90, "wide, 20,000": 90, "chain of 60,000": 300}
LIMITS |= {"no order, 20,000": 90, "tangled, 20,000": 90}
LIMITS |= {"no order, 60,000": 300, "tangled, 60,000": 300}
LIMITS |= {"ViT-S": 40, "RT-DETR R101": 120}
HALVES = {"10,000": "5,000", "20,000": "10,000"}
_RUN = (
    "import json, resource, subprocess, sys, time\n"
    "began = time.perf_counter()\n"
    "code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode\n"
    "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
    "print(json.dumps([code, time.perf_counter() - began, used.ru_utime + used.ru_stime, "
    "used.ru_maxrss * 1024 / 1e6]))"
)
_APART = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"
"""A process that is begun by a large one counts that one's peak as its own."""
_PLANS, _ALONE = 6, 100

Answer = TypeVar("Answer")


def whole_run(model: Path, inputs: Path, out: Path) -> tuple[int, float, float, float]:
    """``bisect-trt run`` with its default options: exit code, seconds, the processor's seconds,
    peak MB.

    Args:
        model: its file.
        inputs: one input.
        out: the run's folder.
    """
    command = [sys.executable, "-m", "bisect_trt", "run", str(model), "--input", str(inputs)]
    command += ["--runner", "emulated", "--quiet", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-c", _RUN, *command], capture_output=True, text=True, check=True
    )
    code, seconds, processor, peak = json.loads(done.stdout)
    return int(code), float(seconds), float(processor), float(peak)


def promised(model: Path, inputs: Path, weights: int) -> float:
    """What a run may take at most, in bytes, by what a plain inference takes.

    Args:
        model: its file.
        inputs: one input.
        weights: bytes.
    """
    command = [sys.executable, "-c", _APART, sys.executable, "-c", PLAIN, str(model), str(inputs)]
    plain = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return 2.5 * weights + 3 * max(0, plain - weights) + 300e6


def runs(names: list[str]) -> Iterator[str]:
    """The first table, row by row."""
    yield (
        "| model | nodes | MB | exit code, cause, pins | s (limit) | over half as many nodes | "
        "processor's s | peak MB (promise) |"
    )
    yield "| --- " * 8 + "|"
    taken: dict[str, float] = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            model, inputs, out = (Path(folder) / n for n in ("m.onnx", "x.npz", "out"))
            made, arrays = MAKERS[name]()
            onnx.save_model(made, str(model))
            np.savez(inputs, **arrays)  # type: ignore[arg-type]
            nodes, size, weights = len(made.graph.node), made.ByteSize() / 1e6, weights_size(made)
            del made, arrays
            promise = promised(model, inputs, weights) / 1e6
            code, seconds, processor, peak = whole_run(model, inputs, out)
            said = json.loads((out / "run.json").read_text(encoding="utf-8"))
        taken[name] = seconds
        half = next((name.replace(n, h) for n, h in HALVES.items() if name.endswith(n)), "")
        ratio = f"{seconds / taken[half]:.2f}" if half in taken else ""
        limit = f" ({LIMITS[name]})" if name in LIMITS else ""
        answer = f"{code}, {said['cause']}, {len(said['pinned'])}"
        yield (
            f"| {name} | {nodes:,} | {size:.0f} | {answer} | {seconds:.0f}{limit} | {ratio} | "
            f"{processor:.0f} | {peak:,.0f} ({promise:,.0f}) |"
        )


def evaluations(names: list[str]) -> Iterator[str]:
    """The second table, row by row: plans with a late pin changed, and layers alone, by segments
    and by one session from the start.
    """
    yield (
        "| model | evaluation from the start, ms | with one of the last tenth of the pins "
        "changed | a "
        "layer alone, from the start | by segments | same bits |"
    )
    yield "| --- " * 6 + "|"
    for name in names:
        made, arrays = MAKERS[name]()
        yield _probes(name, Graph(made), arrays)


def _probes(name: str, graph: Graph, arrays: Inputs) -> str:
    constants, sample = ConstantStore(graph), Sample("x", arrays)
    pair = (Precision.FP16, Precision.FP32)
    late = SwitchedSession(graph, constants, *pair, 0)
    plain = SwitchedSession(graph, constants, *pair, 0, segments=1)
    layers = [layer.name for layer in graph.layers_at(Precision.FP16)]
    pinned = frozenset(layers[::2])
    last = sorted(pinned.intersection(layers[-len(layers) // 10 :]))[:_PLANS]
    reduced = [frozenset(layers).difference(pinned - {pin}) for pin in last]
    for session in (late, plain):
        session.run(sample, frozenset(layers) - pinned)
    starts, expected = _timed(lambda: [plain.run(sample, these) for these in reduced])
    ends, found = _timed(lambda: [late.run(sample, these) for these in reduced])
    alone = layers[:: max(1, len(layers) // _ALONE)]
    ones, singles = _timed(lambda: [plain.run(sample, frozenset({n})) for n in alone])
    dict(late.sensitivities(sample, alone))  # makes the sessions
    parts, by_segments = _timed(lambda: dict(late.sensitivities(sample, alone)))
    same = all(_same(a, b) for a, b in zip(expected, found, strict=True))
    same &= all(_same(a, by_segments[n] or {}) for n, a in zip(alone, singles, strict=True))
    times = [starts / len(last), ends / len(last), ones / len(alone), parts / len(alone)]
    cells = " | ".join(f"{1e3 * seconds:.1f}" for seconds in times)
    return f"| {name} | {cells} | {'yes' if same else '**NO**'} |"


def _timed(work: Callable[[], Answer]) -> tuple[float, Answer]:
    began = time.perf_counter()
    answer = work()
    return time.perf_counter() - began, answer


def _same(one: Inputs, other: Inputs) -> bool:
    return {n: a.tobytes() for n, a in one.items()} == {n: a.tobytes() for n, a in other.items()}


def main() -> None:
    """Print the tables as they come."""
    names = sys.argv[1:]
    only_probes = names[:1] == ["evaluations"]
    names = names[1:] if only_probes else names
    names = names or list(MAKERS)
    print(f"# Many nodes\n\n`python -m benchmarks.sizes.many_nodes`, {machine()}\n")
    for table in (evaluations,) if only_probes else (runs, evaluations):
        for line in table(names):
            print(line, flush=True)
        print()


if __name__ == "__main__":
    main()
