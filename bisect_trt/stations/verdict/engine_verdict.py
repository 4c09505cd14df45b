"""The engine's word on the emulator's answer: built, tested on fresh draws, searched again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from bisect_trt.core.holds import Holds
from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.core.sample import Sample
from bisect_trt.probe.prober import Prober
from bisect_trt.search.prefix import longer
from bisect_trt.stations.baselines.baselines import Baselines
from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.bench.engine_ahead import begin, give_up
from bisect_trt.stations.case.case import Case
from bisect_trt.stations.cause.sensitivity import suspicion_of
from bisect_trt.stations.cause.triage import Triage
from bisect_trt.stations.draws.evidence import Refusal
from bisect_trt.stations.draws.fresh_test import MAX_TESTS, next_test, set_size
from bisect_trt.stations.draws.holds import put_to_test
from bisect_trt.stations.engine.baselines import EngineBaselines
from bisect_trt.stations.engine.steadiness import begin_further
from bisect_trt.stations.plans.bisect import Bisection, bisect, known_strength
from bisect_trt.stations.plans.margins import MARGIN
from bisect_trt.stations.plans.rare_misses import as_searched
from bisect_trt.stations.verdict.build_wait import use_build_wait
from bisect_trt.stations.verdict.engine_judge import Emulated, EngineJudge, Judgement


def decide_on_engine(
    case: Case,
    bench: Bench,
    engine: Prober,
    emulated: Baselines,
    baselines: EngineBaselines,
    triage: Triage,
    first: Bisection | None,
) -> Judgement:
    """The engine's word, searching again and repairing until it passes or the budget is spent.

    The emulators' word on the answer is in the log too when this returns.

    Args:
        case: says how many builds may be spent.
        bench: what emulates.
        engine: what builds and decides.
        emulated: the emulators' baselines.
        baselines: the engine's.
        triage: the cause and the first limit.
        first: what was searched within that limit; None if even all pins miss it.
    """
    suspicion = suspicion_of(emulated.layers, triage.sensitivity.scores)
    robust = triage.unseen is not None and case.settings.pick is None
    emulators = _Emulators(case, bench, engine, emulated, triage, first)

    def meanwhile(pins: frozenset[str]) -> None:
        use_build_wait(case, bench, triage, emulated, triage.base.with_pins(pins))

    def tested(pins: frozenset[str]) -> Holds | None:
        if bench.tests >= MAX_TESTS:  # no confidence is left to spend
            return None
        test = next_test(case, bench)
        plan = triage.base.with_pins(pins)
        refused, holds = put_to_test(case, bench, [engine], plan, test, 1.0)
        if refused is not None:
            emulators.hear_refused(pins, refused)
        return holds

    asked = Emulated(emulators.search, emulators.score)
    if robust:
        asked = replace(asked, score_on_draws=emulators.score_on_draws, meanwhile=meanwhile)
    judge = EngineJudge(
        engine,
        triage.base,
        sorted(case.names, key=lambda n: -suspicion.get(n, -math.inf)),
        asked,
        (triage.pinned.score, baselines.pinned.score),
        case.settings.max_builds,
        case.settings.certify == "engine",
        tested if robust else None,
    )
    judgement = judge.decide(triage.limit)
    emulators.score(judgement.plan.pinned)
    return judgement


_NEXT_TO_NOTHING = 0.01
"""Of the tolerance."""


class _Emulators:
    """What the emulators say of sets, and their answers within shares of the tolerance: each is
    built next, and has as many pins as what fresh draws on the engine refused asks for.
    """

    def __init__(
        self,
        case: Case,
        bench: Bench,
        engine: Prober,
        emulated: Baselines,
        triage: Triage,
        first: Bisection | None,
    ) -> None:
        self._case, self._bench, self._engine = case, bench, engine
        self._emulated, self._triage = emulated, triage
        self._fewest = self._refusals = 0
        self._in_vain = False
        self._known = {(triage.limit, 0): first}

    def score(self, pins: frozenset[str]) -> float:
        """The worse score on the given inputs."""
        plan = self._triage.base.with_pins(pins)
        return max(p.probe(plan).score for p in (self._bench.prober, self._bench.second))

    def score_on_draws(self, pins: frozenset[str]) -> float:
        """The largest score over the given inputs and the draws that were searched with."""
        assert self._triage.unseen is not None
        known = self._triage.unseen.samples
        plan, size = self._triage.base.with_pins(pins), set_size(self._case)
        found = self._bench.prober.judge(plan, (*known.given, *known.redrawn), size=size)
        return found.worst[1]

    def search(self, limit: float) -> Bisection | None:
        """The answer within ``limit``; None where even all pins miss it, or would do no better on
        what refused the last one.
        """
        if self._in_vain:
            return None
        bench, triage, asked = self._bench, self._triage, (limit, self._fewest)
        if asked not in self._known:
            self._known[asked] = bisect(self._case, bench, self._emulated, triage, *asked)
        found = self._known[asked]
        if found is not None:  # if it is the answer, it is run in more processes
            answer = bench.plan_for(self._engine, triage.base.with_pins(found.pinned))
            give_up(bench.opened, answer)
            begin_further(bench, answer)
            if found.ranked:
                self._begin_next(found.pinned)
        return found

    def _begin_next(self, pins: frozenset[str]) -> None:
        """Begin the engine of the set that follows if fresh draws refuse ``pins``, as it mostly is:
        ViT-L's are refused twice, and waiting for each of its engines takes ten seconds.
        """
        plan = self._first(self._longer(pins, 1.0))
        if self._engine.new_probes and not self._engine.knows(plan):
            begin(self._bench.opened, plan, spare=True)

    def _longer(self, pins: frozenset[str], share: float) -> int:
        """How many of the ranking to go on with if ``pins`` are refused and may leave ``share``."""
        known = known_strength(self._case, self._triage)
        ranking = as_searched(self._case, self._triage.ranking)
        strength = [known.get(name, 0.0) for name in ranking]
        return longer(strength, len(pins), share, 2**self._refusals)

    def _first(self, count: int) -> PrecisionPlan:
        """The first so many of the ranking pinned, as the engine takes it."""
        pins = frozenset(as_searched(self._case, self._triage.ranking)[:count])
        return self._bench.plan_for(self._engine, self._triage.base.with_pins(pins))

    def hear_refused(self, pins: frozenset[str], refused: Refusal) -> None:
        """Hear what spoke against the engine of ``pins``: a set of no more pins would cost another
        build and be refused as well.
        """
        self._in_vain = self._in_vain or self._do_as_all_pins(pins, refused.samples)
        self._fewest = max(self._fewest, self._longer(pins, MARGIN / refused.score))
        self._refusals += 1
        give_up(self._bench.opened, self._first(self._fewest))

    def _do_as_all_pins(self, pins: frozenset[str], samples: Sequence[Sample]) -> bool:
        """Whether all pins leave as much of the error of ``samples`` as ``pins`` do, by the
        emulator: then no further pins can save them. RT-DETR's engine was built with 1,339 and
        1,349 pins after it was refused with 1,217, by draws on which those make no difference.
        """
        if not self._case.requirements.proportional:  # nobody knows how far its jumps are
            return False
        base, size = self._triage.base, set_size(self._case)
        plans = (base.with_pins(pins), base.with_pins(self._case.names))
        some, every = (self._bench.prober.judge(p, samples, size=size).results for p in plans)
        return all(s.score <= e.score + _NEXT_TO_NOTHING for s, e in zip(some, every, strict=True))
