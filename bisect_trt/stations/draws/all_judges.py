"""Samples judged by every judge, the worst of them for each, a few samples in memory at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice

from bisect_trt.core.finding import Finding
from bisect_trt.core.lazy_arrays import MOST_BYTES
from bisect_trt.core.machine.stop import BudgetSpentError
from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.core.sample import Sample
from bisect_trt.numerics.scores import times
from bisect_trt.probe.prober import Prober
from bisect_trt.probe.result import PanelResult, SampleResult, meets
from bisect_trt.stations.bench.bench import Bench

_CHUNK, _FOR_ENGINES = 16, 64
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
    tally, began = _Tally(limit, size), time.perf_counter()
    panel: Sequence[Sample] = ()
    stream = iter(samples)
    try:
        # A few samples are in memory at a time.
        for panel in _chunks(bench, judges, stream, size):
            left = misses - len(tally.missed) // size
            found: list[PanelResult] = []
            asked = panel
            for judge in judges:
                its = bench.plan_for(judge, plan)
                found.append(judge.judge(its, asked, limit=limit, misses=left, size=size))
                # What refuses a plan ends it for the next judge too.
                asked = asked[: len(found[-1].results) * size]
            tally.add(panel, found[0].names, zip(*(f.results for f in found), strict=False))
            panel = ()
            bench.tell(
                _progress(len(tally.results), of, tally.violating, time.perf_counter() - began)
            )
            if math.isfinite(limit) and len(tally.missed) > misses * size:
                break
    except BudgetSpentError:
        if math.isfinite(limit):
            raise  # half a test is none
        # Where the time ends a measurement, what it has tested counts: the clock knows no outcome.
        if size == 1 and not judges[0].requirements.collective:
            _add_known(bench, judges, plan, panel, stream, tally)
    return PanelResult(plan, tuple(tally.names), tuple(tally.results)), tuple(tally.missed)


class _Tally:
    """The worst judge's result of each set of ``size`` samples; ``missed`` are samples that use
    more than ``limit`` tolerances, and ``violating`` counts sets that use more than 1.
    """

    def __init__(self, limit: float, size: int) -> None:
        self._limit, self._size = limit, size
        self.names: list[str] = []
        self.results: list[SampleResult] = []
        self.missed: list[Sample] = []
        self.violating = 0

    def add(
        self,
        samples: Sequence[Sample],
        names: Sequence[str],
        by_judge: Iterable[Sequence[SampleResult]],
    ) -> None:
        """Take what every judge found on each set, as far as the last one came.

        Args:
            samples: of the sets.
            names: of the sets.
            by_judge: the judges' results of each set.
        """
        for place, each in enumerate(by_judge):
            worst = max(each, key=lambda r: (not meets(r, self._limit), r.score))
            self.names.append(names[place])
            self.results.append(worst)
            self.violating += not meets(worst, min(1.0, self._limit))
            if not meets(worst, self._limit):
                self.missed += samples[place * self._size : (place + 1) * self._size]


def _add_known(
    bench: Bench,
    judges: Sequence[Prober],
    plan: PrecisionPlan,
    panel: Sequence[Sample],
    stream: Iterator[Sample],
    tally: _Tally,
) -> None:
    """Count what every judge was asked about before the time ended, up to the first sample that one
    was not: what one judge alone saw would count only where it missed. That it did is noted.
    """

    def known(sample: Sample) -> list[SampleResult]:
        found = (judge.known(bench.plan_for(judge, plan), sample) for judge in judges)
        return [result for result in found if result is not None]

    counted = 0
    with suppress(BudgetSpentError):  # further draws are not made
        for sample in chain(panel, stream):
            told = known(sample)
            if len(told) < len(judges):
                break
            tally.add([sample], [sample.name], [told])
            counted += 1
    missed = [(s.name, r.score) for s in panel[counted:] for r in known(s) if not meets(r, 1.0)]
    if missed:
        name, score = max(missed, key=lambda one: one[1])
        message = (
            f"the time ended before every judge was asked about {name}, which is not counted: by "
            f"one of them it misses ({times(score)})"
        )
        bench.note(Finding("budget", name, message))


def _progress(done: int, of: int, violating: int, spent: float) -> str:
    """How far it is, in words; ``spent`` in seconds."""
    if not 0 < done < of:
        return f"{done} judged, {violating} violate"
    left = spent / done * (of - done)
    return f"{done} of {of} judged, {violating} violate, about {left:.0f} s left of these"


def _chunks(
    bench: Bench, judges: Sequence[Prober], samples: Iterable[Sample], size: int
) -> Iterator[list[Sample]]:
    """``samples`` in whole sets of ``size``, so many at once as the judges like."""
    stream = iter(samples)
    for first in stream:
        each = max(1, first.nbytes)
        if bench.engine in judges:
            at_once = _FOR_ENGINES
        elif bench.in_turn:
            at_once = min(bench.samples_a_turn, max(_CHUNK, _CHUNK_BYTES // each))
        else:
            # What is made for the reference is still there for the last judge.
            at_once = min(_CHUNK, max(_AHEAD, MOST_BYTES // each - _AHEAD))
        yield [first, *islice(stream, -(-at_once // size) * size - 1)]
