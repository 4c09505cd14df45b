"""The bisect and verify stations: from "everything lowered fails" to a small set of pins, each proved directly.

Three ways, best first: grow a set from the measured effects and shrink it; where growing stalls, bisect over all layers,
ordered by suspicion; and in any case verify the end, the set itself and each single removal, to a fixpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bisect_trt.precision import PrecisionPlan
from bisect_trt.prober import Prober, ProbeResult
from bisect_trt.search import find_pins
from bisect_trt.search.grow import Trial, grow
from bisect_trt.sensitivity import Sensitivity
from bisect_trt.verdict import Verdict

MAX_GROWTH_PROBES = 400


@dataclass(frozen=True)
class Bisection:
    """``pinned`` passes; ``proof`` maps each pin to the probe of the same set without it, which does not.

    ``complete`` is false if a pin could not be proved; ``violations`` counts verdicts that a monotone model cannot give.
    """

    pinned: frozenset[str]
    proof: Mapping[str, ProbeResult]
    complete: bool
    violations: int


class Bisector:
    """Searches with one prober; ``best`` is the smallest passing set so far, a usable answer at any time."""

    def __init__(self, prober: Prober, base: PrecisionPlan, layers: Sequence[str]) -> None:
        self._prober = prober
        self._base = base
        self._layers = list(layers)
        self.best: frozenset[str] | None = None

    def run(self, suspicion: Mapping[str, float], sensitivity: Sensitivity | None) -> Bisection:
        """Search and verify. All pins are known to pass, no pins to fail."""
        self.best = frozenset(self._layers)
        start: frozenset[str] = frozenset()
        if sensitivity is not None:
            start = self._grown(sensitivity, suspicion)
        if start and self._passes(start):
            self._search(sorted(start, key=self._layers.index), suspicion)
        else:
            self._search(self._layers, suspicion)
        return self._verified()

    def _grown(self, sensitivity: Sensitivity, suspicion: Mapping[str, float]) -> frozenset[str]:
        must = sensitivity.must_pin
        first = self._trials([must])[0]
        if first.vector is None and not must:
            first = Trial(must, first.passed, first.score, sensitivity.base)
        if math.isinf(first.score):
            finite = self._made_finite(suspicion) | must
            first = self._trials([finite])[0]
        grown = grow(first, sensitivity.effects, sensitivity.order, self._trials, max_trials=MAX_GROWTH_PROBES)
        return grown.pinned if grown.passed else frozenset()

    def _made_finite(self, suspicion: Mapping[str, float]) -> frozenset[str]:
        """The pins that are needed for finite outputs alone, whatever their error."""

        def probe(pinned: frozenset[str]) -> Verdict:
            result = self._probe(pinned)
            return Verdict.PASS if math.isfinite(result.score) else result.verdict

        return find_pins(self._layers, probe, suspicion=suspicion).pinned

    def _search(self, candidates: Sequence[str], suspicion: Mapping[str, float]) -> None:
        found = find_pins(candidates, lambda p: self._probe(p).verdict, suspicion=suspicion)
        if found.feasible:
            self._improve(found.pinned)

    def _verified(self) -> Bisection:
        assert self.best is not None
        pinned, violations = self.best, 0
        proof: dict[str, ProbeResult] = {}
        while True:
            if not self._passes(pinned):
                return Bisection(pinned, proof, False, violations)
            proof = {}
            superfluous = None
            for name in sorted(pinned, key=self._layers.index):
                result = self._probe(pinned - {name})
                if result.verdict.passed:
                    superfluous = name
                    break
                proof[name] = result
            if superfluous is None:
                return Bisection(pinned, proof, True, violations)
            violations += 1
            pinned = pinned - {superfluous}

    def _probe(self, pinned: frozenset[str]) -> ProbeResult:
        result = self._prober.probe(self._base.with_pins(pinned))
        if result.verdict.passed:
            self._improve(pinned)
        return result

    def _passes(self, pinned: frozenset[str]) -> bool:
        return self._probe(pinned).verdict.passed

    def _improve(self, pinned: frozenset[str]) -> None:
        if self.best is None or len(pinned) < len(self.best):
            self.best = pinned

    def _trials(self, sets: Sequence[frozenset[str]]) -> list[Trial]:
        results = self._prober.probe_many([self._base.with_pins(s) for s in sets])
        for pinned, result in zip(sets, results, strict=True):
            if result.verdict.passed:
                self._improve(pinned)
        return [Trial(s, r.verdict.passed, r.score, r.vector) for s, r in zip(sets, results, strict=True)]
