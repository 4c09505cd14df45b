"""What a search leaves behind: every distinct probe in order, and the proof of each pin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bisect_trt.core.verdict import Verdict


@dataclass(frozen=True)
class Probe:
    """One set of pins tried: its place in the order of probes (from 0), the pins, the verdict."""

    index: int
    pinned: frozenset[str]
    verdict: Verdict


@dataclass(frozen=True)
class PinSearch:
    """The result of a search.

    ``pinned`` is the best set seen to pass (all layers if none smaller did); ``feasible`` is false
    when pinning everything does not pass; ``certificate`` maps each pin to the probe that failed
    without it; ``complete`` is false when a budget ended the search, in which case ``pinned``
    passes but may hold pins without a certificate. ``rounds`` counts the rounds of parallel probes.
    """

    pinned: frozenset[str]
    feasible: bool
    complete: bool
    probes: tuple[Probe, ...] = ()
    certificate: Mapping[str, Probe] = field(default_factory=dict)
    rounds: int = 0
