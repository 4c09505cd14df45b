"""Judges subgraphs by an engine's outputs or by a command's exit code."""

from __future__ import annotations

import math
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import onnx
from numpy.typing import NDArray

from bisect_trt.base.atomic_files import scratch
from bisect_trt.base.errors import BadInputError, BisectError, RunnerFailedError, one_line
from bisect_trt.base.interrupt import BudgetSpentError, TimeBudget
from bisect_trt.base.outcomes import CONFIDENCE, Verdict
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.inputs.npz import write_npz
from bisect_trt.metrics.arrays import Arrays
from bisect_trt.metrics.errors import tensor_error
from bisect_trt.metrics.statistics import copies_needed
from bisect_trt.model.graph import Graph
from bisect_trt.model.save import save_model
from bisect_trt.model.subgraph import Extractor, declare_shapes
from bisect_trt.runners.base import Repeated, Runner
from bisect_trt.runners.reference import Recorded, outputs_of
from bisect_trt.runners.second_emulator import WholeModelRunner

MODEL = "model.onnx"
INPUTS = "inputs.npz"
EXPECTED = "expected.npz"

BAD_SHARE = 0.25
"""The share of bad processes from which on a subgraph is found bad with 95 % confidence."""

PROCESSES = copies_needed(1.0 - BAD_SHARE, CONFIDENCE)
"""Fresh processes that a subgraph must be right in before it counts as right."""

# Engines sum in other orders, and some in FP16, which rounding inputs and outputs does not show.
ROUNDING_FACTOR = 10.0
"""The allowed error, in multiples of the emulated rounding error."""


class Suspect(StrEnum):
    """The ways in which a subgraph can be bad."""

    FAILED = "failed"
    WRONG = "wrong"
    NOT_REPRODUCIBLE = "not-reproducible"
    CHECK = "check"


@dataclass(frozen=True)
class Observation:
    """The results of running one subgraph in several processes."""

    processes: int = 0  # fresh processes started
    runs: int = 0  # inferences in all processes
    wrong: int = 0  # runs with an error that rounding does not explain
    worst: float = 0.0  # largest error, in multiples of the allowed error
    differing: int = 0  # processes that gave one input several answers
    failure: str = ""  # message of the engine that failed, or of the command that calls it bad
    verdict: Verdict = Verdict.PASS  # outcome of the last process
    allowed: Mapping[str, float] = field(default_factory=dict)  # see :class:`Allowance`
    breaks: tuple[str, ...] = ()  # see :class:`Allowance`
    by_command: bool = False  # whether a command judged, not an engine

    @property
    def suspect(self) -> Suspect | None:
        """The way in which the subgraph is bad; None if it is not."""
        if self.failure:
            return Suspect.CHECK if self.by_command else Suspect.FAILED
        if self.differing or 0 < self.wrong < self.runs:
            return Suspect.NOT_REPRODUCIBLE
        return Suspect.WRONG if self.wrong else None


class Budget:
    """Counts engine builds or calls of a command against a limit, and watches the time."""

    def __init__(self, limit: int | None, time_budget: TimeBudget | None = None) -> None:
        self._limit = limit
        self._time = time_budget
        self.spent = 0

    @property
    def is_spent(self) -> bool:
        """Whether no build or no time is left."""
        if self._time is not None and self._time.left_s <= 0.0:
            return True
        return self._limit is not None and self.spent >= self._limit

    def spend(self, wanted: int = 1) -> int:
        """Takes up to ``wanted`` builds and returns how many; raises BudgetSpentError for none."""
        if self.is_spent:
            raise BudgetSpentError
        taken = wanted if self._limit is None else min(wanted, self._limit - self.spent)
        self.spent += taken
        return taken


@dataclass(frozen=True)
class Specimen:
    """A subgraph as an FP32 model, with its inputs and its reference outputs by name."""

    subgraph: frozenset[str]
    model: onnx.ModelProto
    sample: Sample
    expected: Mapping[str, NDArray[Any]]

    def write(self, folder: Path) -> None:
        """Writes the model, the inputs and the expected outputs as files."""
        save_model(self.model, folder / MODEL)
        write_npz(folder / INPUTS, self.sample.arrays)
        write_npz(folder / EXPECTED, self.expected)


class Specimens:
    """Cuts subgraphs out of one model, with their values on one sample."""

    def __init__(self, graph: Graph, sample: Sample, folder: Path, threads: int = 0) -> None:
        self._extractor = Extractor(graph)
        self._sample = sample
        self._threads = threads
        self._recorded = Recorded(self._extractor, sample, folder, threads)
        self.nodes = self._extractor.nodes
        self.whole = frozenset(self.nodes)

    def of(self, subgraph: frozenset[str]) -> Specimen:
        """Returns ``subgraph`` with its inputs and reference outputs.

        Raises:
            RunnerFailedError: ONNX Runtime cannot run it, or a border tensor is no array.
        """
        border = self._extractor.border(subgraph)
        inputs = self._recorded.of(border.inputs)
        values = inputs | self._recorded.of(border.constants)
        try:
            model = self._extractor.extract(subgraph, values)
        except KeyError as error:  # an ONNX type that NumPy's files do not know
            raise RunnerFailedError(f"the subgraph cannot be written ({error})") from error
        expected = outputs_of(model, inputs, self._sample.name, self._threads)
        if subgraph != self.whole:  # the model keeps what it declares
            declare_shapes(model, expected)
        return Specimen(subgraph, model, Sample(self._sample.name, inputs), expected)

    def operators(self, subgraph: frozenset[str]) -> tuple[tuple[str, str], ...]:
        """The kept nodes in file order, each with its operator."""
        return tuple((n, self._extractor.operator(n)) for n in self.nodes if n in subgraph)


@dataclass(frozen=True)
class Allowance:
    """The error of each output that rounding explains."""

    # Largest error of a float output, or the share of other values that may differ.
    allowed: Mapping[str, float]
    breaks: frozenset[str]  # outputs in which rounding alone makes NaN or infinities

    def used(self, expected: Arrays, found: Arrays) -> float:
        """The worst output's error in multiples of the allowed one.

        It is infinite for another shape and for unexplained NaN or infinities.
        """
        worst = 0.0
        for name, allowed in self.allowed.items():
            size, broken = _error(expected[name], found[name])
            if broken and name not in self.breaks:
                return math.inf
            if size > 0.0:
                worst = max(worst, size / allowed if allowed > 0.0 else math.inf)
        return worst


def what_rounding_explains(
    model: onnx.ModelProto,
    sample: Sample,
    expected: Arrays,
    precision: Precision,
    threads: int = 0,
) -> Allowance:
    """Emulates an FP32 model at ``precision`` on one sample and returns its allowance."""
    roundings = [(precision, 1.0)]
    if precision is Precision.FP32:
        # BF16's error shows how the model amplifies errors; FP32 has 16 more bits of mantissa.
        roundings.append((Precision.BF16, 2.0**-16))
    allowed = {name: _always_allowed(array) for name, array in expected.items()}
    breaks = set[str]()
    runner = WholeModelRunner(Graph(model), threads=threads)
    for emulated, scale in roundings:
        try:
            found = next(iter(runner.outputs(PrecisionPlan(emulated), [sample])))
        except BisectError:  # an opset that cannot be raised, a rounded index out of range
            continue
        for name, array in expected.items():
            size, broken = _error(array, found[name])
            allowed[name] = max(allowed[name], ROUNDING_FACTOR * scale * size)
            if broken and emulated is precision:
                breaks.add(name)
    return Allowance(allowed, frozenset(breaks))


def _error(expected: NDArray[Any], found: NDArray[Any]) -> tuple[float, bool]:
    """The size of the error, and whether shape or finiteness differ."""
    if expected.shape != found.shape:
        return 0.0, True
    if expected.dtype.kind != "f":
        return (float(np.mean(expected != found)) if expected.size else 0.0), False
    error = tensor_error(expected, found)
    return (error.max_abs if np.isfinite(error.max_abs) else 0.0), not error.finite


def _always_allowed(expected: NDArray[Any]) -> float:
    """The error that is allowed even where emulation shows none."""
    if expected.dtype.kind != "f":
        return 1e-2  # integers and booleans: close decisions fall either way
    finite = np.abs(expected[np.isfinite(expected)])
    # FP32 sums of thousands of terms that cancel are off by about 32 ulp of the largest value.
    return ROUNDING_FACTOR * 32 * 2.0**-23 * float(finite.max(initial=0.0))


class ClosableRunner(Runner, Protocol):
    """A runner with a process of its own."""

    def close(self) -> None:
        """Ends the process."""
        ...


OpenRunner = Callable[[Graph, Sequence[Sample]], ClosableRunner]
"""Opens a runner in a fresh process; a runner that only builds yields no outputs."""

_Answer = Mapping[str, NDArray[Any]] | RunnerFailedError | None


class EngineTrials:
    """Judges subgraphs by an engine's outputs."""

    def __init__(
        self,
        open_runner: OpenRunner,
        precision: Precision,
        explained: Precision,
        budget: Budget,
        workers: int = 1,
        threads: int = 0,
    ) -> None:
        self._open_runner = open_runner
        self.precision = precision
        self.explained = explained  # the precision whose rounding errors are allowed
        self.budget = budget
        self.versions: Mapping[str, str] = {}
        self.facts: Mapping[str, Any] = {}
        self.observations: dict[frozenset[str], Observation] = {}  # the last of each subgraph
        self._workers = workers
        self.threads = threads
        self._whole = Observation()
        self._names = set[str]()

    def try_whole(self, specimen: Specimen) -> Observation:
        """Runs the whole model in enough processes to tell wrong from not reproducible."""
        nodes = specimen.model.graph.node
        self._names = {name for n in nodes for name in (n.name, *n.input, *n.output) if name}
        until = (Suspect.FAILED, Suspect.NOT_REPRODUCIBLE)
        self._whole = self._observe(specimen, PROCESSES, until)
        return self._whole

    def ask(self, specimen: Specimen) -> Verdict:
        """Returns PASS where the subgraph is bad in the same way as the whole model."""
        # Where the whole model was wrong in every process, one process tells.
        observed = self.look(specimen, 1 if self._whole.suspect is Suspect.WRONG else PROCESSES)
        if not observed.failure:
            bad = observed.suspect is not None and self._whole.suspect is not Suspect.FAILED
            return Verdict.PASS if bad else Verdict.FAIL
        if self._whole.suspect is Suspect.FAILED and observed.verdict is self._whole.verdict:
            words, before = (failure_words(s.failure, self._names) for s in (observed, self._whole))
            return Verdict.PASS if words == before else observed.verdict
        return observed.verdict

    def look(self, specimen: Specimen, processes: int = PROCESSES) -> Observation:
        """Runs the subgraph until it is bad, or in all processes.

        Raises:
            BudgetSpentError: the builds were spent before that.
        """
        observed = self._observe(specimen, processes, tuple(Suspect))
        if observed.suspect is None and observed.runs and observed.processes < processes:
            raise BudgetSpentError  # right in fewer processes would be a weaker claim
        return observed

    def figures(self, specimen: Specimen) -> Observation:
        """Runs the subgraph in all processes that the budget allows."""
        return self._observe(specimen, PROCESSES, (Suspect.FAILED,))

    def _observe(
        self, specimen: Specimen, processes: int, until: Collection[Suspect]
    ) -> Observation:
        """Runs fresh processes until one of the suspects in ``until`` is found."""
        if self.budget.is_spent:
            raise BudgetSpentError
        allowance = what_rounding_explains(
            specimen.model, specimen.sample, specimen.expected, self.explained, self.threads
        )
        observed = Observation(allowed=allowance.allowed, breaks=tuple(sorted(allowance.breaks)))
        for answer in self._answers(specimen, processes):
            observed = replace(observed, processes=observed.processes + 1)
            if isinstance(answer, RunnerFailedError):
                words = one_line(answer, 1000)
                observed = replace(observed, verdict=answer.verdict, failure=words)
            elif answer is not None:
                observed = _with_runs(observed, answer, allowance, specimen.expected)
            if answer is None or observed.suspect in until:
                break
        self.observations[specimen.subgraph] = observed
        return observed

    def _answers(self, specimen: Specimen, processes: int) -> Iterator[_Answer]:
        """Yields the answers of fresh processes, one per worker at a time, while builds last."""
        graph, done = Graph(specimen.model), 0
        while done < processes and not (done and self.budget.is_spent):
            count = self.budget.spend(min(self._workers, processes - done))
            with ThreadPoolExecutor(count) as pool:
                futures = [pool.submit(self._answer, graph, specimen.sample) for _ in range(count)]
            yield from (future.result() for future in futures)
            done += count

    def _answer(self, graph: Graph, sample: Sample) -> _Answer:
        """The outputs of one fresh process; None from a runner that only builds."""
        plan = PrecisionPlan(self.precision)
        try:
            with closing(self._open_runner(graph, [sample])) as runner:
                self.versions = dict(runner.versions)
                outputs = next(iter(runner.outputs(plan, [sample])), None)
                self.facts = dict(runner.facts(plan))
                return outputs
        except RunnerFailedError as error:
            return error.blamed_on_model()


def _with_runs(
    before: Observation,
    answer: Mapping[str, NDArray[Any]],
    allowance: Allowance,
    expected: Mapping[str, NDArray[Any]],
) -> Observation:
    """Adds the runs of one more process to an observation."""
    others = answer.others if isinstance(answer, Repeated) else ()
    runs = answer.runs if isinstance(answer, Repeated) else 1
    counted = [(answer, runs - sum(count for _, count in others)), *others]
    used = [(allowance.used(expected, found), count) for found, count in counted]
    return replace(
        before,
        runs=before.runs + runs,
        wrong=before.wrong + sum(count for share, count in used if share > 1.0),
        worst=max(before.worst, *(share for share, _ in used)),
        differing=before.differing + bool(others),
    )


_LISTS = re.compile(r"\[[^\]]*\]|\{[^}]*\}|'[^']*'|\"[^\"]*\"")


def failure_words(failure: str, names: Collection[str]) -> str:
    """A failure's words without numbers, lists and the model's own names, to compare causes."""
    words = [word.strip("()[]{},.:;'\"") for word in _LISTS.sub(" ", failure).split()]
    kept = [w for w in words if w not in names and w.rpartition("_")[0] not in names]
    return re.sub(r"\d+", "#", " ".join(kept))


class CheckTrials:
    """Judges subgraphs by the exit code of a command: 0 fine, 1 bad, others not judged."""

    def __init__(self, command: str, timeout_s: float, budget: Budget, threads: int = 0) -> None:
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise BadInputError(f"--check {command!r}: {error}") from error
        if not self._words:
            raise BadInputError("--check '': an empty command")
        if not any("{model}" in word for word in self._words):
            self._words.append("{model}")
        self._command = command
        self._timeout_s = timeout_s
        self.threads = threads
        self.budget = budget
        self.precision = self.explained = Precision.FP32
        self.versions: Mapping[str, str] = {}
        self.observations: dict[frozenset[str], Observation] = {}

    def try_whole(self, specimen: Specimen) -> Observation:
        """Runs the command on the whole model, which it must be able to judge."""
        observed = self._call(specimen)
        if observed.verdict is Verdict.UNSURE:
            raise BadInputError(
                f"--check {self._command!r}: {observed.failure} for the whole model, which says "
                "nothing of it (0 means fine, 1 still bad)"
            )
        return observed

    def ask(self, specimen: Specimen) -> Verdict:
        """Returns PASS where the command calls the subgraph bad, UNSURE where it cannot judge."""
        observed = self._call(specimen)
        if observed.verdict is Verdict.UNSURE:
            return Verdict.UNSURE
        return Verdict.PASS if observed.failure else Verdict.FAIL

    def figures(self, specimen: Specimen) -> Observation:
        """The observation of the command's last call on the subgraph."""
        return self.observations[specimen.subgraph]

    def _call(self, specimen: Specimen) -> Observation:
        self.budget.spend()
        with scratch("check") as name:
            folder = Path(name)
            specimen.write(folder)
            with (folder / "output.txt").open("w+b") as log:
                code = self._exit_code(folder, log)
                log.seek(max(0, log.seek(0, os.SEEK_END) - 4096))  # a command may print gigabytes
                lines = log.read().decode(errors="replace").strip().splitlines()
        observed = Observation(1, by_command=True)
        if code != 0:
            last_line = f": {lines[-1]}" if lines else ""
            ended = f"exit code {code}" if code > 0 else f"signal {-code}"
            verdict = Verdict.FAIL if code == 1 else Verdict.UNSURE
            observed = replace(observed, failure=one_line(f"{ended}{last_line}"), verdict=verdict)
        self.observations[specimen.subgraph] = observed
        return observed

    def _exit_code(self, folder: Path, log: IO[bytes]) -> int:
        words = self._words
        for file in (MODEL, INPUTS, EXPECTED):
            place = f"{{{Path(file).stem}}}"
            words = [word.replace(place, str(folder / file)) for word in words]
        try:
            child = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C must not reach the command directly
            )
        except OSError as error:
            raise BadInputError(
                f"--check {self._command!r}: {self._words[0]!r} cannot be started "
                f"({error.strerror})"
            ) from error
        try:
            return child.wait(self._timeout_s)
        except subprocess.TimeoutExpired:
            raise BadInputError(
                f"--check {self._command!r}: no end after {self._timeout_s:g} s, which says "
                "nothing of the subgraph; mend the command, or raise --evaluation-timeout"
            ) from None
        finally:
            if child.poll() is None:
                with suppress(OSError):  # with its children, such as an engine's builder
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()


Trials = EngineTrials | CheckTrials
"""A judge of subgraphs."""
