"""What says that a subgraph is bad: an engine, or a command."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
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
    same input more than one answer. ``failure`` are the engine's words where it does not build or
    run, or a command's that calls the subgraph bad (``by_command``), ``verdict`` how that ended,
    ``allowed`` the allowance by output, ``breaks`` the outputs that rounding alone breaks.
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

    def __init__(self, most: int | None, time_budget: TimeBudget | None = None) -> None:
        self._most = most
        self._time = time_budget
        self.spent = 0

    @property
    def is_spent(self) -> bool:
        """Whether none is left."""
        if self._time is not None and self._time.left_s <= 0.0:
            return True
        return self._most is not None and self.spent >= self._most

    def spend(self) -> None:
        """Count one.

        Raises:
            BudgetSpentError: none is left.
        """
        if self.is_spent:
            raise BudgetSpentError
        self.spent += 1


@dataclass(frozen=True)
class Specimen:
    """``model`` is FP32; ``expected`` holds its outputs for ``sample`` on ONNX Runtime, by name.

    ``reseeded`` says that its weights are not the model's own.
    """

    subgraph: Subgraph
    model: onnx.ModelProto
    sample: Sample
    expected: Mapping[str, NDArray[Any]]
    reseeded: bool = False

    @property
    def key(self) -> tuple[Subgraph, bool]:
        """What tells it from others of its model."""
        return self.subgraph, self.reseeded


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

    def with_weights(self, specimen: Specimen, model: onnx.ModelProto) -> Specimen:
        """``specimen`` with the weights of ``model``, and what it then gives. Raises as
        :meth:`of`.
        """
        expected = outputs_of(model, specimen.sample.arrays, self._sample.name)
        return replace(specimen, model=model, expected=expected, reseeded=True)

    def described(self, subgraph: Subgraph) -> tuple[tuple[str, str], ...]:
        """The kept nodes in the file's order, each with its operator."""
        return tuple((n, self._extractor.operator(n)) for n in self.nodes if n in subgraph.kept)

    def bypasses(self, subgraph: Subgraph) -> list[Bypass]:
        """Those that can be made in ``subgraph``: a node that gives one tensor gives way to an
        input of the same type and shape.
        """
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


FACTOR = 10.0
"""Engines sum in other orders, and some in FP16, which no rounding of inputs and outputs shows."""

_ULPS = 32 * 2.0**-23
"""Of the largest value: sums of thousands of terms in FP32, one after the other, are off by so
much where the terms cancel."""

_BF16_TO_FP32 = 2.0**-16

_FLIPPED = 1e-2
"""Of integers and truth values, the share that may be others: close decisions fall either way."""


@dataclass(frozen=True)
class Allowance:
    """What rounding explains, by output: ``most`` is the largest error of floats, in their own
    units, or the share of the others that may differ; ``breaks`` are outputs in which rounding
    alone makes NaN or infinities.
    """

    most: Mapping[str, float]
    breaks: frozenset[str]

    def used(self, expected: Arrays, found: Arrays) -> float:
        """The error of ``found`` in multiples of what is allowed, the worst output's; infinite for
        another shape, and for NaN or infinities that rounding does not explain.
        """
        return max((self._used(n, expected[n], found[n]) for n in self.most), default=0.0)

    def _used(self, name: str, expected: NDArray[Any], found: NDArray[Any]) -> float:
        size, broken = _error(expected, found)
        if broken and name not in self.breaks:
            return float("inf")
        if size == 0.0:
            return 0.0
        return size / self.most[name] if self.most[name] > 0.0 else float("inf")


def what_rounding_explains(
    model: onnx.ModelProto, sample: Sample, expected: Arrays, precision: Precision
) -> Allowance:
    """The allowance of an FP32 model that runs at ``precision``, on one sample."""
    roundings = [(precision, 1.0)]
    if precision is Precision.FP32:
        roundings.append((Precision.BF16, _BF16_TO_FP32))
    most = {name: _least(array) for name, array in expected.items()}
    breaks = set[str]()
    runner = WholeModelRunner(Graph(model))
    for emulated, scale in roundings:
        try:
            found = next(iter(runner.outputs(PrecisionPlan(emulated), [sample])))
        except BisectError:  # an opset that cannot be raised, a rounded index out of range
            continue
        for name, array in expected.items():
            size, broken = _error(array, found[name])
            most[name] = max(most[name], FACTOR * scale * size)
            if broken and emulated is precision:
                breaks.add(name)
    return Allowance(most, frozenset(breaks))


def _error(expected: NDArray[Any], found: NDArray[Any]) -> tuple[float, bool]:
    """How large the error is, and whether it is more than a matter of size."""
    if expected.shape != found.shape:
        return 0.0, True
    if expected.dtype.kind != "f":
        return (float(np.mean(expected != found)) if expected.size else 0.0), False
    error = tensor_error(expected, found)
    return (error.max_abs if np.isfinite(error.max_abs) else 0.0), not error.finite


def _least(expected: NDArray[Any]) -> float:
    """What is allowed whatever the emulation says."""
    if expected.dtype.kind != "f":
        return _FLIPPED
    finite = np.abs(expected[np.isfinite(expected)])
    return FACTOR * _ULPS * float(finite.max()) if finite.size else 0.0


BAD_SHARE = 0.25
"""A subgraph in which this share of processes is bad would be seen to be so with this
confidence."""

PROCESSES = copies_needed(1.0 - BAD_SHARE, CONFIDENCE)


class ClosableRunner(Runner, Protocol):
    """A runner that holds a process."""

    def close(self) -> None:
        """End the process."""
        ...


_Answer = Mapping[str, NDArray[Any]] | RunnerFailedError | None

OpenRunner = Callable[[Graph, Sequence[Sample]], ClosableRunner]
"""Opens a runner of a model in a fresh process. One that can build and not run gives no outputs."""


class EngineTrials:
    """Judges subgraphs by what an engine makes of them."""

    def __init__(
        self,
        opens: OpenRunner,
        precision: Precision,
        explained: Precision,
        budget: Budget,
        workers: int = 1,
        processes: int = PROCESSES,
    ) -> None:
        self._opens = opens
        self.precision = precision
        self.explained = explained
        self.budget = budget
        self.versions: Mapping[str, str] = {}
        self.facts: Mapping[str, Any] = {}
        self._workers, self._processes = workers, processes
        self._whole = Observation()
        self._names = frozenset[str]()
        self._known: dict[tuple[Subgraph, bool], Observation] = {}

    def try_whole(self, specimen: Specimen) -> Observation:
        """What the whole model shows, in as many processes as it takes to tell not reproducible
        from wrong; subgraphs are compared with it.
        """
        self._names = _names_of(specimen.model)
        self._whole = self._seen(
            specimen,
            self._processes,
            lambda s: s.suspect in (Suspect.FAILED, Suspect.NOT_REPRODUCIBLE),
        )
        return self._whole

    def ask(self, specimen: Specimen) -> Verdict:
        """PASS where the subgraph is bad as the whole was: its engine fails in the same words, or
        is wrong or not reproducible. What was wrong each time is asked once.
        """
        most = 1 if self._whole.suspect is Suspect.WRONG else self._processes
        seen = self._until_bad(specimen, most)
        if self._whole.suspect is Suspect.FAILED:
            return self._same_failure(seen)
        if seen.failure:
            return seen.verdict
        return Verdict.PASS if seen.suspect is not None else Verdict.FAIL

    def look(self, specimen: Specimen) -> Observation:
        """What the model shows in all processes, or until it is bad.

        Raises:
            BudgetSpentError: the builds were spent before either.
        """
        return self._until_bad(specimen, self._processes)

    def figures(self, specimen: Specimen) -> Observation:
        """What the subgraph shows in all processes; where the budget is spent, in those of
        before."""
        if self.budget.is_spent:
            return self.known(specimen)
        seen = self._seen(specimen, self._processes, lambda s: s.suspect is Suspect.FAILED)
        return self._with_allowance(seen, specimen)

    def known(self, specimen: Specimen) -> Observation:
        """What ``specimen`` showed when it was last asked about."""
        return self._with_allowance(self._known[specimen.key], specimen)

    def _until_bad(self, specimen: Specimen, processes: int) -> Observation:
        seen = self._seen(specimen, processes, lambda s: s.suspect is not None)
        if seen.suspect is None and seen.runs and seen.processes < processes:
            raise BudgetSpentError  # not seen to be bad in fewer would be a smaller claim
        return seen

    def _seen(
        self, specimen: Specimen, processes: int, enough: Callable[[Observation], bool]
    ) -> Observation:
        seen = self._known[specimen.key] = self._looked(specimen, processes, enough)
        return seen

    def _looked(
        self, specimen: Specimen, processes: int, enough: Callable[[Observation], bool]
    ) -> Observation:
        seen = Observation()
        allowance: Allowance | None = None
        graph = Graph(specimen.model)
        while seen.processes < processes and not enough(seen):
            if self.budget.is_spent and seen.processes:
                break
            for answer in self._answers(graph, specimen.sample, processes - seen.processes):
                if isinstance(answer, RunnerFailedError):
                    verdict = answer.verdict
                    failed = replace(seen, processes=seen.processes + 1, verdict=verdict)
                    return replace(failed, failure=one_line(answer, 1000))
                if answer is None:
                    return replace(seen, processes=seen.processes + 1)
                if allowance is None:
                    allowance = self._allowance(specimen)
                    seen = _allowing(seen, allowance)
                seen = _with(seen, answer, allowance, specimen)
        return seen

    def _same_failure(self, seen: Observation) -> Verdict:
        if not seen.failure:
            return Verdict.FAIL
        words, before = (told(s.failure, self._names) for s in (seen, self._whole))
        same = seen.verdict is self._whole.verdict and words == before
        return Verdict.PASS if same else seen.verdict

    def _with_allowance(self, seen: Observation, specimen: Specimen) -> Observation:
        """What failed was not compared, and has none yet."""
        return seen if seen.allowed else _allowing(seen, self._allowance(specimen))

    def _allowance(self, specimen: Specimen) -> Allowance:
        return what_rounding_explains(
            specimen.model, specimen.sample, specimen.expected, self.explained
        )

    def _answers(self, graph: Graph, sample: Sample, most: int) -> list[_Answer]:
        """As many processes' answers as may run at a time, ``most`` at most."""
        count = 1
        self.budget.spend()
        while count < min(self._workers, most) and not self.budget.is_spent:
            self.budget.spend()
            count += 1
        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(lambda _: self._answer(graph, sample), range(count)))

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


def _allowing(seen: Observation, allowance: Allowance) -> Observation:
    return replace(seen, allowed=allowance.most, breaks=tuple(sorted(allowance.breaks)))


def _with(
    seen: Observation, answer: Mapping[str, NDArray[Any]], allowance: Allowance, specimen: Specimen
) -> Observation:
    """``seen`` and what one more process gave."""
    others = answer.others if isinstance(answer, Repeated) else ()
    runs = answer.runs if isinstance(answer, Repeated) else 1
    counted = [(answer, runs - sum(count for _, count in others)), *others]
    used = [(allowance.used(specimen.expected, found), count) for found, count in counted]
    return replace(
        seen,
        processes=seen.processes + 1,
        runs=seen.runs + runs,
        wrong=seen.wrong + sum(count for share, count in used if share > 1.0),
        worst=max(seen.worst, *(share for share, _ in used)),
        differing=seen.differing + bool(others),
    )


_LISTS = re.compile(r"\[[^\]]*\]|\{[^}]*\}|'[^']*'|\"[^\"]*\"")
_EDGES = "()[]{},.:;'\""


def told(failure: str, names: Collection[str]) -> str:
    """A failure's words without numbers, lists and the model's own names: a subgraph that fails for
    another reason is not bad in the same way.
    """
    words = [word.strip(_EDGES) for word in _LISTS.sub(" ", failure).split()]
    kept = [w for w in words if w not in names and w.rpartition("_")[0] not in names]
    return re.sub(r"\d+", "#", " ".join(kept))


def _names_of(model: onnx.ModelProto) -> frozenset[str]:
    nodes = model.graph.node
    return frozenset(name for n in nodes for name in (n.name, *n.input, *n.output) if name)


MODEL, INPUTS, EXPECTED = "model.onnx", "inputs.npz", "expected.npz"
_PLACES = {"{model}": MODEL, "{inputs}": INPUTS, "{expected}": EXPECTED}
_KEPT = 4096
_BAD = 1
"""The exit code that calls a subgraph bad."""


class CheckTrials:
    """Judges subgraphs by the exit code of a command: 0 means fine, 1 still bad, and anything else,
    or a signal, that the subgraph cannot be judged.

    Raises:
        BadInputError: it cannot be split, or is empty.
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
        self._known: dict[tuple[Subgraph, bool], Observation] = {}

    def try_whole(self, specimen: Specimen) -> Observation:
        """What the command says of the whole model.

        Raises:
            BadInputError: it does not judge it, cannot be started, or takes too long.
        """
        seen = self._known[specimen.key] = self._called(specimen)
        if seen.verdict is Verdict.UNSURE:
            raise BadInputError(
                f"--check {self._command!r}: {seen.failure} for the whole model, which says "
                "nothing of it (0 means fine, 1 still bad)"
            )
        return seen

    def ask(self, specimen: Specimen) -> Verdict:
        """PASS where the command calls the subgraph bad, UNSURE where it does not judge it.

        Raises:
            BadInputError: it cannot be started, or takes too long.
        """
        seen = self._called(specimen)
        if seen.verdict is Verdict.UNSURE:
            return Verdict.UNSURE
        if seen.failure:
            self._known[specimen.key] = seen
        return Verdict.PASS if seen.failure else Verdict.FAIL

    def figures(self, specimen: Specimen) -> Observation:
        """What the command said when it called the subgraph bad."""
        return self._known[specimen.key]

    known = figures

    def _called(self, specimen: Specimen) -> Observation:
        self.budget.spend()
        with scratch("check") as made:
            folder = Path(made)
            write_specimen(specimen, folder)
            with (folder / "output.txt").open("w+b") as log:
                code = self._exit_code([_placed(word, folder) for word in self._words], log)
                log.seek(max(0, log.seek(0, os.SEEK_END) - _KEPT))
                lines = log.read().decode(errors="replace").strip().splitlines()
        if code == 0:
            return Observation(1, by_command=True)
        said = f": {lines[-1]}" if lines else ""
        ended = f"exit code {code}" if code > 0 else f"signal {-code}"
        verdict = Verdict.FAIL if code == _BAD else Verdict.UNSURE
        return Observation(1, failure=one_line(f"{ended}{said}"), verdict=verdict, by_command=True)

    def _exit_code(self, words: Sequence[str], log: IO[bytes]) -> int:
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


def write_specimen(specimen: Specimen, folder: Path) -> None:
    """The subgraph's model, inputs and expected outputs as files of ``folder``."""
    save_model(specimen.model, folder / MODEL)
    write_npz(folder / INPUTS, specimen.sample.arrays)
    write_npz(folder / EXPECTED, specimen.expected)


def _placed(word: str, folder: Path) -> str:
    for place, name in _PLACES.items():
        word = word.replace(place, str(folder / name))
    return word
