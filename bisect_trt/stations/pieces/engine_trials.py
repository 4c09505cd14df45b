"""What an engine makes of a piece, in several fresh processes: fails, wrong, unsteady or right.

One process is not enough: an engine may answer wrongly in most and rightly in some, and kernels are
chosen anew with each build. The number of processes is what bounds the share of bad ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any, Protocol

import onnx
from numpy.typing import NDArray

from bisect_trt.core.errors import RunnerFailedError, one_line
from bisect_trt.core.holds import CONFIDENCE
from bisect_trt.core.machine.stop import BudgetSpentError
from bisect_trt.core.piece import Piece
from bisect_trt.core.precision import Precision, PrecisionPlan
from bisect_trt.core.sample import Sample
from bisect_trt.core.verdict import Verdict
from bisect_trt.graph.model.graph import Graph
from bisect_trt.numerics.confidence import draws_needed
from bisect_trt.runners.base import Repeated, Runner
from bisect_trt.stations.pieces.explained import Allowance, what_rounding_explains
from bisect_trt.stations.pieces.seen import Budget, Seen, Suspect
from bisect_trt.stations.pieces.specimens import Specimen

BAD_SHARE = 0.25
"""A piece in which this share of processes is bad would be seen to be so with this confidence."""

PROCESSES = draws_needed(1.0 - BAD_SHARE, CONFIDENCE)


class ClosableRunner(Runner, Protocol):
    """A runner that holds a process."""

    def close(self) -> None:
        """End the process."""
        ...


_Answer = Mapping[str, NDArray[Any]] | RunnerFailedError | None

OpenRunner = Callable[[Graph, Sequence[Sample]], ClosableRunner]
"""Opens a runner of a model in a fresh process. One that can build and not run gives no outputs."""


class EngineTrials:
    """Judges pieces by what an engine makes of them.

    Args:
        opens: a runner of a piece in a fresh process.
        precision: what the engine runs in.
        explained: the precision whose rounding explains an error: TF32 for FP32 on an engine whose
            FP32 is TF32.
        budget: of builds.
        workers: processes at a time.
        processes: how many in all before a piece counts as right.
    """

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
        self._whole = Seen()
        self._names = frozenset[str]()
        self._known: dict[tuple[Piece, bool], Seen] = {}

    def try_whole(self, specimen: Specimen) -> Seen:
        """What the whole model shows, in as many processes as it takes to tell unsteady from wrong;
        pieces are compared with it.
        """
        self._names = _names_of(specimen.model)
        self._whole = self._seen(
            specimen, self._processes, lambda s: s.suspect in (Suspect.FAILED, Suspect.UNSTEADY)
        )
        return self._whole

    def ask(self, specimen: Specimen) -> Verdict:
        """PASS where the piece is bad as the whole was: its engine fails in the same words, or is
        wrong or unsteady. What was wrong each time is asked once.
        """
        most = 1 if self._whole.suspect is Suspect.WRONG else self._processes
        seen = self._until_bad(specimen, most)
        if self._whole.suspect is Suspect.FAILED:
            return self._same_failure(seen)
        if seen.failure:
            return seen.verdict
        return Verdict.PASS if seen.suspect is not None else Verdict.FAIL

    def look(self, specimen: Specimen) -> Seen:
        """What the model shows in all processes, or until it is bad.

        Raises:
            BudgetSpentError: the builds were spent before either.
        """
        return self._until_bad(specimen, self._processes)

    def figures(self, specimen: Specimen) -> Seen:
        """What the piece shows in all processes; where the budget is spent, in those of before."""
        if self.budget.is_spent:
            return self.known(specimen)
        seen = self._seen(specimen, self._processes, lambda s: s.suspect is Suspect.FAILED)
        return self._with_allowance(seen, specimen)

    def known(self, specimen: Specimen) -> Seen:
        """What ``specimen`` showed when it was last asked about."""
        return self._with_allowance(self._known[specimen.key], specimen)

    def _until_bad(self, specimen: Specimen, processes: int) -> Seen:
        seen = self._seen(specimen, processes, lambda s: s.suspect is not None)
        if seen.suspect is None and seen.runs and seen.processes < processes:
            raise BudgetSpentError  # not seen to be bad in fewer would be a smaller claim
        return seen

    def _seen(self, specimen: Specimen, processes: int, enough: Callable[[Seen], bool]) -> Seen:
        seen = self._known[specimen.key] = self._looked(specimen, processes, enough)
        return seen

    def _looked(self, specimen: Specimen, processes: int, enough: Callable[[Seen], bool]) -> Seen:
        seen = Seen()
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

    def _same_failure(self, seen: Seen) -> Verdict:
        if not seen.failure:
            return Verdict.FAIL
        words, before = (told(s.failure, self._names) for s in (seen, self._whole))
        same = seen.verdict is self._whole.verdict and words == before
        return Verdict.PASS if same else seen.verdict

    def _with_allowance(self, seen: Seen, specimen: Specimen) -> Seen:
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


def _allowing(seen: Seen, allowance: Allowance) -> Seen:
    return replace(seen, allowed=allowance.most, breaks=tuple(sorted(allowance.breaks)))


def _with(
    seen: Seen, answer: Mapping[str, NDArray[Any]], allowance: Allowance, specimen: Specimen
) -> Seen:
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
    """A failure's words without numbers, lists and the model's own names: a piece that fails for
    another reason is not bad in the same way.

    Args:
        failure: the engine's words.
        names: of the model's nodes and tensors; engines put more behind them, after an underscore.
    """
    words = [word.strip(_EDGES) for word in _LISTS.sub(" ", failure).split()]
    kept = [w for w in words if w not in names and w.rpartition("_")[0] not in names]
    return re.sub(r"\d+", "#", " ".join(kept))


def _names_of(model: onnx.ModelProto) -> frozenset[str]:
    nodes = model.graph.node
    return frozenset(name for n in nodes for name in (n.name, *n.input, *n.output) if name)
