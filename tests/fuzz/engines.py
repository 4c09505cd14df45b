"""Random networks on engines: ``make gpu-fuzz``, on a machine with a GPU.

Each network is built at FP16, at FP32 and as a plan that keeps half of its layers in FP32. Where
outputs are not finite must be what the emulator says. By chance an engine's score exceeds the
largest of 20 perturbed emulated ones in at most 1 of 21 cases. What is kept in FP32 is emulated in
TF32, as which TensorRT for RTX computes it (benchmarks/results/reproducibility.md). Of one network
in four, three processes load each saved engine and compile its kernels. A crash or a hang costs one
engine. A second run with the same --out goes on with the networks that are missing.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import cached_property
from multiprocessing import get_context
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from bisect_trt.base.errors import (
    BadInputError,
    BisectError,
    RunnerFailedError,
    RunnerUnavailableError,
    one_line,
)
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.graph import Graph, to_typed
from bisect_trt.inputs.perturbations import can_be_perturbed, perturbed
from bisect_trt.metrics.arrays import Arrays
from bisect_trt.metrics.parser import parse_requirements
from bisect_trt.metrics.rounding import STEPS
from bisect_trt.model.load import load_model
from bisect_trt.model.save import file_form
from bisect_trt.runners.emulator import EmulatedRunner
from bisect_trt.runners.process import IsolatedWorker
from bisect_trt.runners.reference import Reference
from bisect_trt.runners.tensorrt.execute import Counted
from bisect_trt.runners.tensorrt.profile import profile_of, values_of
from bisect_trt.runners.tensorrt.records import EngineRequest
from tests.fuzz.campaign import quiet, recipe_for, write_lines
from tests.fuzz.engine_table import table
from tests.fuzz.engine_worker import WORKER, Saved
from tests.fuzz.graphs import Network, generate
from tests.fuzz.judging import repetition, scored

COPIES = 20
"""Perturbed copies of each input."""

BUILD_TIMEOUT_S = 20.0
"""A build takes less than a second, and TensorRT's import some; more is a hang."""

RUN_TIMEOUT_S = 60.0
"""Loading an engine compiles its kernels, which takes seconds."""

MESSAGE_CHARACTERS = 1000
"""What a line keeps of a failure's message."""

KEYS = frozenset({"number", "recipe", "seconds", "runs", "on"})
"""What every line has."""

WORD = re.compile(r"/[\w./]+")
"""What may be the name of a random network's node or tensor."""


class Judge:
    """A random network with what the emulator says of it."""

    def __init__(self, network: Network) -> None:
        self.seed = network.recipe.seed
        self.graph = Graph(load_model(network.model).proto)
        self.samples = [Sample(f"input {n}", feed) for n, feed in enumerate(network.feeds)]
        self._reference = Reference(self.graph, threads=1)
        self._emulator = EmulatedRunner(self.graph, threads=1)
        self.references = [self._reference.outputs(sample) for sample in self.samples]
        whole = [n for n, a in self.references[0].items() if a.dtype.kind != "f"]
        self._requirements = parse_requirements((), self.graph.outputs, whole=whole)

    @cached_property
    def plans(self) -> dict[str, PrecisionPlan]:
        """What is built: FP16, FP32, and half of the layers kept."""
        names = [layer.name for layer in self.graph.layers]
        order = np.random.default_rng([self.seed, 4]).permutation(len(names))
        kept = frozenset(names[place] for place in order[: len(names) // 2])
        return {
            "FP16": PrecisionPlan(Precision.FP16),
            "FP32": PrecisionPlan(Precision.FP32),
            "plan": PrecisionPlan(Precision.FP16, kept),
        }

    def judged(self, plan: PrecisionPlan, outputs: Sequence[Arrays]) -> list[dict[str, Any]]:
        """What an engine's ``outputs`` show, one an input."""
        is_fp32 = plan.base is Precision.FP32
        likely = PrecisionPlan(Precision.TF32) if is_fp32 else plan.with_pins_in(Precision.TF32)
        emulated = list(self._emulator.outputs(likely, self.samples))
        rows = []
        for place, found in enumerate(outputs):
            copies, exact = self._copies[place]
            pairs = zip(exact, self._emulator.outputs(likely, copies), strict=True)
            scores = [self._requirements.score(one, other) for one, other in pairs]
            row = scored(self._requirements, self.references[place], found, emulated[place], scores)
            rows.append(asdict(row))
        return rows

    @cached_property
    def _copies(self) -> list[tuple[list[Sample], list[Arrays]]]:
        """Perturbed copies of each input with their outputs in FP32."""
        found, discrete = [], self.graph.discrete
        for place, sample in enumerate(self.samples):
            count = COPIES if can_be_perturbed(sample.arrays, discrete) else 0
            random = np.random.default_rng([self.seed, 5, place])
            step = STEPS[Precision.FP16]
            copies = [
                Sample(
                    f"copy {n}",
                    perturbed(sample.arrays, random, step=step, discrete=discrete),
                    True,
                )
                for n in range(count)
            ]
            found.append((copies, [self._reference.outputs(copy) for copy in copies]))
        return found


class Engines:
    """Engines of three processes, of which the first builds; ``folder`` is for their files."""

    def __init__(self, opened: ExitStack, folder: Path) -> None:
        self._workers = [opened.enter_context(IsolatedWorker(WORKER, {})) for _ in range(3)]
        self._path = str(folder / "engine")

    def built(self, judge: Judge, plan: PrecisionPlan, model: onnx.ModelProto) -> Saved:
        """Builds ``model``, which is ``plan`` written as types.

        Raises:
            RunnerFailedError: TensorRT cannot, crashed or was silent.
        """
        profile = profile_of(judge.graph.proto, judge.samples, ())
        with file_form(model) as source:
            request = EngineRequest(source, profile, False, values=values_of(judge.samples))
            saved: Saved = self._workers[0].call(
                "build", request, self._path, timeout_s=BUILD_TIMEOUT_S
            )
        return saved

    def run(
        self, saved: Saved, feeds: Sequence[Arrays], processes: int
    ) -> tuple[list[list[Counted]], float]:
        """The answers of so many processes, and the seconds of the first.

        Raises:
            RunnerFailedError: one of them failed.
        """
        answers, seconds = [], []
        for worker in self._workers[:processes]:
            found, taken = worker.call("run", saved, feeds, timeout_s=RUN_TIMEOUT_S)
            answers.append(found)
            seconds.append(taken)
        return answers, seconds[0]


def line_of(number: int, engines: Engines, processes: int) -> dict[str, Any]:
    """One network for a file of JSON lines; with no ``processes`` its engines are only built.

    What breaks outside of an engine is the line's ``error``.
    """
    recipe, began = recipe_for(number), time.perf_counter()
    line: dict[str, Any] = {"number": number, "recipe": recipe.text()}
    try:
        network = generate(recipe)
        line |= {"opset": network.opset, "fault": recipe.fault}
        judge = Judge(network)
        line["operators"] = sorted(node.op_type for node in judge.graph.proto.graph.node)
        line["engines"] = {
            word: _engine(judge, plan, engines, processes) for word, plan in judge.plans.items()
        }
    except RunnerUnavailableError:
        raise
    except Exception as error:  # the product's or the emulator's: the other networks go on
        line["error"] = f"{type(error).__name__}: {one_line(error)}"
    line["seconds"] = round(time.perf_counter() - began, 2)
    return line


def _engine(judge: Judge, plan: PrecisionPlan, engines: Engines, processes: int) -> dict[str, Any]:
    """What one engine showed, or why it failed."""
    model, feeds = to_typed(judge.graph, plan), [dict(s.arrays) for s in judge.samples]
    step = "build"
    found: dict[str, Any] = {}
    try:
        saved = engines.built(judge, plan, model)
        found["build_s"] = round(saved.seconds, 2)
        if not processes:
            return found
        step = "run"
        answers, found["run_s"] = engines.run(saved, feeds, processes)
    except RunnerFailedError as error:
        operators = blamed(model, error)
        message = one_line(error, MESSAGE_CHARACTERS)
        return {**found, "failed": step, "message": message, "operators": operators}
    found["inputs"] = judge.judged(plan, [counted[0][0] for counted in answers[0]])
    found["repetition"] = asdict(repetition(judge.references, answers))
    return found


def blamed(model: onnx.ModelProto, error: RunnerFailedError) -> list[str]:
    """The operators of the nodes that a failure names, in alphabetical order."""
    names = {node.name: node.op_type for node in model.graph.node if node.name}
    if error.node in names:
        return [names[error.node]]
    found = set()
    for word in WORD.findall("\n".join([str(error), *error.log])):
        # A tensor's name goes on from its node's: /block1/Add_1 is behind /block1/Add_1_output_0.
        ends = [end for end in range(len(word), 0, -1) if not word[end : end + 1].isalnum()]
        name = next((word[:end] for end in ends if word[:end] in names), None)
        if name is not None:
            found.add(names[name])
    return sorted(found)


def missing(first: int, count: int, done: Collection[int]) -> list[int]:
    """The numbers of ``count`` networks from ``first`` on that are not in ``done``."""
    return [number for number in range(first, first + count) if number not in done]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file; none if there is no file. A line that was cut off is left out.

    Raises:
        BadInputError: a line says other things.
    """
    found = []
    for text in path.read_text("utf-8", "replace").splitlines() if path.is_file() else ():
        try:
            line = json.loads(text)
        except ValueError:  # of a process that was killed
            continue
        if not isinstance(line, dict) or KEYS - line.keys():
            raise BadInputError(f"{path} has lines that are not of engines; name another file")
        found.append(line)
    return found


def share(
    numbers: Sequence[int],
    taken: Synchronized[int],
    out: Path,
    ends: float,
    thrice_every: int,
    head: Mapping[str, Any],
) -> None:
    """Takes networks of ``numbers`` until the wall clock is at ``ends``; appends their lines.

    ``taken`` counts those that all processes have taken.
    """
    quiet()
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        engines = Engines(opened, folder)
        while time.time() < ends:  # a clock that all processes share
            with taken.get_lock():
                place = taken.value
                taken.value += 1
            if place >= len(numbers):
                return
            number = numbers[place]
            processes = processes_of(number, thrice_every) if head["runs"] else 0
            line = {**line_of(number, engines, processes), **head}
            write_lines(out, [line])


def processes_of(number: int, thrice_every: int) -> int:
    """How many processes run the engines of a network: three for one of ``thrice_every``."""
    # By chance: each kind of fault comes at a regular distance too.
    random = np.random.default_rng([number, 6])
    return 3 if thrice_every and random.random() < 1 / thrice_every else 1


def described(runs: bool) -> str:
    """TensorRT, and the GPU if engines will run.

    Raises:
        RunnerUnavailableError: one is missing.
    """
    with IsolatedWorker(WORKER, {}) as worker:
        words: str = worker.call("describe" if runs else "name", timeout_s=RUN_TIMEOUT_S)
    return words


def fuzz(chosen: argparse.Namespace) -> None:
    """Runs the networks that ``--out`` lacks.

    Raises:
        RunnerUnavailableError: TensorRT or a GPU is missing.
        BadInputError: the file is of other engines.
    """
    runs = not chosen.build_only
    head = {"runs": runs, "on": described(runs)}
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    lines = read_lines(chosen.out)
    if any({key: line.get(key) for key in head} != head for line in lines):
        raise BadInputError(f"{chosen.out} has lines of other engines; name another --out")
    numbers = missing(chosen.seed, chosen.graphs, {line["number"] for line in lines})
    ends, spawn = time.time() + 60.0 * chosen.minutes, get_context("spawn")
    print(f"{len(numbers)} networks on {head['on']}, lines go to {chosen.out}", flush=True)
    taken = spawn.Value("i", 0)
    # Not a pool: where one process of a pool crashes, the others end too.
    arguments = (numbers, taken, chosen.out, ends, chosen.thrice_every, head)
    processes = [spawn.Process(target=share, args=arguments) for _ in range(chosen.processes)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    ended = [process.exitcode for process in processes if process.exitcode]
    if ended:
        print(f"{len(ended)} processes crashed ({ended}): run the same command again", flush=True)


def options() -> argparse.ArgumentParser:
    """The options of the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.engines", description=__doc__)
    parser.add_argument("--graphs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="the first network's number")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("reports/gpu-fuzz.jsonl"))
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no network after these")
    parser.add_argument(
        "--thrice-every",
        type=int,
        default=4,
        help="one network of so many runs in three processes, 0 for none",
    )
    parser.add_argument("--build-only", action="store_true", help="run nothing: needs no GPU")
    parser.add_argument("--table", type=Path, help="print the table of such a file, run nothing")
    return parser


def main() -> None:
    """Runs networks and prints the table; exits with 3 where no engine can run."""
    chosen = options().parse_args()
    try:
        if chosen.table is None:
            fuzz(chosen)
        lines = read_lines(chosen.table or chosen.out)
        if chosen.table is not None and not lines:
            raise BadInputError(f"{chosen.table} has no lines of engines; name a file of --out")
    except BisectError as error:
        print(error)
        raise SystemExit(error.exit_code) from None
    print("\n".join(table(lines)))


if __name__ == "__main__":
    main()
