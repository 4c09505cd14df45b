"""The peers on the same models, inputs and tolerances, beside the command: pins, evaluations, wall
time, and whether it is true.

Each peer runs in an environment of its own (``.cache/peers``, made by the Makefile from
requirements-peers.txt), since it needs other versions. Its converted model becomes a plan, the
layers whose outputs it left in FP32, and that plan is scored as ours is, under explicit rounding.
Polygraphy's own command needs TensorRT 10 and a GPU; its method, a bisection over the length of the
network's prefix that stays in FP32, runs here on our emulator.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import onnx

from benchmarks.common import ROOT, load
from benchmarks.peers.whole_run import Problem, Run, cases, ran, true_score
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.graph import list_layers
from bisect_trt.metrics.parser import parse_requirements
from bisect_trt.model.layers import node_names
from bisect_trt.runners.emulator import EmulatedRunner

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


def _peer(
    tool: str, model: Path, problem: Problem, folder: Path
) -> tuple[dict[str, float | str], Path]:
    """What the worker said of ``tool`` on ``model``, and the model it made."""
    made = folder / f"{tool}.onnx"
    command = [
        str(PYTHON),
        str(_WORKER),
        tool,
        str(model),
        str(problem.inputs),
        str(problem.atol),
        str(problem.rtol),
        str(made),
    ]
    said = (
        subprocess.run(command, capture_output=True, text=True, check=True)
        .stdout.strip()
        .splitlines()[-1]
    )
    found: dict[str, float | str] = json.loads(said)
    return found, made


def _row(label: str, tool: str, model: Path, problem: Problem, folder: Path) -> Row:
    found, made = _peer(tool, model, problem, folder)
    took = f"{found['seconds']:.1f}"
    if found["failure"]:
        return label, "-", str(found["sessions"]), took, f"no model: {found['failure']}"
    plan = converted_plan(model, made)
    score = true_score(replace(problem, model=model), plan)
    return label, str(len(plan.pinned)), str(found["sessions"]), took, _truth(score)


def _truth(score: float) -> str:
    return f"{'true' if score <= 1.0 else '**fails**'} ({score:.2f} x tolerance)"


def _prefix(problem: Problem) -> Row:
    """The shortest prefix in FP32 with which the rest passes, as a bisection finds it."""
    began, feed = time.perf_counter(), load(problem.inputs)
    model = onnx.load(problem.model)
    runner, samples = EmulatedRunner(model), [Sample("input", feed)]
    requirements = parse_requirements([problem.requirement], [o.name for o in model.graph.output])
    names = [layer.name for layer in list_layers(model)]
    reference = next(runner.outputs(PrecisionPlan(Precision.FP32), samples))
    low, high, evaluations = 0, len(names), 0
    while low < high:
        middle = (low + high) // 2
        plan = PrecisionPlan(Precision.FP16, frozenset(names[:middle]))
        outputs = next(runner.outputs(plan, samples))
        evaluations += 1
        if requirements.score(reference, outputs) <= 1.0:
            high = middle
        else:
            low = middle + 1
    seconds = time.perf_counter() - began
    plan = PrecisionPlan(Precision.FP16, frozenset(names[:high]))
    score = true_score(problem, plan)
    return (
        "prefix bisection (polygraphy's method) on our emulator",
        str(high),
        str(evaluations),
        f"{seconds:.1f}",
        _truth(score),
    )


def _ours(label: str, run: Run) -> Row:
    counted = f"{run.evaluations} and {run.sensitivities} single layers"
    return label, str(len(run.plan.pinned)), counted, f"{run.seconds:.1f}", _truth(run.score)


def _peers(problem: Problem, folder: Path) -> list[Row]:
    converter = "auto_mixed_precision"
    _, slimmed = _peer("slim", problem.model, problem, folder)
    slim = "the same, of a slimmed model without stale types"
    return [
        _row("ModelOpt AutoCast 0.47.0", "autocast", problem.model, problem, folder),
        _row("onnxconverter-common 1.16.0", converter, problem.model, problem, folder),
        _row(slim, converter, slimmed, problem, folder),
    ]


def report() -> list[str]:
    """A table for each model and tolerance."""
    lines = [
        "## Beside the peers (in FP32: layers; true: the plan passes under explicit FP16 rounding)"
    ]
    for problem in cases():
        layers = len(list_layers(onnx.load(problem.model)))
        lines += ["", f"### {problem.model.stem}, {problem.requirement}, {layers} layers", ""]
        lines += [
            "| tool | in FP32 | evaluations | seconds | result |",
            "| --- | --- | --- | --- | --- |",
        ]
        rows = [
            _ours("**bisect-trt run**", ran(problem)),
            _ours("`--robust 0`: fitted to the one input", ran(problem, "--robust", "0")),
            _prefix(problem),
        ]
        if PYTHON.exists():
            with tempfile.TemporaryDirectory() as temporary:
                rows += _peers(problem, Path(temporary))
        lines += ["| " + " | ".join(row) + " |" for row in rows]
    if not PYTHON.exists():
        lines += ["", "The peers could not be installed here (`make .cache/peers/.ready`)."]
    return [
        *lines,
        "",
        "`polygraphy debug precision` itself needs TensorRT 10 and a GPU and fails on TensorRT 11: "
        "not run.",
    ]
