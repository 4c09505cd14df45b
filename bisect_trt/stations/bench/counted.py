"""How far a search is, for people."""

from __future__ import annotations

from collections.abc import Callable

from bisect_trt.stations.bench.bench import Bench


def plans_of(bench: Bench, expected: int) -> Callable[[], tuple[int, int]]:
    """The plans that are probed from now on, and that they are a part of about ``expected``; where
    there are more, or a test has begun, nobody knows what is left.
    """
    begun, tests = bench.plans_asked, bench.tests

    def place() -> tuple[int, int]:
        done = bench.plans_asked - begun
        known = done < expected and bench.tests == tests
        return (done, expected) if known else (bench.plans_asked, 0)

    return place
