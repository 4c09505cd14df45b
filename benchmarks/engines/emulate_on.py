"""The emulator on the GPU against the CPU: ``python -m benchmarks.engines.emulate_on [--models
FOLDER] [--limit SECONDS] [PART ...]``.

Parts are ``check`` (strict FP32, roundings), ``fixtures``, ``MODEL`` (time of an evaluation over a
plain inference on both devices, verdicts, layers' effects) and ``run MODEL cuda`` or ``... cpu`` (a
whole run with ``--runner tensorrt``, emulated there), for each MODEL.onnx with its MODEL.npz in
FOLDER (``python -m benchmarks.models.exported FOLDER ViT-L RT-DETR-R101`` writes them); without
names all of them. Each part is a process of its own with a limit; rows are printed as they come,
and a part that fails says why and lets the next begin.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pandas as pd

import bisect_trt
from benchmarks.common import load, machine
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.model.graph import Graph
from bisect_trt.model.load import load_model
from bisect_trt.runners.device import CPU, Device, cuda_device, gpu_facts, load_cuda_libraries
from bisect_trt.runners.device_check import strictness, wrong_roundings
from bisect_trt.runners.emulator import EmulatedRunner
from fixtures.models import ALL, unsavable

REDUCED = (Precision.FP16, Precision.BF16, Precision.TF32)
PLANS, EFFECTS = 12, 32
ROUNDS = 9
_RUN_LIMIT = 120.0
"""What the issue asks of a whole run, in seconds."""


def say(*columns: object) -> None:
    """A row of a table, at once."""
    print("| " + " | ".join(str(c) for c in columns) + " |", flush=True)


def gpu() -> Device:
    """The first GPU."""
    return cuda_device(gpu_facts("0")[0])


def plain_session(path: Path, device: Device) -> ort.InferenceSession:
    """The model as anybody would run it, in strict FP32."""
    load_cuda_libraries()
    options = ort.SessionOptions()
    options.log_severity_level = 3
    return ort.InferenceSession(str(path), options, providers=device.providers)


def median_ms(run: Callable[[], object]) -> float:
    """Of several calls after one that is not counted."""
    run()
    taken = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        run()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken) * 1e3


def errors(exact: Mapping[str, Any], got: Mapping[str, Any]) -> float:
    """The largest error of an output over its range; infinite where it is not finite."""
    found = [0.0]
    for name, array in exact.items():
        if array.dtype.kind == "f":
            size = float(np.ptp(array)) or 1.0
            error = float(np.abs(got[name].astype(np.float64) - array).max()) / size
            found.append(error if np.isfinite(error) else np.inf)
    return max(found)


def check() -> None:
    """What the emulator relies on."""
    device = gpu()
    for precision in REDUCED:
        say(f"roundings to {precision.value} unlike NumPy's", wrong_roundings(device, precision))
    say("strict FP32", strictness(device))
    options = tuple({**dict(device.options), "use_tf32": "1"}.items())
    loose = Device(device.provider, options, device.memory, 0, "TF32")
    say("with TF32 allowed", strictness(loose))


def fixtures() -> None:
    """Plans and verdicts of every fixture, searched on either device."""
    say("fixture", "pins on the CPU", "on the GPU", "the same", "seconds", "seconds")
    for make in ALL:
        if make is unsavable:  # chaotic by design
            continue
        fixture, found = make(), []
        for device in ("cpu", "cuda"):
            with tempfile.TemporaryDirectory() as folder:
                found.append(
                    bisect_trt.bisect(
                        fixture.model,
                        fixture.inputs,
                        precision=fixture.precision,
                        require=fixture.require,
                        runner="emulated",
                        robust=0,
                        emulate_on=device,
                        out=folder,
                    )
                )
        here, there = found
        same = here.pinned == there.pinned and here.cause is there.cause
        times = [f"{r.seconds:.1f}" for r in found]
        say(fixture.name, len(here.pinned), len(there.pinned), same, *times)


def measure(folder: Path, name: str) -> None:
    """One model on both devices."""
    path, inputs = folder / f"{name}.onnx", load(folder / f"{name}.npz")
    graph, sample = Graph(load_model(path).proto), Sample("s", inputs)
    layers = [layer.name for layer in graph.layers]
    random, device = np.random.default_rng(0), gpu()
    say(name, "layers", len(layers))
    began = time.perf_counter()
    runners = {d.name: EmulatedRunner(graph, device=d) for d in (device, CPU)}
    for d in (device, CPU):
        plain = plain_session(path, d)
        runner = runners[d.name]

        def inference(plain: Any = plain) -> object:
            return plain.run(None, inputs)

        def probe(runner: EmulatedRunner = runner) -> object:
            pins = random.choice(layers, int(random.integers(len(layers))), replace=False)
            return list(runner.outputs(PrecisionPlan("fp16", pins.tolist()), [sample]))

        once, evaluated = median_ms(inference), median_ms(probe)
        say(
            name,
            d.name,
            f"plain {once:.1f} ms",
            f"evaluation {evaluated:.1f} ms",
            f"{evaluated / once:.2f}",
        )
        del plain
    there, here = runners[device.name], runners["cpu"]
    exact = next(here.outputs(PrecisionPlan("fp32"), [sample]))
    strict = next(there.outputs(PrecisionPlan("fp32"), [sample]))
    say(name, "FP32 apart", f"{errors(exact, strict):.1e}", f"{time.perf_counter() - began:.0f} s")
    began = time.perf_counter()
    alone = effects_of(there, sample, exact, layers)
    say(name, f"effects of {len(layers)} layers", f"{time.perf_counter() - began:.1f} s")
    # Reduced alone they leave FP16's range: whatever else is pinned, these must be.
    must = [layer for layer, error in alone.items() if not np.isfinite(error)]
    say(name, "not finite alone", len(must), *must[:5])
    pairs = []
    for number in range(PLANS):
        share = number / (PLANS - 1)
        pins = random.choice(layers, int(share * len(layers)), replace=False).tolist()
        plan = PrecisionPlan("fp16", [*pins, *must])
        pairs.append([errors(exact, next(r.outputs(plan, [sample]))) for r in (here, there)])
    say(name, "errors of the plans", " ".join(f"{a:.1e}/{b:.1e}" for a, b in pairs))
    finite = [a for a, _ in pairs if np.isfinite(a)]
    line = float(f"{statistics.median(finite or [1e-2]):.2g}")
    alike = sum((one <= line) is (other <= line) for one, other in pairs)
    say(name, "verdicts alike", f"{alike} of {PLANS} at rel_range<={line:.2g}")
    (folder / f"{name}.requirement").write_text(f"rel_range<={line:.2g}")
    # Of the layers that do something: an effect below FP32's own differences has no rank.
    heard = [n for n, error in alone.items() if errors(exact, strict) * 10 < error < np.inf]
    wanted = [heard[i * len(heard) // EFFECTS] for i in range(EFFECTS)] if heard else []
    began = time.perf_counter()
    here_alone = effects_of(here, sample, exact, list(dict.fromkeys(wanted)))
    first = pd.Series(here_alone).rank()
    second = pd.Series({n: alone[n] for n in here_alone}).rank()
    spent = f"{time.perf_counter() - began:.0f} s on the CPU"
    say(name, "layers' effects", f"Spearman {first.corr(second):.4f} over {len(first)}", spent)


def effects_of(
    runner: EmulatedRunner, sample: Sample, exact: Mapping[str, Any], wanted: Sequence[str]
) -> dict[str, float]:
    """The largest error of an output by the layer that alone is reduced."""
    found = runner.sensitivities(sample, Precision.FP16, wanted)
    return {name: errors(exact, outputs) for name, outputs in found if outputs is not None}


def whole(folder: Path, name: str, device: str) -> None:
    """The command as a user types it."""
    asked = folder / f"{name}.requirement"
    requirement = asked.read_text() if asked.exists() else "rel_range<=1e-2"
    with tempfile.TemporaryDirectory() as out, tempfile.TemporaryFile("w+") as said:
        command = [sys.executable, "-m", "bisect_trt", "run", str(folder / f"{name}.onnx")]
        command += ["--input", str(folder / f"{name}.npz"), "--requirement", requirement]
        command += ["--runner", "tensorrt", "--emulate-on", device, "--out", out, "--verbose"]
        began = time.perf_counter()
        code = bounded(command, _RUN_LIMIT, said)
        said.seek(0)
        lines = [line.strip()[:200] for line in said.read().splitlines() if line.strip()]
        for line in lines[-6:]:
            print(f"    {line}", flush=True)
        took = f"{time.perf_counter() - began:.0f} s"
        say(f"run {name}", device, requirement, "not done" if code is None else code, took)


def bounded(command: list[str], seconds: float, output: Any = None) -> int | None:
    """The exit code of ``command``; None where it took longer, and is interrupted, then killed with
    all that it started.
    """
    child = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    for patience, sent in ((seconds, signal.SIGINT), (10.0, signal.SIGKILL)):
        try:
            code = child.wait(patience)
            return code if sent is signal.SIGINT else None
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, sent)
    child.wait()
    return None


def parts(folder: Path | None) -> dict[str, Callable[[], None]]:
    """Every part by name, in the order that they are worth having."""
    found: dict[str, Callable[[], None]] = {"check": check}
    names = sorted(p.stem for p in folder.glob("*.onnx")) if folder is not None else []
    for name in names:
        found[name] = partial(measure, folder, name)
    for device in ("cuda", "cpu"):
        for name in names:
            found[f"run {name} {device}"] = partial(whole, folder, name, device)
        if device == "cuda":
            found["fixtures"] = fixtures
    return found


def main() -> None:
    """Each part in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*")
    parser.add_argument("--models", type=Path)
    parser.add_argument("--limit", type=float, default=150.0, help="seconds of one part")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    known = parts(asked.models)
    if asked.here:
        for name in asked.parts:
            known[name]()
        return
    print(f"# The emulator on the GPU\n\n{machine()}\n", flush=True)
    for name in asked.parts or known:
        began = time.perf_counter()
        command = [sys.executable, "-m", "benchmarks.engines.emulate_on", "--here", name]
        command += ["--models", str(asked.models)] if asked.models is not None else []
        code = bounded(command, asked.limit)
        ended = {0: "done", None: "stopped at its limit"}.get(code, f"failed, exit code {code}")
        say(name, ended, f"{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    try:
        main()
    except Exception:
        traceback.print_exc(limit=3, file=sys.stdout)
        sys.exit(1)
