"""Everything that a run needs, opened: runners, cache, workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from threading import Lock
from typing import TypeVar, cast

import numpy as np

from bisect_trt.base.display import counted
from bisect_trt.base.errors import RunnerFailedError
from bisect_trt.base.interrupt import (
    Observer,
    StagelessObserver,
    StoppedError,
    TimeBudget,
    TimedObserver,
)
from bisect_trt.base.outcomes import Finding
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.evaluate.cache import CACHE, Cache, Row
from bisect_trt.evaluate.evaluator import Criteria, Evaluator
from bisect_trt.evaluate.references import References
from bisect_trt.evaluate.result import Evaluation
from bisect_trt.metrics.arrays import Arrays
from bisect_trt.metrics.error_sample import ErrorSample
from bisect_trt.metrics.requirements import times
from bisect_trt.model.cost import CostTable, estimated_table
from bisect_trt.runners.base import Runner
from bisect_trt.runners.device import CPU
from bisect_trt.runners.emulator import EmulatedRunner
from bisect_trt.runners.emulator_workers import EmulatorPool
from bisect_trt.runners.second_emulator import WholeModelRunner
from bisect_trt.steps.open_runners import (
    EngineRunner,
    Pace,
    emulator_device,
    fewer_hired,
    idle_options,
    open_emulator,
    open_emulator_pool,
    open_engine,
    timer_of,
)
from bisect_trt.steps.output_scales import check_parts, with_scales
from bisect_trt.steps.problem import Problem
from bisect_trt.steps.run_folder import claimed_folder, folder_of
from bisect_trt.steps.timing import Timer


@dataclass(frozen=True)
class RunStatistics:
    """Every evaluation in order, counts, versions.

    ``emulators``: the names of the first and the second.
    ``judge``: the name of the runner that has the last word.
    ``evaluations``: the number of plans by runner.
    ``new_evaluations``: how many of them the cache did not answer.
    ``refused``: the plans that failed on more copies than allowed.
    ``costs``: what plans cost in time.
    """

    folder: Path
    log: tuple[Evaluation, ...]
    emulators: tuple[str, str]
    judge: str
    evaluations: Mapping[str, int]
    new_evaluations: int
    engine_results: tuple[Evaluation, ...]
    versions: Mapping[str, str]
    findings: tuple[Finding, ...] = ()
    refused: frozenset[PrecisionPlan] = frozenset()
    costs: CostTable | None = None

    def of(self, runner: str, plan: PrecisionPlan) -> Evaluation | None:
        """The evaluation of ``plan`` by ``runner`` on the given inputs; None if there is none."""
        found = (p for p in self.log if p.runner == runner and p.plan == plan and p.on_given)
        return next(found, None)

    def of_first(self, plan: PrecisionPlan) -> Evaluation | None:
        """The evaluation of ``plan`` by the first emulator."""
        return self.of(self.emulators[0], plan)

    def worst_of(self, plan: PrecisionPlan, runners: Sequence[str]) -> Evaluation | None:
        """The worst evaluation of ``plan`` by any of ``runners``."""
        found = [p for p in self.log if p.plan == plan and p.runner in runners and p.on_given]
        return max(found, key=lambda r: r.score, default=None)

    def smallest_passing(self, base: PrecisionPlan, judges: Sequence[str]) -> frozenset[str] | None:
        """The smallest set of pins that every one of ``judges`` passed; None if there is none.

        Where they are emulators, neither emulator nor the search may have refused it.
        """
        passed: dict[frozenset[str], set[str]] = {}
        emulated = set(judges) <= set(self.emulators)
        refused = {plan.pinned for plan in self.refused} if emulated else set[frozenset[str]]()
        may_refuse = self.emulators if emulated else judges
        for one in self.log:
            pins = one.plan.pinned
            if not one.on_given or one.plan != base.with_pins(pins):
                continue
            if one.verdict.passed:
                passed.setdefault(pins, set()).add(one.runner)
            elif one.runner in may_refuse:
                refused.add(pins)
        sets = [p for p, by in passed.items() if by.issuperset(judges) and p not in refused]
        return min(sets, key=len, default=None)


Answer = TypeVar("Answer")

SAMPLES_A_TURN = 64
"""How many samples a session runs before it makes room for another of a large model."""


@dataclass(kw_only=True, eq=False, repr=False)
class Context:
    """The runners, the evaluators and the cache of a run, opened.

    ``opened``: the engine's runner, None where the emulators judge.
    ``emulator``: runs in this process; ``emulator_pool``: on workers, where there are some.
    ``evaluator``, ``second``: emulate in two arithmetics; ``engine``: builds.
    ``in_turn``: the second emulator and the reference are open in turn.
    ``tests``: the number of validations so far.
    ``in_hand``: the smallest set of pins that passed the whole search set so far.
    ``refused``: the plans that failed on more copies than allowed.
    ``pace``: how long an inference takes.
    ``timer``: times plans of the engine beside each other, None where nothing can.
    """

    problem: Problem
    observer: Observer
    folder: Path
    cache: Cache
    opened: EngineRunner | None
    emulator: EmulatedRunner
    emulator_pool: EmulatorPool | None
    time: TimeBudget
    references: References
    timer: Timer | None = None

    def __post_init__(self) -> None:
        problem = self.problem
        self.in_turn = problem.reference.is_large
        self.samples_a_turn = SAMPLES_A_TURN
        self.log: list[Evaluation] = []
        self.tests = 0
        self.in_hand: frozenset[str] | None = None
        self.refused = set[PrecisionPlan]()
        # By stream: no validation may use an input that the search or another one has used.
        self._augmented: dict[int, set[str]] = {}
        self._gpu_lock = Lock()
        self._key = problem.key
        self._findings: list[Finding] = []
        self.opening_findings = tuple[Finding, ...]()
        self._progress_at = time.monotonic()
        self._best: int | None = None
        self._error_samples: dict[tuple[str, PrecisionPlan], ErrorSample] = {}
        pool = self.emulator_pool
        self.evaluator = self.evaluator_of(pool or self.emulator, 1 if pool is None else len(pool))
        constants = self.emulator.constants.owner
        threads, large_bytes = problem.settings.threads or 0, problem.settings.limits.large_bytes
        self._whole = WholeModelRunner(problem.graph, constants, threads, large_bytes)
        self.second = self.evaluator_of(self._whole)
        self.engine = None
        if self.opened is not None:
            self.engine = self.evaluator_of(self.opened, problem.settings.workers)
        self.pace = Pace(
            problem, self.emulator, self.recalled, beside_engine=self.opened is not None
        )

    def augmented_of(self, stream: int) -> set[str]:
        """The digests of the augmented inputs that were made for ``stream``, to be added to."""
        return self._augmented.setdefault(stream, set())

    def augmented_before(self, stream: int) -> Set[str]:
        """The digests of the augmented inputs of all streams before ``stream``."""
        return frozenset().union(*(d for s, d in self._augmented.items() if s < stream))

    def on_gpu(self, sample: Sample) -> Arrays:
        """The FP32 outputs of a copy, which large models give much faster than on the CPU."""
        with self._gpu_lock:
            return next(iter(self.emulator.outputs(PrecisionPlan(Precision.FP32), [sample])))

    def engine_takes(self, sample: Sample) -> bool:
        """Whether the engine that judges takes inputs of these shapes; True without one."""
        return self.opened is None or self.opened.takes(sample)

    @property
    def evaluators(self) -> list[Evaluator]:
        """All evaluators, the judge last."""
        return [p for p in (self.evaluator, self.second, self.engine) if p is not None]

    @property
    def judges(self) -> list[Evaluator]:
        """The evaluators that must pass a plan: the engine, or else both emulators."""
        return [self.engine] if self.engine is not None else [self.evaluator, self.second]

    def make_room(self) -> None:
        """Close the sessions, before others of their size are opened; they open again when used."""
        self.emulator.release()
        self._whole.release()

    @property
    def opens_beside(self) -> bool:
        """Whether :func:`open_beside` has an engine: on a cluster this one's workers hold it."""
        return self.opened is None or self.problem.settings.ray is None

    @property
    def judge(self) -> Evaluator:
        """The evaluator that has the last word."""
        return self.engine or self.evaluator

    def recalled(self, what: str, parts: Sequence[str], compute: Callable[[], Answer]) -> Answer:
        """The plain data that ``compute`` returns, or the cache has for ``what`` on ``parts``."""
        key = self.evaluator.key(what, *parts)
        cached = self.cache.recall(key)
        if cached is not None:
            return cast(Answer, cached[0])
        answer = compute()
        self.cache.record_later(Row(key, what, answer))
        return answer

    @cached_property
    def costs(self) -> CostTable:
        """What plans cost in time, estimated at the shapes that engines are timed at."""
        problem = self.problem
        return estimated_table(
            problem.graph, problem.timed_sample.shapes, problem.settings.precision
        )

    @cached_property
    def undefined(self) -> tuple[str, ...]:
        """The outputs whose reference is NaN somewhere on some given input."""

        def names() -> list[str]:
            found = set[str]()
            for sample in self.problem.samples:
                outputs = self.references.of(sample).items()
                found |= {n for n, a in outputs if a.dtype.kind == "f" and np.isnan(a).any()}
            return sorted(found)

        digests = [sample.digest for sample in self.problem.samples]
        return tuple(self.recalled("undefined", digests, names))

    def plan_for(self, evaluator: Evaluator, plan: PrecisionPlan) -> PrecisionPlan:
        """``plan`` as ``evaluator`` takes it: an engine has its own precision for pins."""
        return plan.with_pins_in(Precision.FP32) if evaluator is self.engine else plan

    def error_sample(self, sample: Sample) -> ErrorSample:
        """The elements that stand for all of ``sample``'s outputs, under every plan."""
        return self.disturbed(sample, PrecisionPlan(self.problem.settings.precision))

    def disturbed(self, sample: Sample, plan: PrecisionPlan) -> ErrorSample:
        """The elements of ``sample``'s outputs that ``plan`` disturbs most, and some at random."""
        key = (sample.digest, plan)
        if key not in self._error_samples:
            problem, reference = self.problem, self.references.of(sample)
            # The signed errors of all layers together stay within 16 MB a sample.
            limit = max(256, min(4096, 4_000_000 // max(1, len(problem.layers))))
            candidate: Arrays
            try:
                candidate = next(iter(self.emulator.outputs(plan, [sample])))
            except RunnerFailedError:  # the plan's own evaluation reports it
                candidate = reference
            chosen = ErrorSample(problem.requirements, reference, candidate, limit)
            self._error_samples[key] = chosen
        return self._error_samples[key]

    def run_statistics(self) -> RunStatistics:
        """The run's statistics so far."""
        versions = dict(self.evaluator.runner.versions)
        if self.engine is not None:
            versions |= self.engine.runner.versions
        return RunStatistics(
            folder=self.folder,
            log=tuple(self.log),
            emulators=(self.evaluator.runner.name, self.second.runner.name),
            judge=self.judge.runner.name,
            evaluations={p.runner.name: len(p.plans) for p in self.evaluators if p.plans},
            new_evaluations=sum(p.new_evaluations for p in self.evaluators),
            engine_results=tuple(self.engine.done.values()) if self.engine is not None else (),
            versions=versions,
            findings=tuple(self._findings),
            refused=frozenset(self.refused),
            costs=self.costs,
        )

    def tell_evaluations(self) -> None:
        """Report each evaluation to the observer from here on."""
        for evaluator in filter(None, (self.evaluator, self.engine)):
            evaluator.on_evaluation = self._tell

    def noted(self, kind: str) -> bool:
        """Whether a finding of ``kind`` was noted."""
        return any(finding.kind == kind for finding in self._findings)

    def note(self, *findings: Finding) -> None:
        """Report each finding to the observer, once, and keep it for the run statistics."""
        for finding in findings:
            # Baselines may be measured twice.
            if finding not in self._findings:
                self._findings.append(finding)
                self.observer.finding(finding.message)

    def _tell(self, result: Evaluation) -> None:
        pins = len(result.plan.pinned)
        outcome = f"{result.verdict.value}, {times(result.score, result.verdict)}"
        # A robust search itself reports the sets that passed its search set.
        if result.on_given and result.verdict.passed and self.problem.settings.fitted:
            self._best = min(pins, self._best if self._best is not None else pins)
            self.observer.best(self._best)
        self.tell(f"{result.runner}, {counted(pins, 'pin')}: {outcome}")

    def tell(self, note: str) -> None:
        """Report what was done last, with the number of plans evaluated so far."""
        self._progress_at = time.monotonic()
        self.observer.progress(sum(len(p.plans) for p in self.evaluators), 0, note)

    def _tell_inference(self, judge: str, done: int, of: int) -> None:
        """Report a slow plan's inferences one by one."""
        if time.monotonic() - self._progress_at > 2.0:
            self.tell(f"{judge}, {done} of {of} inputs or copies")

    def evaluator_of(self, runner: Runner, workers: int = 1) -> Evaluator:
        """An evaluator of ``runner`` on the given samples that shares the log."""
        problem = self.problem
        # Growing a set, and recognising TF32 in an engine's FP32, need each evaluation's signed
        # errors.
        vectors = problem.settings.fitted or self.opened is not None
        criteria = Criteria(
            self.references,
            problem.requirements,
            1.0 if problem.requirements.of_sets else problem.settings.share_of_given,
            self.error_sample if vectors else None,
        )
        evaluator = Evaluator(runner, problem.samples, criteria, self.cache, self._key, self.log)
        evaluator.workers = workers
        turns = self.in_turn or runner is self.opened
        # Few samples are in memory at a time, unless it costs more to change the session.
        evaluator.at_once = self.samples_a_turn if turns else 8
        evaluator.before_each = self.time.check
        evaluator.on_inference = partial(self._tell_inference, runner.name)
        return evaluator


@contextmanager
def open_context(
    problem: Problem,
    observer: Observer,
    suffix: str = "",
    time_budget: TimeBudget | None = None,
) -> Iterator[Context]:
    """Open what the run needs.

    Raises:
        BadInputError: the folder cannot be used (see ``claimed_folder``).
        MachineError: the disk is full.
        RunnerUnavailableError: the runner or cluster asked for is not there.
        StoppedError: the user ended the block; what was answered is in the cache.
    """
    try:
        with ExitStack() as opened:
            yield _opened(problem, observer, suffix, time_budget or TimeBudget(None), opened)
    except StoppedError:
        raise
    except KeyboardInterrupt as error:
        raise StoppedError("run the same command again to go on from here") from error


@contextmanager
def open_beside(context: Context, problem: Problem) -> Iterator[Context]:
    """Open what judges another graph or precision of the same model in the same run.

    Folder, cache and references are those of ``context``, and so is the count of validations.
    At most half of the time that is left may be spent.

    Raises:
        RunnerUnavailableError: the engine that judges is not there any more.
    """
    time_budget = context.time.child(0.5)
    context.make_room()
    with ExitStack() as opened:
        engine = None
        if context.opened is not None:
            engine = open_engine(problem, context.folder / "caches")
        if engine is not None:
            opened.enter_context(closing(engine))
        inner = Context(
            problem=problem,
            observer=TimedObserver(StagelessObserver(context.observer), time_budget),
            folder=context.folder,
            cache=context.cache,
            opened=engine,
            emulator=open_emulator(problem, emulator_device(problem.settings)),
            emulator_pool=None,
            time=time_budget,
            references=context.references,
            timer=timer_of(engine, problem.settings, engines_beside=1),
        )
        inner._findings += context.opening_findings
        # Each validation of a run has inputs and a share of the risk of its own.
        inner.tests = context.tests
        inner._augmented = {stream: set(made) for stream, made in context._augmented.items()}
        try:
            yield inner
        finally:
            context.tests, context._augmented = inner.tests, inner._augmented


def _opened(
    problem: Problem,
    observer: Observer,
    suffix: str,
    time_budget: TimeBudget,
    opened: ExitStack,
) -> Context:
    """The context, whose parts ``opened`` closes."""
    settings, folder = problem.settings, folder_of(problem, suffix)
    device = emulator_device(settings)
    engine = open_engine(problem, folder / "caches")
    if engine is not None:
        opened.enter_context(closing(engine))
    cache = opened.enter_context(claimed_folder(problem, folder))
    emulator = open_emulator(problem, device)
    pool = open_emulator_pool(problem, emulator, device)
    if pool is not None:
        opened.enter_context(closing(pool))
    references = References(problem.reference, folder / "references.tmp")
    opened.enter_context(closing(references))
    check_parts(problem, references)
    problem, of_scales = with_scales(problem, references, cache)
    context = Context(
        problem=problem,
        observer=TimedObserver(observer, time_budget),
        folder=folder,
        cache=cache,
        opened=engine,
        emulator=emulator,
        emulator_pool=pool,
        time=time_budget,
        references=references,
        timer=timer_of(engine, settings),
    )
    if emulator.device != CPU and problem.reference.is_of(problem.graph):
        # References of given inputs stay with the CPU, whose FP32 is the definition.
        references.use_for_copied(context.on_gpu)
    context.note(*of_scales)
    if words := idle_options(settings, engine):
        context.note(Finding("no-engine" if engine is None else "idle-option", "", words))
    if cache.note:
        context.note(Finding("cache", CACHE, cache.note))
    if pool is not None and len(pool) < settings.workers:
        context.note(Finding("workers", "", fewer_hired(settings.workers, len(pool))))
    context.opening_findings = tuple(context._findings)
    return context
