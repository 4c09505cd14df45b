"""Samples judged by every judge, the worst of them for each, a few samples in memory at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

from bisect_trt.core.lazy_arrays import MOST_BYTES
from bisect_trt.core.machine.stop import BudgetSpentError
from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.core.sample import Sample
from bisect_trt.probe.prober import Prober
from bisect_trt.probe.result import PanelResult, SampleResult, meets
from bisect_trt.stations.bench.bench import Bench

_CHUNK, _LARGE_CHUNK = 16, 64
"""So many samples go to one judge after the other; more where a judge's turn costs something, as an
engine's workers and the opening of sessions do."""

_CHUNK_BYTES = 16 << 20
"""Of a large chunk's samples."""

_AHEAD = 2
"""Samples are made while those before them are in work."""


def judge_all(
    bench: Bench,
    judges: Sequence[Prober],
    plan: PrecisionPlan,
    samples: Iterable[Sample],
    *,
    limit: float = math.inf,
    misses: int = 0,
    size: int = 1,
    of: int = 0,
) -> tuple[PanelResult, tuple[Sample, ...]]:
    """``plan`` on ``samples`` by every judge, the worst of them for each sample.

    Args:
        bench: knows which judge builds engines.
        judges: who runs the plan.
        plan: with the precision that a pin really runs in.
        samples: may be a generator, of which a few are in memory at a time.
        limit: how many tolerances each may use; if it is finite, the run ends once more than
            ``misses`` of them use more.
        misses: how many may.
        size: how many samples make a set that is judged together.
        of: how many sets there will be, for whoever waits; 0 where nobody knows.

    Returns:
        The results, and the samples that missed ``limit``.
    """
    names: list[str] = []
    results: list[SampleResult] = []
    missed: list[Sample] = []
    violating, began = 0, time.perf_counter()
    # A few samples are in memory at a time.
    for panel in _chunks(bench, judges, samples, size):
        left = misses - len(missed) // size
        found: list[PanelResult] = []
        asked = panel
        with _in_time(limit):
            for judge in judges:
                its = bench.plan_for(judge, plan)
                found.append(judge.judge(its, asked, limit=limit, misses=left, size=size))
                # What refuses a plan ends it for the next judge too.
                asked = asked[: len(found[-1].results) * size]
        if len(found) < len(judges):
            break
        shortest = min(len(f.results) for f in found)
        names += found[0].names[:shortest]
        together = zip(*(f.results[:shortest] for f in found), strict=True)
        for place, each in enumerate(together):
            results.append(max(each, key=lambda r: (not meets(r, limit), r.score)))
            violating += not meets(results[-1], min(1.0, limit))
            if not meets(results[-1], limit):
                missed += panel[place * size : (place + 1) * size]
        with _in_time(limit):
            bench.tell(_progress(len(results), of, violating, time.perf_counter() - began))
        if math.isfinite(limit) and len(missed) > misses * size:
            break
    return PanelResult(plan, tuple(names), tuple(results)), tuple(missed)


def _progress(done: int, of: int, violating: int, spent: float) -> str:
    """How far it is, in words; ``spent`` in seconds."""
    if not 0 < done < of:
        return f"{done} inputs or draws, {violating} violate"
    left = spent / done * (of - done)
    return f"{done} of {of} inputs or draws, {violating} violate, about {left:.0f} s left of these"


def _chunks(
    bench: Bench, judges: Sequence[Prober], samples: Iterable[Sample], size: int
) -> Iterator[list[Sample]]:
    """``samples`` in whole sets of ``size``, so many at once as the judges like."""
    stream = iter(samples)
    for first in stream:
        each = max(1, first.nbytes)
        if bench.engine in judges:
            at_once = _LARGE_CHUNK
        elif bench.in_turn:
            at_once = min(_LARGE_CHUNK, max(_CHUNK, _CHUNK_BYTES // each))
        else:
            # What is made for the reference is still there for the last judge.
            at_once = min(_CHUNK, max(_AHEAD, MOST_BYTES // each - _AHEAD))
        yield [first, *islice(stream, -(-at_once // size) * size - 1)]


@contextmanager
def _in_time(limit: float) -> Iterator[None]:
    """Where the time ends a measurement, what it has tested counts: the clock knows no outcome.
    Half a test, which ``limit`` makes it, is none.
    """
    try:
        yield
    except BudgetSpentError:
        if math.isfinite(limit):
            raise
