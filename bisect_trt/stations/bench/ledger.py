"""What a bench did, for whoever sums up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bisect_trt.core.finding import Finding
from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.probe.result import ProbeResult


@dataclass(frozen=True)
class Ledger:
    """Every probe in order, counts, versions.

    ``emulators`` are the names of the first and the second, ``judge`` the name of who has the last
    word. ``probes`` counts plans by runner, ``new_probes`` those that the journal did not answer.
    ``findings`` are what the bench itself had to say, ``further_rows`` counts single-layer runs of
    the search, ``refused`` are the plans that the search refused for copies of the inputs.
    """

    folder: Path
    log: tuple[ProbeResult, ...]
    emulators: tuple[str, str]
    judge: str
    probes: Mapping[str, int]
    new_probes: int
    engine_results: tuple[ProbeResult, ...]
    versions: Mapping[str, str]
    findings: tuple[Finding, ...] = ()
    further_rows: int = 0
    refused: frozenset[PrecisionPlan] = frozenset()

    def of(self, runner: str, plan: PrecisionPlan) -> ProbeResult | None:
        """What ``runner`` showed of ``plan`` on the given inputs; None if it was not asked."""
        found = (p for p in self.log if p.runner == runner and p.plan == plan and p.on_given)
        return next(found, None)

    def of_first(self, plan: PrecisionPlan) -> ProbeResult | None:
        """What the first emulator showed of ``plan``."""
        return self.of(self.emulators[0], plan)

    def worst_of(self, plan: PrecisionPlan, runners: Sequence[str]) -> ProbeResult | None:
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
        for probe in self.log:
            pins = probe.plan.pinned
            if not probe.on_given or probe.plan != base.with_pins(pins):
                continue
            if probe.verdict.passed:
                passed.setdefault(pins, set()).add(probe.runner)
            elif probe.runner in heard:
                refused.add(pins)
        sets = [p for p, by in passed.items() if by.issuperset(judges) and p not in refused]
        return min(sets, key=len, default=None)
