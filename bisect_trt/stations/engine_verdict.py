"""Search on the emulator, decide on the engine: each probe of an engine is a build, so the search
is not made of them.

The emulator's answer is built once. If the engine disagrees, the emulator's tolerance is scaled by
the observed ratio and searched again, which costs no build; what is left is repaired and, on
request, proved by the engine's own probes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.probe.prober import Prober
from bisect_trt.probe.result import ProbeResult
from bisect_trt.search.one_minimal import one_minimal
from bisect_trt.search.tolerance_share import MARGIN, matching_limit, tightened
from bisect_trt.stations.baselines import Baselines
from bisect_trt.stations.bench import Bench
from bisect_trt.stations.bisect import Bisection, bisect
from bisect_trt.stations.case import Case
from bisect_trt.stations.engine_baselines import EngineBaselines
from bisect_trt.stations.sensitivity import suspicion_of
from bisect_trt.stations.triage import Triage

DEFAULT_MAX_BUILDS = 8
MAX_SEARCHES = 4
WORTHWHILE = 1.2
"""How much wider a limit must be to be worth another search and build."""


@dataclass(frozen=True)
class Judgement:
    """The engine's word on a plan. ``bisection`` is the search the plan came from, ``repaired`` the
    pins the engine added.

    ``builds`` counts those beyond the baselines. ``proof`` maps a pin to the engine's probe that
    failed without it, where ``--certify engine`` asked for that.
    """

    plan: PrecisionPlan
    result: ProbeResult
    bisection: Bisection | None
    builds: int
    repaired: frozenset[str]
    proof: dict[str, ProbeResult]
    out_of_budget: bool

    @property
    def passed(self) -> bool:
        """True if the engine built from the plan meets the requirements."""
        return self.result.verdict.passed

    @property
    def limit(self) -> float:
        """The share of the tolerance that the emulator had to keep to."""
        return self.bisection.limit if self.bisection is not None else 1.0


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
    known = {triage.limit: first}

    def search(limit: float) -> Bisection | None:
        if limit not in known:
            known[limit] = bisect(case, bench, emulated, triage, limit)
        return known[limit]

    def emulated_score(pins: frozenset[str]) -> float:
        plan = triage.base.with_pins(pins)
        return max(prober.probe(plan).score for prober in (bench.prober, bench.second))

    judge = EngineJudge(
        engine,
        triage.base,
        sorted(case.names, key=lambda n: -suspicion.get(n, -math.inf)),
        search,
        emulated_score,
        case.settings.max_builds,
        case.settings.certify == "engine",
        (triage.pinned.score, baselines.fp32.score),
    )
    judgement = judge.decide(triage.limit)
    emulated_score(judgement.plan.pinned)
    return judgement


class OutOfBuildsError(Exception):
    """The budget of builds is spent."""


class EngineJudge:
    """Decides with ``engine``; ``ranked`` are the layers, most suspicious first, that a repair pins
    next.

    ``search`` gives the emulator's answer within a share of the tolerance, None where even all pins
    miss it there; ``emulated_score`` scores a set of pins on the emulator; ``floors`` are the
    all-pinned scores on (emulator, engine).
    """

    def __init__(
        self,
        engine: Prober,
        base: PrecisionPlan,
        ranked: Sequence[str],
        search: Callable[[float], Bisection | None],
        emulated_score: Callable[[frozenset[str]], float],
        max_builds: int | None,
        certify: bool,
        floors: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        self._floors = floors
        self._engine = engine
        self._base = PrecisionPlan(base.base)
        self._ranked = list(ranked)
        self._search = search
        self._emulated_score = emulated_score
        self._certify = certify
        unbounded = math.inf if certify else DEFAULT_MAX_BUILDS
        self._max_builds = max_builds if max_builds is not None else unbounded
        self._tried: dict[frozenset[str], ProbeResult] = {}
        self._bisection: Bisection | None = None

    def decide(self, limit: float) -> Judgement:
        """Search within ``limit`` of the tolerance, build, and go on until the engine passes or the
        budget is spent.
        """
        pins: frozenset[str] = frozenset()
        proof: dict[str, ProbeResult] = {}
        spent = False
        try:
            for _ in range(MAX_SEARCHES):
                found = self._search(limit)
                if found is None or found.pinned in self._tried:
                    break
                self._bisection, pins = found, found.pinned
                result = self._build(pins)
                if result.verdict.passed:
                    pins = self._shrunk(pins, limit)
                    break
                emulated = self._emulated_score(pins)
                limit = tightened(limit, result.score, emulated, self._floors)
            if pins not in self._tried or not self._tried[pins].verdict.passed:
                pins = self._repaired(pins)
            if self._certify:
                pins, proof = self._certified(pins)
        except OutOfBuildsError:
            spent = True
        answer = self._so_far(out_of_budget=spent)
        return answer if answer.plan.pinned != pins else replace(answer, proof=proof)

    def _so_far(self, out_of_budget: bool) -> Judgement:
        """The best plan tried until now, proofs apart: the smallest that passed, else the one that
        missed least (none tried: all pins' baseline).
        """
        if not self._tried:
            everything = frozenset(self._ranked)
            self._tried[everything] = self._engine.probe(self._base.with_pins(everything))
        passed = [(pins, r) for pins, r in self._tried.items() if r.verdict.passed]
        if passed:
            answer, result = min(passed, key=lambda x: len(x[0]))
        else:
            answer, result = min(self._tried.items(), key=lambda x: x[1].score)
        found = self._bisection
        added = answer - found.pinned if found is not None else answer
        plan, builds = self._base.with_pins(answer), len(self._tried)
        return Judgement(plan, result, found, builds, added, {}, out_of_budget)

    def _build(self, pins: frozenset[str]) -> ProbeResult:
        if pins not in self._tried:
            if len(self._tried) >= self._max_builds:
                raise OutOfBuildsError
            self._tried[pins] = self._engine.probe(self._base.with_pins(pins))
        return self._tried[pins]

    def _repaired(self, pins: frozenset[str]) -> frozenset[str]:
        """``pins`` and the fewest further layers, in order of suspicion, with which the engine
        passes: galloping, then bisecting.
        """
        rest = [name for name in self._ranked if name not in pins]
        low, high = 0, max(2, len(pins) // 4)
        while high < len(rest) and not self._build(pins | frozenset(rest[:high])).verdict.passed:
            low, high = high, 4 * high
        high = min(high, len(rest))
        self._build(pins | frozenset(rest[:high]))
        while high - low > max(1, high // 8):
            middle = (low + high) // 2
            if self._build(pins | frozenset(rest[:middle])).verdict.passed:
                high = middle
            else:
                low = middle
        return pins | frozenset(rest[:high])

    def _shrunk(self, pins: frozenset[str], limit: float) -> frozenset[str]:
        """A smaller set that passes too: searched for within more of the tolerance, where the
        engine left much of it unused.
        """
        for _ in range(MAX_SEARCHES):
            emulated = self._emulated_score(pins)
            wider = matching_limit(self._tried[pins].score, emulated, self._floors)
            # Without pins the engine is known to fail.
            wider = min(wider, MARGIN * self._emulated_score(frozenset()))
            worthwhile = wider > WORTHWHILE * limit and len(self._tried) < self._max_builds
            found = self._search(wider) if worthwhile else None
            if found is None or len(found.pinned) >= len(pins):
                break
            if not self._build(found.pinned).verdict.passed:
                break
            self._bisection, pins, limit = found, found.pinned, wider
        return pins

    def _certified(self, pins: frozenset[str]) -> tuple[frozenset[str], dict[str, ProbeResult]]:
        """Each removal built: superfluous pins go, until a whole round finds none."""

        def ahead(sets: list[frozenset[str]]) -> None:
            self._engine.probe_many([self._base.with_pins(s) for s in sets])

        found = one_minimal(
            [name for name in reversed(self._ranked) if name in pins],
            self._build,
            lambda result: result.verdict.passed,
            ahead=ahead if math.isinf(self._max_builds) else None,  # idle GPUs build the next ones
            workers=self._engine.workers,
        )
        return found.pinned, found.proof
