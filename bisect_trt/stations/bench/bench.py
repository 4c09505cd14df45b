"""The bench: the open runners, the journal and the workers of one run, closed whatever happens.

It is the one mutable thing that the stations share; what they find travels in frozen records.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from threading import Lock

import numpy as np

from bisect_trt.core.errors import RunnerFailedError
from bisect_trt.core.finding import Finding
from bisect_trt.core.machine.time_budget import TimeBudget
from bisect_trt.core.names import counted
from bisect_trt.core.observer import Observer
from bisect_trt.core.precision import Precision, PrecisionPlan
from bisect_trt.core.sample import Sample, evenly
from bisect_trt.numerics.arrays import Arrays
from bisect_trt.numerics.requirements.error_sample import ErrorSample
from bisect_trt.numerics.scores import times
from bisect_trt.probe.journal import Journal, Row
from bisect_trt.probe.prober import Prober
from bisect_trt.probe.references import References
from bisect_trt.probe.result import ProbeResult
from bisect_trt.runners.base import Runner
from bisect_trt.runners.emulator.fleet import EmulatedFleet
from bisect_trt.runners.emulator.rtx_runner import RtxRunner
from bisect_trt.runners.emulator.runner import EmulatedRunner
from bisect_trt.runners.emulator.whole_model import WholeModelRunner
from bisect_trt.runners.ort.devices import CPU
from bisect_trt.stations.bench.engine_choice import EngineRunner, has_rtx_sums
from bisect_trt.stations.bench.ledger import Ledger
from bisect_trt.stations.bench.metric_reads import MetricReads
from bisect_trt.stations.bench.pace import Pace
from bisect_trt.stations.case.case import Case

_SECOND_SEES = 4

_A_TURN, _OF_MANY_NODES = 64, 128
"""Sessions of many nodes take 5 to 10 s to open: a whole test is asked about in a turn."""

_SILENT_S = 2.0
"""After so long a plan's inferences are told one by one."""


def references_of(case: Case, folder: Path) -> References:
    """The reference outputs of ``case``, kept in ``folder`` while the run lasts."""
    draws = not case.settings.fitted
    return References(case.reference, folder / "references.tmp", lasting=draws)


class Bench:
    """``case`` is what it works on, with the scales of the outputs. ``prober`` and ``second``
    emulate, in two arithmetics; ``engine`` builds, None without one.

    ``emulator`` runs in this process, ``fleet`` on workers where there are some; ``rtx_sums`` is
    true where layer tables follow the measured sums of TensorRT for RTX. ``time`` ends probes whose
    time is spent. ``in_turn`` if the second emulator and the reference make room for each other,
    and ``samples_a_turn`` how many samples are asked about before another's turn comes.
    ``tests`` counts those on fresh draws, and ``drawn_ahead`` those whose draws were made before
    they began. ``in_hand`` is the smallest set of pins that passed all
    that the robust search in work is made with, None where none did; ``refused`` are the plans that
    more copies of the inputs miss than may. ``pace`` says how long an
    inference takes.
    """

    def __init__(
        self,
        case: Case,
        observer: Observer,
        folder: Path,
        journal: Journal,
        opened: EngineRunner | None,
        emulator: EmulatedRunner,
        fleet: EmulatedFleet | None,
        time_budget: TimeBudget,
        references: References | None = None,
    ) -> None:
        self.observer = observer
        self.time = time_budget
        self.folder = folder
        self.journal = journal
        self.opened = opened
        turns = case.reference.turns
        self.in_turn = turns.apart
        self.samples_a_turn = _OF_MANY_NODES if turns.many_nodes else _A_TURN
        self.emulator, self.fleet = emulator, fleet
        self.references = references or references_of(case, folder)
        if emulator.device != CPU:
            self.references.use_for_drawn(self._on_gpu)
        self.log: list[ProbeResult] = []
        self.tests, self.drawn_ahead, self._told_at = 0, 0, time.monotonic()
        self.in_hand: frozenset[str] | None = None
        self.refused = set[PrecisionPlan]()
        self._variants: dict[int, set[str]] = {}
        self._gpu_lock = Lock()
        self.rtx_sums = has_rtx_sums(opened, case.settings.precision)
        self.case = self._case = case
        self._key = MetricReads(case.metrics, case.key, journal).key
        self._found: list[Finding] = []
        self._place: Callable[[], tuple[int, int]] = lambda: (self.plans_asked, 0)
        self.further_rows = 0
        self._best: int | None = None
        self._error_samples: dict[tuple[str, PrecisionPlan], ErrorSample] = {}
        other: Runner = (
            RtxRunner(emulator)
            if self.rtx_sums
            else WholeModelRunner(case.graph, emulator.constants.owner, case.reference.turns)
        )
        self.prober = self.prober_of(fleet or emulator, 1 if fleet is None else len(fleet))
        # Sums as TensorRT's take seconds an inference: a few inputs must do.
        self._given = case.samples
        few = tuple(evenly(case.samples, _SECOND_SEES))
        self.second_sees = few if self.rtx_sums else case.samples
        self.second = self.prober_of(other, given=self.second_sees)
        self.pace = Pace(case, emulator, journal, self.prober.key, beside_engine=opened is not None)
        workers = case.settings.workers
        self.engine = self.prober_of(opened, workers) if opened is not None else None

    def variants_of(self, stream: int) -> set[str]:
        """The digests of the variants of ``stream`` that were made, to be added to."""
        return self._variants.setdefault(stream, set())

    def variants_before(self, stream: int) -> Set[str]:
        """The digests of those of all streams in front of ``stream``, the search's among them: what
        it makes ahead, or anew, is the same whatever came later.
        """
        return frozenset().union(*(d for s, d in self._variants.items() if s < stream))

    def _on_gpu(self, sample: Sample) -> Arrays:
        """The FP32 outputs of what was drawn, where strict FP32 on the GPU emulates: ViT-L's take
        11 ms there and 330 ms on 6 cores.
        """
        with self._gpu_lock:
            return next(iter(self.emulator.outputs(PrecisionPlan(Precision.FP32), [sample])))

    @property
    def probers(self) -> list[Prober]:
        """All of them, the judge last."""
        return [p for p in (self.prober, self.second, self.engine) if p is not None]

    @property
    def judges(self) -> list[Prober]:
        """Who must pass a plan: the engine, or else both emulators."""
        return [self.engine] if self.engine is not None else [self.prober, self.second]

    @property
    def judge(self) -> Prober:
        """Who has the last word."""
        return self.engine or self.prober

    @cached_property
    def undefined(self) -> tuple[str, ...]:
        """The outputs whose reference is NaN somewhere on some given input."""
        key = self.prober.key("undefined", *(sample.digest for sample in self._given))
        known = self.journal.recall(key)
        if known is not None:
            return tuple(known[0])
        found = set[str]()
        for sample in self._given:
            outputs = self.references.of(sample)
            found |= {n for n, a in outputs.items() if a.dtype.kind == "f" and np.isnan(a).any()}
        self.journal.record_later(Row(key, "undefined", sorted(found)))
        return tuple(sorted(found))

    def plan_for(self, prober: Prober, plan: PrecisionPlan) -> PrecisionPlan:
        """``plan`` as ``prober`` takes it: an engine is told of pins, not of what they run in."""
        return plan.with_pins_in(Precision.FP32) if prober is self.engine else plan

    def error_sample(self, sample: Sample) -> ErrorSample:
        """The elements that stand for all of ``sample``'s outputs, chosen once; whatever is held,
        the same ones, since the journal's vectors are theirs.
        """
        return self.disturbed(sample, PrecisionPlan(self._case.settings.precision))

    def disturbed(self, sample: Sample, plan: PrecisionPlan) -> ErrorSample:
        """The elements of ``sample``'s outputs that ``plan`` disturbs most, and some at random."""
        key = (sample.digest, plan)
        if key not in self._error_samples:
            case, reference = self._case, self.references.of(sample)
            limit = max(256, min(4096, 4_000_000 // max(1, len(case.layers))))
            candidate: Arrays
            try:
                candidate = next(iter(self.emulator.outputs(plan, [sample])))
            except RunnerFailedError:  # a rounded index out of range: the plan's own probe tells
                candidate = reference
            chosen = ErrorSample(case.requirements, reference, candidate, limit)
            self._error_samples[key] = chosen
        return self._error_samples[key]

    def ledger(self) -> Ledger:
        """What was done until now."""
        engine = self.engine.runner if self.engine is not None else None
        return Ledger(
            self.folder,
            tuple(self.log),
            (self.prober.runner.name, self.second.runner.name),
            self.judge.runner.name,
            {p.runner.name: len(p.plans) for p in self.probers if p.plans},
            sum(p.new_probes for p in self.probers),
            tuple(self.engine.done.values()) if self.engine is not None else (),
            dict(self.prober.runner.versions) | (dict(engine.versions) if engine else {}),
            tuple(self._found),
            self.further_rows,
            frozenset(self.refused),
        )

    def tell_probes(self) -> None:
        """Let the observer hear of each probe from here on."""
        for prober in filter(None, (self.prober, self.engine)):
            prober.on_probe = self._tell

    def found(self, findings: Sequence[Finding]) -> tuple[Finding, ...]:
        """``findings``, told to the observer."""
        for finding in findings:
            self.observer.finding(finding.message)
        return tuple(findings)

    def noted(self, kind: str) -> bool:
        """Whether something of this kind was."""
        return any(found.kind == kind for found in self._found)

    def note(self, finding: Finding) -> None:
        """Tell the observer, once, and keep it for the ledger."""
        if finding not in self._found:
            self._found += self.found([finding])

    def _tell(self, result: ProbeResult) -> None:
        pins = len(result.plan.pinned)
        said = f"{result.verdict.value}, {times(result.score, result.verdict)}"
        note = f"{result.runner}, {counted(pins, 'pin')}: {said}"
        # Of a panel the search itself knows when it is passed.
        if result.on_given and result.verdict.passed and self._case.settings.fitted:
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
        """What was done last, beside the number of plans that were probed until now."""
        self._told_at = time.monotonic()
        self.observer.progress(*self._place(), note)

    def _tell_inference(self, judge: str, done: int, of: int) -> None:
        """How far a plan's inferences are, where nothing else was told for a while."""
        if time.monotonic() - self._told_at > _SILENT_S:
            self.tell(f"{judge}, {done} of {of} inputs or draws")

    @property
    def plans_asked(self) -> int:
        """How many plans were asked about, by all who judge."""
        return sum(len(p.plans) for p in self.probers)

    def prober_of(
        self, runner: Runner, workers: int = 1, given: Sequence[Sample] | None = None
    ) -> Prober:
        """A prober of ``runner`` on the given samples, or on ``given``, that shares the log.

        Args:
            runner: what executes the plans.
            workers: probes at a time.
            given: on which samples.
        """
        case = self._case
        # Only growing a set and telling an engine's FP32 need the signed errors of each probe.
        vectors = case.settings.fitted or self.opened is not None
        prober = Prober(
            runner,
            case.samples if given is None else given,
            self.references,
            case.requirements,
            self.journal,
            self._key,
            self.error_sample if vectors else None,
            workers,
            self.log,
            self.samples_a_turn if self.in_turn or runner is self.opened else 8,
            1.0 if case.requirements.of_sets else case.settings.share_of_given,
        )
        prober.before_each = self.time.check
        prober.on_inference = partial(self._tell_inference, runner.name)
        return prober
