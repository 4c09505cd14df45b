"""Whether an engine's word stands: its runs beside each other, also in further processes.

An engine that was wrong in most processes and right in others was seen to be right in every run of
some: one process is no observation either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from numpy.typing import NDArray

from bisect_trt.core.diagnosis import Cause, Diagnosis
from bisect_trt.core.finding import Finding
from bisect_trt.core.machine.stop import BudgetSpentError
from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.core.sample import Sample
from bisect_trt.core.steadiness import Steadiness
from bisect_trt.numerics.scores import times
from bisect_trt.probe.prober import Prober
from bisect_trt.probe.result import ProbeResult
from bisect_trt.runners.base import Patient, Restartable
from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.bench.engine_ahead import begin

FURTHER_PROCESSES = 2

_CURE = (
    "No pin cures that: `bisect-trt reduce` finds the smallest piece that does it, `bisect-trt "
    "cure` what helps."
)
_ROOM = (
    "They differ by little, and the plan has no room for it: search with the tolerance a tenth "
    "smaller, or allow a tenth more."
)


class _InFurtherProcess:
    """``runner`` after it was started afresh, which the first probe does; ``number`` tells its
    answers from those of other processes in the journal.
    """

    def __init__(self, runner: Restartable, number: int) -> None:
        self._runner, self._started = runner, False
        self.name = runner.name
        self.versions: Mapping[str, str] = {**runner.versions, "process": str(number)}
        self.timeout_s = runner.timeout_s if isinstance(runner, Patient) else None

    def outputs(
        self, plan: PrecisionPlan, samples: Sequence[Sample]
    ) -> Iterator[Mapping[str, NDArray[Any]]]:
        if not self._started:
            self._runner.start_afresh()
            self._started = True
        return self._runner.outputs(plan, samples)

    def facts(self, plan: PrecisionPlan) -> Mapping[str, Any]:
        return self._runner.facts(plan)


def over_processes(bench: Bench, result: ProbeResult) -> Steadiness:
    """The runs of ``result``'s engine, and those of it built again in further processes, where the
    runner has some. :func:`begin_further` lets these be built beside something else before.

    Args:
        bench: what builds.
        result: the engine's first process, on the given inputs.
    """
    results, runner = [result], bench.opened
    if not isinstance(runner, Restartable):
        return runs_of(results)
    # Where the budget ends it, what was seen until then counts, and the report says of how many.
    with suppress(BudgetSpentError):
        for prober in _further(bench, runner):
            results.append(prober.probe(result.plan))
            taken_back = result.verdict.passed and not results[-1].verdict.passed
            if taken_back or runs_of(results).decides:
                break
    return runs_of(results)


def begin_further(bench: Bench, plan: PrecisionPlan) -> None:
    """Begin the engine of ``plan`` and those that :func:`over_processes` will ask for, where they
    are not known; nothing in a run that has built none yet: it repeats another.
    """
    if isinstance(bench.opened, Restartable) and bench.engine and bench.engine.new_probes:
        asked = bench.engine, *_further(bench, bench.opened)
        begin(bench.opened, plan, copies=sum(not prober.knows(plan) for prober in asked))


def _further(bench: Bench, runner: Restartable) -> list[Prober]:
    numbers = range(2, 2 + FURTHER_PROCESSES)
    return [bench.prober_of(_InFurtherProcess(runner, number)) for number in numbers]


def unsteady(what: str, seen: Steadiness) -> Diagnosis:
    """The diagnosis of an engine whose runs decide differently; ``what`` names it."""
    bad, where = seen.runs - seen.passed, f" in {seen.processes} processes"
    span, differ = f"from {seen.best:.3g} to {times(seen.worst)}", ""
    if seen.broken:
        span = f"from {times(seen.best)} to no answer: one process ended {seen.broken}"
    elif seen.apart > 0.0:
        differ = (
            f"; answers to {seen.sample!r} lie up to {seen.apart:.2g} of the range of output "
            f"{seen.output!r} apart"
        )
    return Diagnosis(
        Cause.UNSTEADY,
        f"The {what} engine does not make up its mind: {bad} of {seen.runs} runs"
        f"{where if seen.processes > 1 else ''} miss the requirement ({span}{differ}). "
        f"{_CURE if seen.decides else _ROOM}",
    )


def note_unsteadiness(what: str, seen: Steadiness | None) -> list[Finding]:
    """A finding where runs differ, of an engine that is not called unsteady for it."""
    if seen is None or seen.steady:
        return []
    met = {0: "none", seen.runs: "all"}.get(seen.passed, str(seen.passed))
    worth = "the worst one counts" if 0 < seen.passed < seen.runs else "so nothing hangs on it"
    message = (
        f"{seen.differing} of {seen.runs} runs of the {what} engine gave other bits than the usual "
        f"(up to {seen.apart:.2g} of the range of output {seen.output!r}); {met} of them "
        f"met the requirement, {worth}"
    )
    return [Finding("unsteady", "", message)]


def runs_of(results: Sequence[ProbeResult]) -> Steadiness:
    """One engine's runs in several processes, scores by process."""
    seen = [r.steadiness for r in results if r.steadiness is not None]
    once = [r for r in results if r.steadiness is None]
    broken = next((str(r.verdict) for r in once if not r.worst), "")
    inside = next((s for s in seen if s.decides), None)
    widest = max(seen, key=lambda s: s.apart, default=Steadiness(0))
    scores = [inside.best, inside.worst] if inside is not None else [r.score for r in results]
    return Steadiness(
        runs=sum(s.runs for s in seen) + len(results) - len(seen),
        differing=sum(s.differing for s in seen),
        passed=sum(s.passed for s in seen) + sum(r.verdict.passed for r in once),
        best=min(scores),
        worst=max(scores),
        apart=widest.apart,
        output=widest.output,
        sample=widest.sample,
        processes=len(results),
        right=sum(r.verdict.passed for r in results),  # which is that of the worst runs
        broken=broken,
    )
