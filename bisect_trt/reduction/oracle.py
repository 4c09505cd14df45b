"""Says whether a subgraph is bad: by an engine's answers, or by a command's exit code."""

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
from bisect_trt.base.plan import Bypass, Precision, PrecisionPlan, Subgraph
from bisect_trt.base.sample import Sample
from bisect_trt.inputs.arrays import write_npz
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
"""A subgraph that is bad in this share of processes is seen to be so with 95 % confidence."""

PROCESSES = copies_needed(1.0 - BAD_SHARE, CONFIDENCE)

ROUNDING_FACTOR = 10.0
"""Engines sum in other orders, and some in FP16, which no rounding of inputs and outputs shows."""

_SUM_ERROR = 32 * 2.0**-23
"""Of the largest value: sums of thousands of FP32 terms are off by so much where terms cancel."""

_BF16_TO_FP32 = 2.0**-16

_FLIPPED_SHARE = 1e-2
"""Integers and truth values that may be others: close decisions fall either way."""


class Suspect(StrEnum):
    """In which way a subgraph is bad."""

    FAILED = "failed"
    WRONG = "wrong"
    NOT_REPRODUCIBLE = "not-reproducible"
    CHECK = "check"


@dataclass(frozen=True)
class Observation:
    """What a subgraph showed, over all processes.

    ``runs`` are all inferences, ``wrong`` those whose error no rounding explains; ``worst`` is the
    largest error in multiples of what is allowed. ``differing`` counts the processes that gave the
    same input more than one answer. ``failure`` are the words of an engine that does not build or
    run, or of a command that calls the subgraph bad (``by_command``), ``verdict`` how that ended.
    ``allowed`` and ``breaks`` are those of :class:`Allowance`.
    """

    processes: int = 0
    runs: int = 0
    wrong: int = 0
    worst: float = 0.0
    differing: int = 0
    failure: str = ""
    verdict: Verdict = Verdict.PASS
    allowed: Mapping[str, float] = field(default_factory=dict)
    breaks: tuple[str, ...] = ()
    by_command: bool = False

    @property
    def suspect(self) -> Suspect | None:
        """What it is to be blamed for; None if nothing was seen."""
        if self.failure:
            return Suspect.CHECK if self.by_command else Suspect.FAILED
        if self.differing or 0 < self.wrong < self.runs:
            return Suspect.NOT_REPRODUCIBLE
        return Suspect.WRONG if self.wrong else None


class Budget:
    """What is left of the engine builds, or calls of a command, and of the time."""

    def __init__(self, limit: int | None, time_budget: TimeBudget | None = None) -> None:
        self._limit = limit
        self._time = time_budget
        self.spent = 0

    @property
    def is_spent(self) -> bool:
        """Whether none is left."""
        if self._time is not None and self._time.left_s <= 0.0:
            return True
        return self._limit is not None and self.spent >= self._limit

    def spend(self, wanted: int = 1) -> int:
        """Take up to ``wanted``, and say how many were left; raises BudgetSpentError if none."""
        if self.is_spent:
            raise BudgetSpentError
        taken = wanted if self._limit is None else min(wanted, self._limit - self.spent)
        self.spent += taken
        return taken


@dataclass(frozen=True)
class Specimen:
    """A subgraph as an FP32 model, with its inputs and its outputs on ONNX Runtime, by name."""

    subgraph: Subgraph
    model: onnx.ModelProto
    sample: Sample
    expected: Mapping[str, NDArray[Any]]

    def write(self, folder: Path) -> None:
        """Its model, inputs and expected outputs as files."""
        save_model(self.model, folder / MODEL)
        write_npz(folder / INPUTS, self.sample.arrays)
        write_npz(folder / EXPECTED, self.expected)


class Specimens:
    """The subgraphs of one model on one sample."""

    def __init__(self, graph: Graph, sample: Sample, folder: Path) -> None:
        self._extractor = Extractor(graph)
        self._sample = sample
        self._recorded = Recorded(self._extractor, sample, folder)
        self.nodes = self._extractor.nodes
        self.whole = Subgraph(frozenset(self.nodes))

    def of(self, subgraph: Subgraph) -> Specimen:
        """``subgraph`` with its inputs and what it gives.

        Raises:
            RunnerFailedError: ONNX Runtime cannot run it, or a tensor of its border is no array.
        """
        border = self._extractor.border(subgraph)
        inputs = self._recorded.of(border.inputs)
        values = inputs | self._recorded.of(border.constants)
        try:
            model = self._extractor.extract(subgraph, values)
        except KeyError as error:  # a type of ONNX's that NumPy's files do not know
            raise RunnerFailedError(f"the subgraph cannot be written ({error})") from error
        expected = outputs_of(model, inputs, self._sample.name)
        if subgraph != self.whole:
            declare_shapes(model, expected)
        return Specimen(subgraph, model, Sample(self._sample.name, inputs), expected)

    def operators(self, subgraph: Subgraph) -> tuple[tuple[str, str], ...]:
        """The kept nodes in the file's order, each with its operator."""
        return tuple((n, self._extractor.operator(n)) for n in self.nodes if n in subgraph.kept)

    def bypasses(self, subgraph: Subgraph) -> list[Bypass]:
        """Nodes of one output that can give way to an input of the same type and shape."""
        found = []
        for node in (n for n in self.nodes if n in subgraph.kept):
            sources, outputs = self._extractor.tensors(node)
            if len(outputs) != 1:
                continue
            try:
                values = self._recorded.of([*sources, *outputs])
            except RunnerFailedError:
                continue
            made = values[outputs[0]]
            found += [
                Bypass(node, s)
                for s in sources
                if (values[s].dtype, values[s].shape) == (made.dtype, made.shape)
            ]
        return found


@dataclass(frozen=True)
class Allowance:
    """What rounding explains, by output.

    ``allowed`` is the largest error of floats, in their own units, or the share of the others that
    may differ. ``breaks`` are outputs in which rounding alone makes NaN or infinities.
    """

    allowed: Mapping[str, float]
    breaks: frozenset[str]

    def used(self, expected: Arrays, found: Arrays) -> float:
        """The worst output's error in multiples of what is allowed.

        It is infinite for another shape, and for NaN or infinities that rounding does not explain.
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
    model: onnx.ModelProto, sample: Sample, expected: Arrays, precision: Precision
) -> Allowance:
    """The allowance of an FP32 model that runs at ``precision``, on one sample."""
    roundings = [(precision, 1.0)]
    if precision is Precision.FP32:  # BF16's error shows how the model passes errors on
        roundings.append((Precision.BF16, _BF16_TO_FP32))
    allowed = {name: _always_allowed(array) for name, array in expected.items()}
    breaks = set[str]()
    runner = WholeModelRunner(Graph(model))
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
    """How large the error is, and whether it is more than a matter of size."""
    if expected.shape != found.shape:
        return 0.0, True
    if expected.dtype.kind != "f":
        return (float(np.mean(expected != found)) if expected.size else 0.0), False
    error = tensor_error(expected, found)
    return (error.max_abs if np.isfinite(error.max_abs) else 0.0), not error.finite


def _always_allowed(expected: NDArray[Any]) -> float:
    if expected.dtype.kind != "f":
        return _FLIPPED_SHARE
    finite = np.abs(expected[np.isfinite(expected)])
    return ROUNDING_FACTOR * _SUM_ERROR * float(finite.max(initial=0.0))


class ClosableRunner(Runner, Protocol):
    """A runner that holds a process."""

    def close(self) -> None:
        """End the process."""
        ...


OpenRunner = Callable[[Graph, Sequence[Sample]], ClosableRunner]
"""Opens a runner of a model in a fresh process. One that can build and not run gives no outputs."""

_Answer = Mapping[str, NDArray[Any]] | RunnerFailedError | None


class EngineTrials:
    """Judges subgraphs by what an engine makes of them."""

    def __init__(
        self,
        opens: OpenRunner,
        precision: Precision,
        explained: Precision,
        budget: Budget,
        workers: int = 1,
    ) -> None:
        self._opens = opens
        self.precision = precision
        self.explained = explained  # the precision whose rounding is allowed for
        self.budget = budget
        self.versions: Mapping[str, str] = {}
        self.facts: Mapping[str, Any] = {}
        self.known: dict[Subgraph, Observation] = {}  # as last tried
        self._workers = workers
        self._whole = Observation()
        self._names = set[str]()

    def try_whole(self, specimen: Specimen) -> Observation:
        """What the whole model shows, in enough processes to tell not reproducible from wrong."""
        nodes = specimen.model.graph.node
        self._names = {name for n in nodes for name in (n.name, *n.input, *n.output) if name}
        until = (Suspect.FAILED, Suspect.NOT_REPRODUCIBLE)
        self._whole = self._observe(specimen, PROCESSES, until)
        return self._whole

    def ask(self, specimen: Specimen) -> Verdict:
        """PASS where the subgraph is bad as the whole was.

        That is: it fails in the same words, or is wrong or not reproducible. Where the whole was
        wrong each time, one process is asked.
        """
        seen = self.look(specimen, 1 if self._whole.suspect is Suspect.WRONG else PROCESSES)
        if not seen.failure:
            bad = seen.suspect is not None and self._whole.suspect is not Suspect.FAILED
            return Verdict.PASS if bad else Verdict.FAIL
        if self._whole.suspect is Suspect.FAILED and seen.verdict is self._whole.verdict:
            words, before = (failure_words(s.failure, self._names) for s in (seen, self._whole))
            return Verdict.PASS if words == before else seen.verdict
        return seen.verdict

    def look(self, specimen: Specimen, processes: int = PROCESSES) -> Observation:
        """What the model shows in all processes, or until it is bad.

        Raises:
            BudgetSpentError: the builds were spent before either.
        """
        seen = self._observe(specimen, processes, tuple(Suspect))
        if seen.suspect is None and seen.runs and seen.processes < processes:
            raise BudgetSpentError  # not seen to be bad in fewer would be a smaller claim
        return seen

    def figures(self, specimen: Specimen) -> Observation:
        """What the subgraph shows in all processes, or in as many as the budget allows."""
        return self._observe(specimen, PROCESSES, (Suspect.FAILED,))

    def _observe(
        self, specimen: Specimen, processes: int, until: Collection[Suspect]
    ) -> Observation:
        """What fresh processes show, until one of the suspects is seen."""
        if self.budget.is_spent:
            raise BudgetSpentError
        allowance = what_rounding_explains(
            specimen.model, specimen.sample, specimen.expected, self.explained
        )
        seen = Observation(allowed=allowance.allowed, breaks=tuple(sorted(allowance.breaks)))
        for answer in self._answers(specimen, processes):
            seen = replace(seen, processes=seen.processes + 1)
            if isinstance(answer, RunnerFailedError):
                words = one_line(answer, 1000)
                seen = replace(seen, verdict=answer.verdict, failure=words)
            elif answer is not None:
                seen = _with_runs(seen, answer, allowance, specimen.expected)
            if answer is None or seen.suspect in until:
                break
        self.known[specimen.subgraph] = seen
        return seen

    def _answers(self, specimen: Specimen, processes: int) -> Iterator[_Answer]:
        """Fresh processes' answers, as many at a time as there are workers, while builds last."""
        graph, done = Graph(specimen.model), 0
        while done < processes and not (done and self.budget.is_spent):
            count = self.budget.spend(min(self._workers, processes - done))
            with ThreadPoolExecutor(count) as pool:
                asked = [pool.submit(self._answer, graph, specimen.sample) for _ in range(count)]
            yield from (answer.result() for answer in asked)
            done += count

    def _answer(self, graph: Graph, sample: Sample) -> _Answer:
        """A fresh process' outputs; None from a runner that only builds."""
        plan = PrecisionPlan(self.precision)
        try:
            with closing(self._opens(graph, [sample])) as runner:
                self.versions = dict(runner.versions)
                outputs = next(iter(runner.outputs(plan, [sample])), None)
                self.facts = dict(runner.facts(plan))
                return outputs
        except RunnerFailedError as error:
            return error.blamed_on_model()


def _with_runs(
    seen: Observation,
    answer: Mapping[str, NDArray[Any]],
    allowance: Allowance,
    expected: Mapping[str, NDArray[Any]],
) -> Observation:
    """``seen`` and the runs of one more process."""
    others = answer.others if isinstance(answer, Repeated) else ()
    runs = answer.runs if isinstance(answer, Repeated) else 1
    counted = [(answer, runs - sum(count for _, count in others)), *others]
    used = [(allowance.used(expected, found), count) for found, count in counted]
    return replace(
        seen,
        runs=seen.runs + runs,
        wrong=seen.wrong + sum(count for share, count in used if share > 1.0),
        worst=max(seen.worst, *(share for share, _ in used)),
        differing=seen.differing + bool(others),
    )


_LISTS = re.compile(r"\[[^\]]*\]|\{[^}]*\}|'[^']*'|\"[^\"]*\"")


def failure_words(failure: str, names: Collection[str]) -> str:
    """A failure's words without numbers, lists and the model's own names.

    A subgraph that fails for another reason is not bad in the same way.
    """
    words = [word.strip("()[]{},.:;'\"") for word in _LISTS.sub(" ", failure).split()]
    kept = [w for w in words if w not in names and w.rpartition("_")[0] not in names]
    return re.sub(r"\d+", "#", " ".join(kept))


class CheckTrials:
    """Judges subgraphs by the exit code of a command.

    0 means fine, 1 still bad; anything else, or a signal, that the subgraph cannot be judged.
    """

    def __init__(self, command: str, timeout_s: float, budget: Budget) -> None:
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
        self.budget = budget
        self.precision = self.explained = Precision.FP32
        self.versions: Mapping[str, str] = {}
        self.known: dict[Subgraph, Observation] = {}

    def try_whole(self, specimen: Specimen) -> Observation:
        """What the command says of the whole model, which it has to be able to judge."""
        seen = self._call(specimen)
        if seen.verdict is Verdict.UNSURE:
            raise BadInputError(
                f"--check {self._command!r}: {seen.failure} for the whole model, which says "
                "nothing of it (0 means fine, 1 still bad)"
            )
        return seen

    def ask(self, specimen: Specimen) -> Verdict:
        """PASS where the command calls the subgraph bad, UNSURE where it does not judge it."""
        seen = self._call(specimen)
        if seen.verdict is Verdict.UNSURE:
            return Verdict.UNSURE
        return Verdict.PASS if seen.failure else Verdict.FAIL

    def figures(self, specimen: Specimen) -> Observation:
        """What the command said when it called the subgraph bad."""
        return self.known[specimen.subgraph]

    def _call(self, specimen: Specimen) -> Observation:
        self.budget.spend()
        with scratch("check") as made:
            folder = Path(made)
            specimen.write(folder)
            with (folder / "output.txt").open("w+b") as log:
                code = self._exit_code(folder, log)
                log.seek(max(0, log.seek(0, os.SEEK_END) - 4096))
                lines = log.read().decode(errors="replace").strip().splitlines()
        seen = Observation(1, by_command=True)
        if code != 0:
            said = f": {lines[-1]}" if lines else ""
            ended = f"exit code {code}" if code > 0 else f"signal {-code}"
            verdict = Verdict.FAIL if code == 1 else Verdict.UNSURE
            seen = replace(seen, failure=one_line(f"{ended}{said}"), verdict=verdict)
        self.known[specimen.subgraph] = seen
        return seen

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
                start_new_session=True,  # Ctrl-C is ours to handle
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
                with suppress(OSError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()


Trials = EngineTrials | CheckTrials
"""What says of a subgraph whether it is bad."""
