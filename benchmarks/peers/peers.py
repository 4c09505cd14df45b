"""The peers on the same models, inputs and tolerances, beside the command: pins, evaluations, wall
time, and whether it is true.

Each peer runs in an environment of its own (``.cache/peers``, made by the Makefile from peers.txt),
since it needs other versions. Its converted model becomes a plan, the layers whose outputs it left
in FP32, and that plan is scored as ours is, under explicit rounding. Polygraphy's own command needs
TensorRT 10 and a GPU; its method, a bisection over the length of the network's prefix that stays in
FP32, runs here on our emulator.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from pathlib import Path

import onnx

from benchmarks.common import ROOT, load
from benchmarks.peers.whole_run import Run, runs, true_score
from bisect_trt.core.precision import Precision, PrecisionPlan
from bisect_trt.core.sample import Sample
from bisect_trt.graph import list_layers
from bisect_trt.graph.model.layers import node_names
from bisect_trt.numerics.requirements.requirement_text import parse_requirements
from bisect_trt.runners.emulator.runner import EmulatedRunner

PYTHON = ROOT / ".cache" / "peers" / "bin" / "python"
_WORKER = Path(__file__).parent / "peer_worker.py"
Row = tuple[str, str, str, str, str]


def converted_plan(source: Path, converted: Path) -> PrecisionPlan:
    """The layers of ``source`` that ``converted`` gives in FP32, as pins of an FP16 plan."""
    model = onnx.shape_inference.infer_shapes(onnx.load(converted))
    types = {
        v.name: v.type.tensor_type.elem_type for v in (*model.graph.value_info, *model.graph.output)
    }
    low = set()
    for node, name in zip(model.graph.node, node_names(model.graph.node), strict=True):
        if any(types.get(o) == onnx.TensorProto.FLOAT16 for o in node.output):
            low.add(name)
    return PrecisionPlan(
        Precision.FP16,
        frozenset(layer.name for layer in list_layers(onnx.load(source)) if layer.name not in low),
    )


def _peer(tool: str, model: Path, run: Run, folder: Path) -> tuple[dict[str, float | str], Path]:
    """What the worker said of ``tool`` on ``model``, and the model it made."""
    made = folder / f"{tool}.onnx"
    command = [
        str(PYTHON),
        str(_WORKER),
        tool,
        str(model),
        str(run.inputs),
        str(run.atol),
        str(run.rtol),
        str(made),
    ]
    said = (
        subprocess.run(command, capture_output=True, text=True, check=True)
        .stdout.strip()
        .splitlines()[-1]
    )
    found: dict[str, float | str] = json.loads(said)
    return found, made


def _row(label: str, tool: str, model: Path, run: Run, folder: Path) -> Row:
    found, made = _peer(tool, model, run, folder)
    took = f"{found['seconds']:.1f}"
    if found["failure"]:
        return label, "-", str(found["sessions"]), took, f"no model: {found['failure']}"
    plan = converted_plan(model, made)
    score = true_score(model, run.inputs, plan, run.atol, run.rtol)
    return label, str(len(plan.pinned)), str(found["sessions"]), took, _truth(score)


def _truth(score: float) -> str:
    return f"{'true' if score <= 1.0 else '**fails**'} ({score:.2f} x tolerance)"


def _prefix(run: Run) -> Row:
    """The shortest prefix in FP32 with which the rest passes, as a bisection finds it."""
    began, feed = time.perf_counter(), load(run.inputs)
    model = onnx.load(run.model)
    runner, samples = EmulatedRunner(model), [Sample("input", feed)]
    requirements = parse_requirements([run.requirement], [o.name for o in model.graph.output])
    names = [layer.name for layer in list_layers(model)]
    reference = next(runner.outputs(PrecisionPlan(Precision.FP32), samples))
    low, high, probes = 0, len(names), 0
    while low < high:
        middle = (low + high) // 2
        plan = PrecisionPlan(Precision.FP16, frozenset(names[:middle]))
        outputs = next(runner.outputs(plan, samples))
        probes += 1
        if requirements.score(reference, outputs) <= 1.0:
            high = middle
        else:
            low = middle + 1
    seconds = time.perf_counter() - began
    plan = PrecisionPlan(Precision.FP16, frozenset(names[:high]))
    score = true_score(run.model, run.inputs, plan, run.atol, run.rtol)
    return (
        "prefix bisection (polygraphy's method) on our emulator",
        str(high),
        str(probes),
        f"{seconds:.1f}",
        _truth(score),
    )


def report() -> list[str]:
    """A table for each model and tolerance."""
    lines = [
        "## Beside the peers (pins: layers left in FP32; true: the plan under explicit FP16 "
        "rounding)"
    ]
    for run in runs():
        layers = len(list_layers(onnx.load(run.model)))
        lines += ["", f"### {run.model.stem}, {run.requirement}, {layers} layers", ""]
        lines += [
            "| tool | pins | evaluations | seconds | result |",
            "| --- | --- | --- | --- | --- |",
        ]
        ours = (
            f"{run.probes} and {run.effects} single layers",
            f"{run.seconds:.1f}",
            _truth(run.score),
        )
        rows: list[Row] = [("**bisect-trt run**", str(len(run.plan.pinned)), *ours), _prefix(run)]
        if PYTHON.exists():
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary)
                rows.append(_row("ModelOpt AutoCast 0.47.0", "autocast", run.model, run, folder))
                rows.append(
                    _row(
                        "onnxconverter-common 1.16.0",
                        "auto_mixed_precision",
                        run.model,
                        run,
                        folder,
                    )
                )
                _, slimmed = _peer("slim", run.model, run, folder)
                rows.append(
                    _row(
                        "the same, of a slimmed model without stale types",
                        "auto_mixed_precision",
                        slimmed,
                        run,
                        folder,
                    )
                )
        lines += ["| " + " | ".join(row) + " |" for row in rows]
    if not PYTHON.exists():
        lines += ["", "The peers could not be installed here (`make .cache/peers/.ready`)."]
    return [
        *lines,
        "",
        "`polygraphy debug precision` itself needs TensorRT 10 and a GPU and fails on TensorRT 11: "
        "not run.",
    ]
