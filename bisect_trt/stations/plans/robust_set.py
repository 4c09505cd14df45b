"""A set of pins, tested on fresh draws."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bisect_trt.core.holds import Holds
from bisect_trt.probe.result import ProbeResult


@dataclass(frozen=True)
class RobustSet:
    """``pinned`` with the tests that it passed. ``proof`` maps pins to a probe of the set without
    them that fails on some sample; ``limit`` is the share of the tolerance that it was held to.

    ``prefix`` is the length of the ranking's prefix that it comes from; ``ranked`` is true if not
    every pin is proved: the set was cut from the ranking.
    ``holds`` is None where fresh draws refused every set.
    """

    pinned: frozenset[str]
    proof: Mapping[str, ProbeResult]
    limit: float
    holds: Holds | None
    prefix: int
    ranked: bool
