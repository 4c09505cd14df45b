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
from enum import Enum

import numpy as np

from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.probe.prober import Prober, ProbeResult
from bisect_trt.stations.bisect import Bisection

DEFAULT_MAX_BUILDS = 8
MAX_SEARCHES = 4
MARGIN = 0.9
WORTHWHILE = 1.2
"""How much wider a limit must be to be worth another search and build."""
"""A scaled search aims a tenth below what the observed ratio asks for: the ratio moves a little
from plan to plan.
"""


class Fp32(str, Enum):
    """What an engine's FP32 turned out to be."""

    STRICT = "strict"
    TF32 = "tf32"
    OTHER = "other"

    def __str__(self) -> str:
        return self.value


def what_fp32_is(engine: ProbeResult, strict: ProbeResult, tf32: ProbeResult) -> Fp32:
    """Which emulated baseline the engine's FP32 errors look like, by their RMSE over the outputs.

    TF32 can only be recognised where it differs from FP32 tenfold (a model without matrix products
    cannot tell).
    """
    found, exact, rounded = (_relative_rmse(r) for r in (engine, strict, tf32))
    if not all(math.isfinite(e) for e in (found, exact, rounded)):
        return Fp32.OTHER
    if rounded > 10.0 * exact and rounded / 4.0 <= found <= rounded * 4.0:
        return Fp32.TF32
    return Fp32.STRICT if found <= max(30.0 * exact, 1e-6) else Fp32.OTHER


def agreement(one: ProbeResult, other: ProbeResult) -> float:
    """The cosine between two probes' sampled signed errors: near 1 if they make the same roundings;
    NaN if unknown.
    """
    if one.vector is None or other.vector is None or len(one.vector) != len(other.vector):
        return math.nan
    both = np.isfinite(one.vector) & np.isfinite(other.vector)
    a, b = one.vector[both].astype(np.float64), other.vector[both].astype(np.float64)
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / size if size > 0 else math.nan


def _relative_rmse(result: ProbeResult) -> float:
    """The worst output's RMSE over its range."""
    return max(
        (e.rmse / max(e.ref_max - e.ref_min, 1e-30) for e in result.worst.values()),
        default=math.nan,
    )


@dataclass(frozen=True)
class Judgement:
    """The engine's word on a plan. ``bisection`` is the search the plan came from, ``repaired`` the
    pins the engine added.

    ``limit`` is the share of the tolerance that the emulator had to keep to; ``builds`` counts
    those beyond the baselines. ``proof`` maps a pin to the engine's probe that failed without it,
    where ``--certify engine`` asked for that.
    """

    plan: PrecisionPlan
    result: ProbeResult
    bisection: Bisection | None
    limit: float
    builds: int
    repaired: frozenset[str]
    proof: dict[str, ProbeResult]
    out_of_budget: bool

    @property
    def passed(self) -> bool:
        """True if the engine built from the plan meets the requirements."""
        return self.result.verdict.passed


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
        self._max_builds = (
            max_builds if max_builds is not None else math.inf if certify else DEFAULT_MAX_BUILDS
        )
        self.tried: dict[frozenset[str], ProbeResult] = {}
        self._bisection: Bisection | None = None
        self._limit = 1.0

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
                if found is None or found.pinned in self.tried:
                    break
                self._bisection, self._limit, pins = found, limit, found.pinned
                result = self._build(pins)
                if result.verdict.passed:
                    pins = self._shrunk(pins, limit)
                    break
                limit = tightened(limit, result.score, self._emulated_score(pins), self._floors)
            if pins not in self.tried or not self.tried[pins].verdict.passed:
                pins = self._repaired(pins)
            if self._certify:
                pins, proof = self._certified(pins)
        except OutOfBuildsError:
            spent = True
        answer = self.so_far(out_of_budget=spent)
        return answer if answer.plan.pinned != pins else replace(answer, proof=proof)

    def so_far(self, out_of_budget: bool = False) -> Judgement:
        """The best plan tried until now, proofs apart."""
        answer, result = self.best()
        found = self._bisection
        added = answer - found.pinned if found is not None else answer
        return Judgement(
            self._base.with_pins(answer),
            result,
            found,
            self._limit,
            len(self.tried),
            added,
            {},
            out_of_budget,
        )

    def best(self) -> tuple[frozenset[str], ProbeResult]:
        """The smallest set that passed on the engine, else the one that missed least (none tried:
        all pins' baseline).
        """
        if not self.tried:
            self.tried[frozenset(self._ranked)] = self._engine.probe(
                self._base.with_pins(self._ranked)
            )
        passed = [(pins, r) for pins, r in self.tried.items() if r.verdict.passed]
        if passed:
            return min(passed, key=lambda x: len(x[0]))
        return min(self.tried.items(), key=lambda x: x[1].score)

    def _build(self, pins: frozenset[str]) -> ProbeResult:
        if pins not in self.tried:
            if len(self.tried) >= self._max_builds:
                raise OutOfBuildsError
            self.tried[pins] = self._engine.probe(self._base.with_pins(pins))
        return self.tried[pins]

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
            wider = matching_limit(self.tried[pins].score, self._emulated_score(pins), self._floors)
            wider = min(
                wider, MARGIN * self._emulated_score(frozenset())
            )  # without pins the engine is known to fail
            found = (
                self._search(wider)
                if wider > WORTHWHILE * limit and len(self.tried) < self._max_builds
                else None
            )
            if (
                found is None
                or len(found.pinned) >= len(pins)
                or not self._build(found.pinned).verdict.passed
            ):
                break
            self._bisection, self._limit, pins, limit = found, wider, found.pinned, wider
        return pins

    def _certified(self, pins: frozenset[str]) -> tuple[frozenset[str], dict[str, ProbeResult]]:
        """Each removal built: superfluous pins go, until a whole round finds none."""
        order = {name: i for i, name in enumerate(self._ranked)}
        proof: dict[str, ProbeResult] = {}
        while len(proof) < len(pins):
            names = sorted(pins, key=lambda n: -order[n])
            for place, name in enumerate(names):
                if place % self._engine.workers == 0 and math.isinf(
                    self._max_builds
                ):  # idle GPUs build the next removals already
                    ahead = names[place : place + self._engine.workers]
                    self._engine.probe_many([self._base.with_pins(pins - {n}) for n in ahead])
                result = self._build(pins - {name})
                if result.verdict.passed:
                    pins, proof = pins - {name}, {}
                else:
                    proof[name] = result
        return pins, proof


def tightened(
    limit: float,
    engine_score: float,
    emulated_score: float,
    floors: tuple[float, float] = (0.0, 0.0),
) -> float:
    """The share of the tolerance that the emulator must keep to, so that the engine meets the
    tolerance.

    What counts is the error above the floor that no pin removes, the all-pinned scores on
    (emulator, engine): the engine's excess is taken to be a multiple of the emulator's, and that
    multiple was just seen.
    """
    room = max(limit - floors[0], 0.0)
    if not math.isfinite(engine_score):
        return floors[0] + room / 2.0
    return min(floors[0] + 0.7 * room, matching_limit(engine_score, emulated_score, floors))


def matching_limit(
    engine_score: float, emulated_score: float, floors: tuple[float, float] = (0.0, 0.0)
) -> float:
    """What the emulator scores where the engine just meets the tolerance, by the ratio seen above
    the ``floors``; with a margin.
    """
    emulated_floor, engine_floor = floors
    allowed = max(1.0 - engine_floor, 0.0)
    excess = max(engine_score - engine_floor, 1e-9)
    seen = max(emulated_score - emulated_floor, 1e-9)
    return emulated_floor + MARGIN * seen * allowed / excess
