"""Do plans hold on inputs that nothing has seen? Each model searched with 1, 8, 64 and 200 inputs.

``python -m benchmarks.unseen.plans [--cases "det;rec"] [--counts 1,8] [--ways
validated,fitted,weights,old,prefix] [--jobs N]`` prints a row for each as soon as it is there;
``weights`` runs ``--weights fit`` and judges the row of fitted weights where there is one, ``old``
runs ``--old CHECKOUT``, ``prefix`` is ``benchmarks.unseen.ranking_prefix``, ``prefix 60`` its first
60 layers. With ``--repeats 20`` each search is made so often with other inputs, and it is counted
how often a plan called validated holds on fewer inputs than it was said to. Every plan is judged on
200 inputs and 48 perturbed copies that no search saw, by both emulators. Whoever ends it keeps the
rows that are printed, and no process goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from benchmarks.common import ROOT, machine
from benchmarks.models.plan_cases import CASES, PlanCase
from bisect_trt.base.atomic_files import FITTED_MODEL, REPAIRED_MODEL
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.inputs.perturbations import perturbed
from bisect_trt.metrics.parser import load_metrics, parse_requirements
from bisect_trt.model.graph import Graph
from bisect_trt.model.load import load_model
from bisect_trt.runners.emulator import EmulatedRunner
from bisect_trt.runners.reference import Reference
from bisect_trt.runners.second_emulator import WholeModelRunner

UNSEEN, UNSEEN_FROM, REDRAWS = 200, 100_000, 48
WAYS = ("validated", "fitted", "weights", "old", "prefix")


@dataclass(frozen=True)
class Job:
    """One search: ``way`` is one of :data:`WAYS`, or ``prefix N``; inputs are those numbered from
    ``first`` on.
    """

    problem: str
    count: int
    way: str
    first: int
    old: str = ""


@dataclass(frozen=True)
class Outcome:
    """What a search ended with, and what its plan holds on that it never saw."""

    job: Job
    pins: int
    word: str
    bound: float
    inferences: int
    seconds: float
    megabytes: float
    unseen: float
    worst: float
    perturbed: float


def search(job: Job) -> Outcome:
    """Run the command in a process of its own, then judge its plan."""
    problem = CASES[job.problem]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "inputs").mkdir()
        for number in range(job.first, job.first + job.count):
            np.savez(folder / "inputs" / f"{number:06d}.npz", **problem.make(number))
        model = problem.model(folder)
        arguments = _arguments(job, problem, model, folder)
        # The checkout that is run comes first; metrics and installed packages may be elsewhere.
        root = Path(job.old) if job.way == "old" else ROOT
        paths = [str(root), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        began = time.perf_counter()
        child = subprocess.Popen(
            [sys.executable, "-m", *arguments], cwd=root, env=environment, stdout=sys.stderr
        )
        _, status, used = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - began
        code = os.waitstatus_to_exitcode(status)
        if code not in (0, 1):  # met or not: what was interrupted says nothing
            raise SystemExit(f"{job}: the search ended with {code}")
        said = json.loads((folder / "out" / "run.json").read_text())
        row = _row(job, said)
        pinned = said["pinned"] if row is None else row["pinned"]
        plan = PrecisionPlan(Precision.FP16).with_pins(frozenset(pinned))
        unseen, perturbs = judge(problem, model, plan, job, _planned(row, folder / "out"))
        return Outcome(
            job,
            len(pinned),
            str(said.get("verdict")) if row is None or row["recommended"] else row["passes"],
            float(said.get("validation", {}).get("perturbed", {}).get("lower_bound") or np.nan),
            sum(said["evaluations"].values()) + said["sensitivity_runs"],
            seconds,
            used.ru_maxrss / 1024.0,
            float(np.mean([s <= 1.0 for s in unseen])),
            max(unseen),
            float(np.mean([s <= 1.0 for s in perturbs])),
        )


def _arguments(job: Job, problem: PlanCase, model: Path, folder: Path) -> list[str]:
    """The module that searches, and its arguments."""
    inputs, out = str(folder / "inputs"), f"{folder}/out"
    if job.way.startswith("prefix"):
        found = [
            "benchmarks.unseen.ranking_prefix",
            str(model),
            inputs,
            out,
            problem.require,
            *problem.metrics,
        ]
        pins = job.way.removeprefix("prefix").strip()
        return [*found, "--pins", pins] if pins else found
    found = ["bisect_trt", "run", str(model), "--input", inputs, "--out", out]
    found += ["--requirement", problem.require, "--quiet", "--runner", "emulated"]
    found += [part for metric in problem.metrics for part in ("--metric", metric)]
    if job.way == "weights":
        return [*found, "--weights", "fit"]
    return [*found, "--robust", "0"] if job.way == "fitted" else found


def _row(job: Job, said: dict[str, Any]) -> dict[str, Any] | None:
    """The judged row of the choices; None for those of version 0.4.0, which has no choices."""
    choices: list[dict[str, Any]] = said.get("choices", [])
    fitted = [c for c in choices if job.way == "weights" and c["weights"] == "fit"]
    return next(iter([*fitted, *(c for c in choices if c["recommended"])]), None)


def _planned(row: dict[str, Any] | None, out: Path) -> Path | None:
    """The model that a row's plan is for; None where it is the original."""
    if row is not None and row["weights"] == "fit":
        return out / FITTED_MODEL
    return out / REPAIRED_MODEL if row is not None and row["graph"] == "repaired" else None


def judge(
    problem: PlanCase, model: Path, plan: PrecisionPlan, job: Job, planned: Path | None = None
) -> tuple[list[float], list[float]]:
    """The worse emulator's scores on unseen inputs, and on perturbed copies of the given ones.

    ``planned`` is the model that the plan is for, if it is not ``model``.
    """
    original = Graph(load_model(model).proto)
    graph = original if planned is None else Graph(load_model(planned).proto)
    reference = Reference(original, str(model))
    requirements = parse_requirements(
        [problem.require], graph.outputs, *load_metrics(list(problem.metrics))
    )
    runners = (EmulatedRunner(graph), WholeModelRunner(graph))

    def scores(samples: Iterator[Sample]) -> list[float]:
        found = []
        for sample in samples:
            exact = reference.outputs(sample)
            outputs = (next(iter(runner.outputs(plan, [sample]))) for runner in runners)
            found.append(max(requirements.score(exact, o) for o in outputs))
        return found

    random = np.random.default_rng(99)
    unseen = (Sample(str(n), problem.make(UNSEEN_FROM + n)) for n in range(UNSEEN))
    copies = (
        Sample(str(n), perturbed(problem.make(job.first + n % job.count), random))
        for n in range(REDRAWS)
    )
    return scores(unseen), scores(copies)


def rows(jobs: list[Job], at_once: int) -> Generator[Outcome, None, None]:
    """The outcomes as they come; each job in a process of its own, on cores of its own.

    A job that fails is told on standard error. Whatever ends this ends the processes too, and
    removes what they wrote.
    """
    children: list[subprocess.Popen[str]] = []
    share = max(1, (os.cpu_count() or 1) // at_once)
    places = SimpleQueue[int]()
    for place in range(at_once):
        places.put(place)

    def run(job: Job) -> Outcome | None:
        place = places.get()
        cores = f"{place * share}-{(place + 1) * share - 1}"
        pinned = ["taskset", "-c", cores] if at_once > 1 else []
        child = subprocess.Popen(
            [
                *pinned,
                sys.executable,
                "-m",
                "benchmarks.unseen.plans",
                "--job",
                json.dumps(asdict(job)),
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "TMPDIR": scratch},
        )
        children.append(child)
        said = child.communicate()[0]
        places.put(place)
        if child.returncode:
            print(f"{job}: ended with {child.returncode}", file=sys.stderr, flush=True)
            return None
        return Outcome(**{**json.loads(said.splitlines()[-1]), "job": job})

    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(at_once) as pool:
        try:
            for future in as_completed([pool.submit(run, job) for job in jobs]):
                outcome = future.result()
                if outcome is not None:
                    yield outcome
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in children:
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)


def table(outcomes: Iterator[Outcome]) -> Iterator[str]:
    """The head, then a row an outcome."""
    yield (
        "| model | inputs | way | pins | word | perturbed, at least | inferences | seconds | MB "
        "| holds on 200 unseen | worst | on 48 perturbed |"
    )
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for o in outcomes:
        yield (
            f"| {o.job.problem} | {o.job.count} | {o.job.way} | {o.pins} | {o.word} | "
            f"{o.bound:.3f} "
            f"| {o.inferences} | {o.seconds:.0f} | {o.megabytes:.0f} | {100 * o.unseen:.1f} % "
            f"| {o.worst:.2f} | {100 * o.perturbed:.1f} % |"
        )


def main() -> None:
    """Print the table, or one outcome for the process that asked for it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--old", default="")
    parser.add_argument("--cases", default="det;rec;rec, same text;NAFNet;UniMatch;encoder")
    parser.add_argument("--counts", default="1,8,64,200")
    parser.add_argument("--ways", default="validated")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first input")
    parser.add_argument("--job")
    asked = parser.parse_args()
    if asked.job:
        outcome = search(Job(**json.loads(asked.job)))
        print(json.dumps(asdict(outcome)))
        return
    names = [name for name in CASES if name in asked.cases.split(";")]
    one = Job("", 8, "validated", 0, asked.old)
    jobs = [
        replace(
            one, problem=name, count=int(count), way=way, first=asked.first + int(count) * repeat
        )
        for name in names
        for count in asked.counts.split(",")
        for way in asked.ways.split(",")
        for repeat in range(asked.repeats or 1)
    ]
    print(f"`python -m benchmarks.unseen.plans {shlex.join(sys.argv[1:])}`, {machine()}\n")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    outcomes: list[Outcome] = []
    found = rows(jobs, asked.jobs)
    try:
        for line in table(_kept(found, outcomes)):
            print(line, flush=True)
    finally:
        found.close()  # wherever it stands: its processes end with it
        if asked.repeats:
            _print_calibration(names, outcomes)


def _print_calibration(names: list[str], outcomes: list[Outcome]) -> None:
    for name in names:
        done = [o for o in outcomes if o.job.problem == name]
        claimed = [o for o in done if o.word == "validated"]
        kept = sum(o.unseen >= 0.95 for o in claimed)
        redrawn_kept = sum(o.perturbed >= 0.95 for o in claimed)
        print(
            f"\n{name}: called validated {len(claimed)} of {len(done)}; of these {kept} hold "
            f"on 95 % of the unseen inputs, {redrawn_kept} on 95 % of fresh perturbed copies",
            flush=True,
        )


def _kept(outcomes: Iterator[Outcome], into: list[Outcome]) -> Iterator[Outcome]:
    for outcome in outcomes:
        into.append(outcome)
        yield outcome


if __name__ == "__main__":
    main()
