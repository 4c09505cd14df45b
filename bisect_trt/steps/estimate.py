"""What a run would cost, said before it starts."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from bisect_trt.base.atomic_files import scratch
from bisect_trt.base.errors import RunnerFailedError
from bisect_trt.base.interrupt import Observer, TimeBudget
from bisect_trt.base.limits import in_words, peak_bytes, room_bytes
from bisect_trt.base.outcomes import InputKind
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample, evenly
from bisect_trt.evaluate.cache import Cache
from bisect_trt.evaluate.evaluator import Evaluator
from bisect_trt.evaluate.result import SearchSetResult
from bisect_trt.inputs.samples import ALIKE, NOT_COVERED
from bisect_trt.runners.base import Runner
from bisect_trt.runners.emulator import EmulatedRunner
from bisect_trt.search.find import information_bound
from bisect_trt.settings import Settings, within_threads
from bisect_trt.steps.baselines import MOST_TRACED, check_decisions, check_reference, ranges_asked
from bisect_trt.steps.context import Context
from bisect_trt.steps.failing_inputs import ranked_count
from bisect_trt.steps.golden import other_shapes
from bisect_trt.steps.memory_need import PROCESS, need_of_samples
from bisect_trt.steps.open_runners import emulator_device, open_emulator
from bisect_trt.steps.problem import Problem, load
from bisect_trt.steps.samples import augmented, movable, perturbs, wants_augmented
from bisect_trt.steps.search_set import search_copies
from bisect_trt.steps.select_robust import MOST_SHRUNK, SHRINK_EVALUATIONS
from bisect_trt.steps.sensitivity import affordable
from bisect_trt.steps.tradeoff import tradeoff_size
from bisect_trt.steps.validation_inputs import planned_test, set_size, spared

_BASELINES = 3
_USUAL = 0.25
"""The share of a ranking that a prefix usually needs."""

_FAILING, _PASSING = 0.1, 0.25
"""The part of a search set that a failing evaluation sees, and of the shrinking evaluations those
that pass."""

_EVALUATIONS_A_PIN = 8
"""To grow a set of k pins takes about four evaluations a pin, to shrink and prove it as many
again."""

FITTED_SHARE = 0.02
"""The pins of a set that is fitted to the given inputs, of all layers."""


@dataclass(frozen=True)
class Work:
    """Counts of what a run executes: ``traces`` of all layers, ``emulations`` by the first
    emulator, ``copied`` samples that were made (each with a reference and an emulation that are not
    counted there), ``second_asked`` inferences of the second emulator, ``rows`` of single layers,
    ``evaluations`` sets asked about.
    """

    traces: int
    emulations: int
    copied: int
    second_asked: int
    rows: int
    evaluations: int


def expected_evaluations(pins: int) -> int:
    """How many sets are asked about to find, shrink and prove a fitted one of so many pins."""
    return 2 * _BASELINES + _EVALUATIONS_A_PIN * pins


def expected_sets(problem: Problem) -> int:
    """How many sets of pins a search asks about, baselines apart."""
    layers = len(problem.names)
    if problem.settings.fitted:
        return _EVALUATIONS_A_PIN * max(2, round(FITTED_SHARE * layers))
    return round(2 * _steps(layers)) + _shrunk(layers)


def _steps(layers: int) -> float:
    """Of the search for a prefix."""
    return math.log2(max(2.0, _USUAL * layers))


def _shrunk(layers: int) -> int:
    """The sets that are asked about to make a prefix smaller."""
    return SHRINK_EVALUATIONS if _USUAL * layers <= MOST_SHRUNK else 0


def expected_work(
    problem: Problem,
    *,
    passes: bool,
    hopeless: bool,
    evaluation_seconds: float,
    usual_seconds: float,
) -> Work:
    """What a run of ``problem`` is expected to execute.

    Args: problem: the layers, the inputs and what is asked for. passes: whether everything reduced
        passes: then little is searched. hopeless: whether strict FP32 misses: then a run ends
        there. evaluation_seconds: what one emulated inference takes; it decides how many layers are
        measured. usual_seconds: what one usually takes; it decides the number of copies.
    """
    given, size, layers = len(problem.samples), set_size(problem), len(problem.names)
    test = planned_test(problem, 0, usual_seconds, last=problem.settings.fitted)
    kinds = movable(problem, emulated=True) + wants_augmented(problem)
    copies = kinds * test.copies * size
    held_out = len(problem.holdout)
    emulations = _BASELINES * given + held_out
    # One that is asked for ranges goes through the network once, not by two histories.
    traces = min(given, MOST_TRACED) + ranges_asked(problem, usual_seconds) // 2
    if hopeless:
        return Work(traces, emulations, 0, 0, 0, _BASELINES)
    if problem.settings.fitted:
        if passes:
            return Work(traces, emulations, copies, copies + 2 * given, 0, _BASELINES)
        rows = affordable(layers, evaluation_seconds * given) * given
        evaluations = 2 * _BASELINES + expected_sets(problem)
        return Work(
            traces, emulations + evaluations * given, copies, copies + 2 * given, rows, evaluations
        )
    made = kinds * search_copies(problem, usual_seconds)
    if passes:
        return Work(traces, emulations, made + copies, copies + 2 * given, 0, _BASELINES)
    search_set, steps = given + made, _steps(layers)
    prefix = search_set * (1.0 + steps / 2.0) + _FAILING * search_set * 1.5 * steps
    shrinking = _shrunk(layers) * search_set * (_PASSING + (1.0 - _PASSING) * _FAILING)
    tradeoff_rows, seen = tradeoff_size(layers, usual_seconds)
    emulations += round(prefix + shrinking) + tradeoff_rows * (seen + held_out)
    ranked = ranked_count(len(problem.layers))
    rows = ranked * affordable(layers, evaluation_seconds * ranked)
    evaluations = 2 * _BASELINES + expected_sets(problem) + tradeoff_rows
    return Work(traces, emulations, made + copies + seen, copies + 2 * given, rows, evaluations)


_LARGE_SHARE = 0.1
_REPORT_S = 0.5

_COPIES, _TIMED_S = 8, 1.0
"""So many copies are timed, or as many as take a second."""

_STREAM = 1000
"""Of copies that are thrown away."""

Done = TypeVar("Done")


@dataclass(frozen=True)
class Estimate:
    """What a run would cost, for ``samples`` inputs by ``workers`` workers.

    ``memory_bytes`` is about the peak of all processes, ``free_bytes`` what it may take, 0 where
    nobody says. ``evaluations`` is expected, ``fewest`` for a set of one pin that is fitted to the
    given inputs, ``most`` for one of a tenth of the layers; ``information_bound`` is the fewest
    yes-or-no answers that tell a fiftieth of the layers from the others; ``copies`` are the samples
    that are made to search and to test with. ``seconds`` follows from these counts and one measured
    inference of each kind, of which ``seconds_per_evaluation`` is a plan's on one sample; an
    engine's builds are not in it. ``unbounded_seconds`` are those without a budget. ``notes`` say
    what the inputs do not cover.
    """

    layers: int
    samples: int
    workers: int
    memory_bytes: int
    free_bytes: int
    sensitivity_runs: int
    evaluations: int
    fewest: int
    most: int
    information_bound: float
    copies: int
    seconds_per_evaluation: float
    seconds: float
    unbounded_seconds: float
    notes: Sequence[str] = ()

    @property
    def sentence(self) -> str:
        """The estimate for a person."""
        inputs = "1 input" if self.samples == 1 else f"{self.samples} inputs"
        workers = "1 worker" if self.workers == 1 else f"{self.workers} workers"
        memory = f"about {in_words(self.memory_bytes)} of memory"
        if self.free_bytes:
            memory += f" (there is room for {in_words(self.free_bytes)})"
        takes = f"{self.unbounded_seconds:.0f} s"
        if self.seconds < self.unbounded_seconds:
            takes += f" (the budget ends it after {self.seconds:.0f} s, with what it has)"
        return (
            f"{self.layers} layers, {inputs}, {workers}: about {self.evaluations} evaluations and "
            f"{self.sensitivity_runs} single-layer runs and {self.copies} copies in {takes}, "
            f"{memory}."
        )


@within_threads
def estimate(settings: Settings, observer: Observer) -> Estimate:
    """Price a run without searching or writing anything: an inference of each kind is measured, and
    the search's own figures say how many there will be.

    Raises:
        BadInputError: what a run would refuse too.
    """
    started = time.process_time()  # nearly all of it imports, in a command
    loaded, problem = _seconds(lambda: load(settings, observer))
    need = need_of_samples(problem.graph, settings, [*problem.samples, *problem.holdout]).bytes
    room = room_bytes(PROCESS) or 0  # before what is timed takes some of it
    observer.step("timed inferences")
    timed = _timed(problem, observer)
    work = expected_work(
        problem,
        passes=timed.passes,
        hopeless=timed.hopeless,
        evaluation_seconds=timed.inference,
        usual_seconds=timed.usual,
    )
    count = len(problem.names)
    usual, large = (
        min(count, max(2, round(share * count))) for share in (FITTED_SHARE, _LARGE_SHARE)
    )
    rows_s = work.rows * timed.alone
    seconds = (
        _REPORT_S
        + started
        + loaded
        + timed.opened
        + work.traces * timed.trace
        + work.emulations * timed.emulated
        + work.copied * (timed.made + timed.emulated)
        + work.second_asked * timed.second
        + rows_s
    )
    allowed = math.inf if settings.budget is None else 60.0 * settings.budget
    return Estimate(
        len(problem.layers),
        len(problem.samples),
        settings.workers,
        max(need, peak_bytes()),  # shapes that follow from values are not in the need
        room,
        work.rows,
        work.evaluations,
        expected_evaluations(1),
        expected_evaluations(large),
        information_bound(count, usual),
        work.copied,
        timed.inference,
        min(seconds, allowed),
        seconds,
        [f.message for f in problem.findings if f.kind in (NOT_COVERED, ALIKE)],
    )


@dataclass(frozen=True)
class _Timed:
    """Seconds: of opening the sessions, of an ``inference``, and with all that belongs to it of a
    sample ``made`` (with its reference), ``emulated`` and judged, judged by the ``second``
    emulator, gone through node by node (``trace``), with one layer reduced ``alone``. ``usual`` is
    the context's. ``passes`` if everything reduced does, on the given inputs and a few copies;
    ``hopeless`` if strict FP32 misses where no engine judges.
    """

    opened: float
    inference: float
    made: float
    emulated: float
    second: float
    trace: float
    alone: float
    usual: float
    passes: bool
    hopeless: bool


def _timed(problem: Problem, observer: Observer) -> _Timed:
    """Each kind as a run does it, in a folder that is thrown away."""
    emulator, _ = open_emulator(problem, emulator_device(problem.settings)[0], None)
    sample, plan = problem.samples[0], problem.base
    # Of hundreds of inputs some tell as much: this is no run.
    few = evenly(problem.samples, _COPIES)
    seen = replace(problem, samples=tuple(few))
    with scratch("estimate") as made, closing(Cache(Path(made))) as cache:
        context = Context(seen, observer, Path(made), cache, None, emulator, None, TimeBudget(None))
        judges = (context.evaluator, context.second)
        together = len(few) if problem.requirements.of_sets else 1
        # The second first: of many nodes it would close what the next is timed with.
        opened, given = _seconds(
            lambda: [judge.judge(plan, few, size=together) for judge in reversed(judges)]
        )
        other_shapes(problem, context.references.of(sample))
        if (logged := given[-1].logged) is not None:
            check_reference(logged, problem.requirements)
            check_decisions(seen, context, logged)
        strict = context.evaluator.judge(PrecisionPlan(Precision.FP32), few, size=together)
        inference, _ = _seconds(lambda: _outputs(emulator, plan, sample))
        list(perturbs(problem, context, _STREAM, 1, emulated=True))  # opens the reference again
        count = max(1, min(_COPIES, int(_TIMED_S / max(inference, 1e-6))))
        spent, copies = _seconds(
            lambda: list(perturbs(problem, context, _STREAM + 1, count, emulated=True)) or [sample]
        )
        (first_s, first), (second_s, second) = (
            _judged(problem, judge, plan, copies) for judge in judges
        )
        # What a search is made for: some copies that miss, where the given inputs pass.
        varied = context.evaluator.judge(plan, augmented(problem, context, _STREAM + 1, count))
        trace, _ = _seconds(lambda: _gone_through(emulator, plan, sample))
        some = evenly(problem.names, count)
        alone = partial(_each_alone, problem, context, sample, some)
        alone()  # opens the sessions of segments
        rows_s, _ = _seconds(alone)
        context.references.close()
        context.pace.took(inference)
    missed = sum(search_set.missed() for search_set in (first, second, varied))
    may = spared(problem, InputKind.GIVEN, len(few))
    hopeless = strict.missed() > may and problem.settings.runner == "emulated"
    passes = all(search_set.missed() <= may for search_set in given) and not missed
    made_s, emulated_s, asked_s = (s / len(copies) for s in (spent, first_s, second_s))
    # They share the inference that the layers' own begin in.
    row = max(0.0, rows_s - inference) / max(1, len(some))
    return _Timed(
        opened,
        inference,
        made_s,
        emulated_s,
        asked_s,
        trace,
        row,
        context.pace.usual_seconds,
        passes,
        hopeless,
    )


def _seconds(job: Callable[[], Done]) -> tuple[float, Done]:
    began = time.perf_counter()
    done = job()
    return time.perf_counter() - began, done


def _outputs(runner: Runner, plan: PrecisionPlan, sample: Sample) -> None:
    with suppress(RunnerFailedError):  # the run says what it means
        next(iter(runner.outputs(plan, [sample])))


def _judged(
    problem: Problem, judge: Evaluator, plan: PrecisionPlan, copies: Sequence[Sample]
) -> tuple[float, SearchSetResult]:
    """What judging ``copies`` takes, and shows."""
    if problem.reference.turns.many_nodes:  # who was asked in between had its sessions closed
        _outputs(judge.runner, plan, problem.samples[0])
    return _seconds(lambda: judge.judge(plan, copies))


def _each_alone(problem: Problem, context: Context, sample: Sample, layers: Sequence[str]) -> None:
    """What the effects of ``layers`` take."""
    reference = context.references.of(sample)
    with suppress(RunnerFailedError):
        for _, outputs in context.emulator.sensitivities(
            sample, problem.settings.precision, layers
        ):
            if outputs is not None:
                problem.requirements.score(reference, outputs)


def _gone_through(emulator: EmulatedRunner, plan: PrecisionPlan, sample: Sample) -> None:
    with suppress(RunnerFailedError):
        deque(emulator.trace(sample, plan), maxlen=0)
