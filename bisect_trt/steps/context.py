"""Everything that a run needs, opened: runners, cache, workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from threading import Lock

import numpy as np

from bisect_trt.base.display import counted
from bisect_trt.base.errors import RunnerFailedError
from bisect_trt.base.interrupt import Observer, StoppedError, TimeBudget, TimedObserver
from bisect_trt.base.limits import give_back
from bisect_trt.base.outcomes import Finding
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample, evenly
from bisect_trt.evaluate.cache import CACHE, Cache, Row
from bisect_trt.evaluate.evaluator import Evaluator
from bisect_trt.evaluate.references import References
from bisect_trt.evaluate.result import Evaluation
from bisect_trt.metrics.arrays import Arrays
from bisect_trt.metrics.error_sample import ErrorSample
from bisect_trt.metrics.requirements import times
from bisect_trt.runners.base import Runner
from bisect_trt.runners.concurrency import Holder
from bisect_trt.runners.device import CPU
from bisect_trt.runners.emulator import EmulatedRunner, RtxRunner
from bisect_trt.runners.emulator_workers import EmulatorPool
from bisect_trt.runners.second_emulator import WholeModelRunner
from bisect_trt.steps.open_runners import (
    EngineRunner,
    Pace,
    emulator_device,
    fewer_hired,
    has_rtx_sums,
    idle_options,
    open_emulator,
    open_emulator_pool,
    open_engine,
)
from bisect_trt.steps.open_runners import begin as begin_engine
from bisect_trt.steps.output_scales import check_parts, with_scales
from bisect_trt.steps.problem import Problem
from bisect_trt.steps.run_folder import MetricReads, claimed_folder, folder_of


@dataclass(frozen=True)
class RunStatistics:
    """Every evaluation in order, counts, versions.

    ``emulators`` are the names of the first and the second, ``judge`` the name of who has the last
    word. ``evaluations`` counts plans by runner, ``new_evaluations`` those that the cache did not
    answer. ``findings`` are what the context itself had to say, ``further_rows`` counts
    single-layer runs of the search, ``refused`` are the plans that the search refused for copies of
    the inputs.
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
    further_rows: int = 0
    refused: frozenset[PrecisionPlan] = frozenset()

    def of(self, runner: str, plan: PrecisionPlan) -> Evaluation | None:
        """What ``runner`` showed of ``plan`` on the given inputs; None if it was not asked."""
        found = (p for p in self.log if p.runner == runner and p.plan == plan and p.on_given)
        return next(found, None)

    def of_first(self, plan: PrecisionPlan) -> Evaluation | None:
        """What the first emulator showed of ``plan``."""
        return self.of(self.emulators[0], plan)

    def worst_of(self, plan: PrecisionPlan, runners: Sequence[str]) -> Evaluation | None:
        """The worst that any of ``runners`` showed of ``plan``."""
        found = [p for p in self.log if p.plan == plan and p.runner in runners and p.on_given]
        return max(found, key=lambda r: r.score, default=None)

    def smallest_passing(self, base: PrecisionPlan, judges: Sequence[str]) -> frozenset[str] | None:
        """The smallest set of pins that every one of ``judges`` passed, and no emulator nor the
        search refused where these are some of them; None if there is none.
        """
        passed: dict[frozenset[str], set[str]] = {}
        emulated = set(judges) <= set(self.emulators)
        refused = {plan.pinned for plan in self.refused} if emulated else set[frozenset[str]]()
        heard = self.emulators if emulated else judges
        for one in self.log:
            pins = one.plan.pinned
            if not one.on_given or one.plan != base.with_pins(pins):
                continue
            if one.verdict.passed:
                passed.setdefault(pins, set()).add(one.runner)
            elif one.runner in heard:
                refused.add(pins)
        sets = [p for p, by in passed.items() if by.issuperset(judges) and p not in refused]
        return min(sets, key=len, default=None)


_SECOND_SEES = 4

_A_TURN, _OF_MANY_NODES = 64, 128
"""Sessions of many nodes take 5 to 10 s to open: a whole test is asked about in a turn."""

_SILENT_S = 2.0
"""After so long a plan's inferences are told one by one."""


def references_of(problem: Problem, folder: Path) -> References:
    """The reference outputs of ``problem``, kept in ``folder`` while the run lasts."""
    copies = not problem.settings.fitted
    return References(problem.reference, folder / "references.tmp", lasting=copies)


class Context:
    """``problem`` is what it works on, with the scales of the outputs. ``evaluator`` and ``second``
    emulate, in two arithmetics; ``engine`` builds, None without one.

    ``emulator`` runs in this process, ``emulator_pool`` on workers where there are some;
    ``rtx_sums`` is true where layer tables follow the measured sums of TensorRT for RTX. ``time``
    ends evaluations whose time is spent. ``in_turn`` if the second emulator and the reference make
    room for each other, and ``samples_a_turn`` how many samples are asked about before another's
    turn comes. ``tests`` counts those on new copies. ``in_hand`` is the smallest set of
    pins that passed all that the validated search in work is made with, None where none did.
    ``refused`` are the plans that more copies of the inputs miss than may. ``pace`` says how long
    an inference takes.
    """

    def __init__(
        self,
        problem: Problem,
        observer: Observer,
        folder: Path,
        cache: Cache,
        opened: EngineRunner | None,
        emulator: EmulatedRunner,
        emulator_pool: EmulatorPool | None,
        time_budget: TimeBudget,
        references: References | None = None,
    ) -> None:
        self.observer = observer
        self.time = time_budget
        self.folder = folder
        self.cache = cache
        self.opened = opened
        turns = problem.reference.turns
        self.in_turn = turns.apart
        self.samples_a_turn = _OF_MANY_NODES if turns.many_nodes else _A_TURN
        self.emulator, self.emulator_pool = emulator, emulator_pool
        self.references = references or references_of(problem, folder)
        if emulator.device != CPU:
            self.references.use_for_copied(self._on_gpu)
        self.log: list[Evaluation] = []
        self.tests, self._told_at = 0, time.monotonic()
        self.in_hand: frozenset[str] | None = None
        self.refused = set[PrecisionPlan]()
        self._augmented: dict[int, set[str]] = {}
        self._gpu_lock = Lock()
        self.rtx_sums = has_rtx_sums(opened, problem.settings.precision)
        self.problem = self._problem = problem
        self._key = MetricReads(problem.metrics, problem.key, cache).key
        self._found: list[Finding] = []
        self._place: Callable[[], tuple[int, int]] = lambda: (self.plans_asked, 0)
        self.further_rows = 0
        self._best: int | None = None
        self._error_samples: dict[tuple[str, PrecisionPlan], ErrorSample] = {}
        other: Runner = (
            RtxRunner(emulator)
            if self.rtx_sums
            else WholeModelRunner(problem.graph, emulator.constants.owner, problem.reference.turns)
        )
        self.evaluator = self.evaluator_of(
            emulator_pool or emulator, 1 if emulator_pool is None else len(emulator_pool)
        )
        # Sums as TensorRT's take seconds an inference: a few inputs must do.
        self._given = problem.samples
        few = tuple(evenly(problem.samples, _SECOND_SEES))
        self.second_sees = few if self.rtx_sums else problem.samples
        self.second = self.evaluator_of(other, given=self.second_sees)
        self.pace = Pace(
            problem, emulator, cache, self.evaluator.key, beside_engine=opened is not None
        )
        workers = problem.settings.workers
        self.engine = self.evaluator_of(opened, workers) if opened is not None else None

    def augmented_of(self, stream: int) -> set[str]:
        """The digests of the augmented inputs of ``stream`` that were made, to be added to."""
        return self._augmented.setdefault(stream, set())

    def augmented_before(self, stream: int) -> Set[str]:
        """The digests of those of all streams in front of ``stream``, the search's among them: what
        it makes ahead, or anew, is the same whatever came later.
        """
        return frozenset().union(*(d for s, d in self._augmented.items() if s < stream))

    def _on_gpu(self, sample: Sample) -> Arrays:
        """The FP32 outputs of what was drawn, where strict FP32 on the GPU emulates: ViT-L's take
        11 ms there and 330 ms on 6 cores.
        """
        with self._gpu_lock:
            return next(iter(self.emulator.outputs(PrecisionPlan(Precision.FP32), [sample])))

    @property
    def evaluators(self) -> list[Evaluator]:
        """All of them, the judge last."""
        return [p for p in (self.evaluator, self.second, self.engine) if p is not None]

    @property
    def judges(self) -> list[Evaluator]:
        """Who must pass a plan: the engine, or else both emulators."""
        return [self.engine] if self.engine is not None else [self.evaluator, self.second]

    @property
    def judge(self) -> Evaluator:
        """Who has the last word."""
        return self.engine or self.evaluator

    @cached_property
    def undefined(self) -> tuple[str, ...]:
        """The outputs whose reference is NaN somewhere on some given input."""
        key = self.evaluator.key("undefined", *(sample.digest for sample in self._given))
        known = self.cache.recall(key)
        if known is not None:
            return tuple(known[0])
        found = set[str]()
        for sample in self._given:
            outputs = self.references.of(sample)
            found |= {n for n, a in outputs.items() if a.dtype.kind == "f" and np.isnan(a).any()}
        self.cache.record_later(Row(key, "undefined", sorted(found)))
        return tuple(sorted(found))

    def plan_for(self, evaluator: Evaluator, plan: PrecisionPlan) -> PrecisionPlan:
        """``plan`` as ``evaluator`` takes it: an engine is told of pins, not of what they run
        in."""
        return plan.with_pins_in(Precision.FP32) if evaluator is self.engine else plan

    def error_sample(self, sample: Sample) -> ErrorSample:
        """The elements that stand for all of ``sample``'s outputs, chosen once; whatever is held,
        the same ones, since the cache's vectors are theirs.
        """
        return self.disturbed(sample, PrecisionPlan(self._problem.settings.precision))

    def disturbed(self, sample: Sample, plan: PrecisionPlan) -> ErrorSample:
        """The elements of ``sample``'s outputs that ``plan`` disturbs most, and some at random."""
        key = (sample.digest, plan)
        if key not in self._error_samples:
            problem, reference = self._problem, self.references.of(sample)
            limit = max(256, min(4096, 4_000_000 // max(1, len(problem.layers))))
            candidate: Arrays
            try:
                candidate = next(iter(self.emulator.outputs(plan, [sample])))
            except (
                RunnerFailedError
            ):  # a rounded index out of range: the plan's own evaluation tells
                candidate = reference
            chosen = ErrorSample(problem.requirements, reference, candidate, limit)
            self._error_samples[key] = chosen
        return self._error_samples[key]

    def run_statistics(self) -> RunStatistics:
        """What was done until now."""
        engine = self.engine.runner if self.engine is not None else None
        return RunStatistics(
            self.folder,
            tuple(self.log),
            (self.evaluator.runner.name, self.second.runner.name),
            self.judge.runner.name,
            {p.runner.name: len(p.plans) for p in self.evaluators if p.plans},
            sum(p.new_evaluations for p in self.evaluators),
            tuple(self.engine.done.values()) if self.engine is not None else (),
            dict(self.evaluator.runner.versions) | (dict(engine.versions) if engine else {}),
            tuple(self._found),
            self.further_rows,
            frozenset(self.refused),
        )

    def tell_evaluations(self) -> None:
        """Let the observer hear of each evaluation from here on."""
        for evaluator in filter(None, (self.evaluator, self.engine)):
            evaluator.on_evaluation = self._tell

    def found(self, findings: Sequence[Finding]) -> tuple[Finding, ...]:
        """``findings``, told to the observer."""
        for finding in findings:
            self.observer.finding(finding.message)
        return tuple(findings)

    def noted(self, kind: str) -> bool:
        """Whether something of this kind was."""
        return any(found.kind == kind for found in self._found)

    def note(self, finding: Finding) -> None:
        """Tell the observer, once, and keep it for the run statistics."""
        if finding not in self._found:
            self._found += self.found([finding])

    def _tell(self, result: Evaluation) -> None:
        pins = len(result.plan.pinned)
        said = f"{result.verdict.value}, {times(result.score, result.verdict)}"
        note = f"{result.runner}, {counted(pins, 'pin')}: {said}"
        # Of a search set the search itself knows when it is passed.
        if result.on_given and result.verdict.passed and self._problem.settings.fitted:
            self._best = min(pins, self._best if self._best is not None else pins)
            self.observer.best(self._best)
        self.tell(note)

    @contextmanager
    def counting(self, place: Callable[[], tuple[int, int]]) -> Iterator[None]:
        """Meanwhile what is told is beside ``place``: what is done, and of how much, 0 where nobody
        knows.
        """
        before, self._place = self._place, place
        try:
            yield
        finally:
            self._place = before

    def tell(self, note: str) -> None:
        """What was done last, beside the number of plans that were evaluated until now."""
        self._told_at = time.monotonic()
        self.observer.progress(*self._place(), note)

    def _tell_inference(self, judge: str, done: int, of: int) -> None:
        """How far a plan's inferences are, where nothing else was told for a while."""
        if time.monotonic() - self._told_at > _SILENT_S:
            self.tell(f"{judge}, {done} of {of} inputs or copies")

    @property
    def plans_asked(self) -> int:
        """How many plans were asked about, by all who judge."""
        return sum(len(p.plans) for p in self.evaluators)

    def evaluator_of(
        self, runner: Runner, workers: int = 1, given: Sequence[Sample] | None = None
    ) -> Evaluator:
        """An evaluator of ``runner`` on the given samples, or on ``given``, that shares the log."""
        problem = self._problem
        # Only growing a set and telling an engine's FP32 need the signed errors of each evaluation.
        vectors = problem.settings.fitted or self.opened is not None
        evaluator = Evaluator(
            runner,
            problem.samples if given is None else given,
            self.references,
            problem.requirements,
            self.cache,
            self._key,
            self.error_sample if vectors else None,
            workers,
            self.log,
            self.samples_a_turn if self.in_turn or runner is self.opened else 8,
            1.0 if problem.requirements.of_sets else problem.settings.share_of_given,
        )
        evaluator.before_each = self.time.check
        evaluator.on_inference = partial(self._tell_inference, runner.name)
        return evaluator


def plans_of(context: Context, expected: int) -> Callable[[], tuple[int, int]]:
    """The plans that are evaluated from now on, and that they are a part of about ``expected``;
    where there are more, or a test has begun, nobody knows what is left.
    """
    begun, tests = context.plans_asked, context.tests

    def place() -> tuple[int, int]:
        done = context.plans_asked - begun
        known = done < expected and context.tests == tests
        return (done, expected) if known else (context.plans_asked, 0)

    return place


def let_go(problem: Problem, context: Context) -> None:
    """Close the sessions of the reference and the emulators: who asks for another plan finds them
    opened again.
    """
    for holder in (problem.reference, context.emulator, context.second.runner):
        if isinstance(holder, Holder):
            holder.release()
    give_back()


_ONLY_EMULATED = (
    "no input can be moved a little, only what the token ids look up, and an engine holds its "
    "tables as constants: roundings are perturbed on the emulators, and augmented inputs test "
    "the engine"
)


@contextmanager
def open_context(
    problem: Problem,
    observer: Observer,
    suffix: str = "",
    time_budget: TimeBudget | None = None,
    begin: Sequence[PrecisionPlan] = (),
) -> Iterator[Context]:
    """Open what the run needs.

    Raises:
        BadInputError: the folder cannot be used (see ``claimed_folder``).
        MachineError: the disk is full.
        RunnerUnavailableError: the runner or cluster asked for is not there.
        StoppedError: the user ended the block; what was answered is in the cache.
    """
    try:
        with _opened(problem, observer, suffix, time_budget, begin) as context:
            yield context
    except StoppedError:
        raise
    except KeyboardInterrupt as error:
        raise StoppedError("run the same command again to go on from here") from error


@contextmanager
def _opened(
    problem: Problem,
    observer: Observer,
    suffix: str,
    time_budget: TimeBudget | None,
    begin: Sequence[PrecisionPlan],
) -> Iterator[Context]:
    """As :func:`open_context`."""
    with ExitStack() as opened:
        folder = folder_of(problem, suffix)
        # Each waits a second or two for a child process.
        with ThreadPoolExecutor(1) as beside:
            asked = beside.submit(emulator_device, problem.settings)
            engine = open_engine(problem, folder / "caches")
            if engine is not None:
                opened.enter_context(closing(engine))
        device, findings = asked.result()
        cache = opened.enter_context(claimed_folder(problem, folder))
        timed = device != CPU and problem.settings.emulate_on == "auto"
        for plan in begin if cache.is_new and not timed else ():
            begin_engine(engine, plan)
        emulator, noted = open_emulator(problem, device, cache)
        emulator_pool = open_emulator_pool(problem, emulator, device)
        if emulator_pool is not None:
            opened.enter_context(closing(emulator_pool))
        clock = time_budget or TimeBudget(None)
        heard = TimedObserver(observer, clock)
        references = references_of(problem, folder)
        opened.enter_context(closing(references))
        check_parts(problem, references)
        problem, of_scales = with_scales(problem, references, cache)
        context = Context(
            problem, heard, folder, cache, engine, emulator, emulator_pool, clock, references
        )
        for finding in (*findings, *noted, *of_scales):
            context.note(finding)
        if engine is None and (words := idle_options(problem.settings)):
            context.note(Finding("no-engine", "", words))
        if cache.note:
            context.note(Finding("cache", CACHE, cache.note))
        if engine is not None and problem.moves_lookups:
            context.note(Finding("perturbed", "", _ONLY_EMULATED))
        if emulator_pool is not None and len(emulator_pool) < problem.settings.workers:
            context.note(
                Finding("workers", "", fewer_hired(problem.settings.workers, len(emulator_pool)))
            )
        yield context
