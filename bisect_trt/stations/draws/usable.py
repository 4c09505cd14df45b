"""The samples that something can be compared on: those with a reference, and a finite one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import islice, takewhile

import numpy as np

from bisect_trt.core.errors import RunnerFailedError
from bisect_trt.core.finding import Finding
from bisect_trt.core.sample import Sample
from bisect_trt.probe.journal import Row
from bisect_trt.runners.ort.side_by_side import side_by_side
from bisect_trt.stations.bench.bench import Bench

_IN_A_ROW, _OF_BUDGET = 20, 0.1


def usable(
    bench: Bench,
    samples: Iterator[Sample],
    count: int,
    but: frozenset[str] = frozenset(),
    what: str = "",
) -> Iterator[Sample]:
    """The first ``count`` whose reference can be computed and is finite where it should be;
    remembered, so that a repeated command need not ask the model. Gives up after many in a row that
    are not.

    Args:
        bench: where references come from.
        samples: read no further than ``count`` needs, whatever the number of cores: a function of
            the user's may make them.
        count: how many.
        but: digests of samples that are not usable.
        what: they are, for the note that there are no more of them; blank for none.
    """
    refused = 0
    while count:
        looked_at = 0
        for sample, key, known, fit in _looked_at(bench, islice(samples, count), but):
            looked_at += 1
            if not known:
                bench.journal.record_later(Row(key, "usable", fit))
            if fit:
                refused, count = 0, count - 1
                yield sample
            elif (refused := refused + 1) > _IN_A_ROW:
                if what:
                    message = (
                        f"{what}: no more were made, for of {refused} in a row each was a copy of "
                        "a given input, or the model cannot be run on it or gives nothing finite"
                    )
                    bench.note(Finding("draws", "", message))
                return
        if not looked_at:
            return


def check_runs(bench: Bench, samples: Sequence[Sample]) -> None:
    """Refuse samples that the model cannot be run on, before a search that they are no part of: a
    plan would be blamed for what the reference cannot do. Remembered, as by :func:`usable`. Takes
    no more than a tenth of a run's budget.

    Raises:
        RunnerFailedError: with ONNX Runtime's words; names the first such sample.
    """
    until = time.monotonic() + _OF_BUDGET * bench.time.left_s
    keys = {s.digest: bench.prober.key("runs", s.digest) for s in samples}
    new = [s for s in samples if bench.journal.recall(keys[s.digest]) is None]

    def look(sample: Sample) -> Sample:
        bench.references.of(sample)
        return sample

    in_time = takewhile(lambda _: time.monotonic() < until, new)
    for done, sample in enumerate(side_by_side(look, in_time, bench.references.at_once), 1):
        bench.journal.record_later(Row(keys[sample.digest], "runs", True))
        bench.observer.progress(done, len(new), f"{sample.name}, kept apart, can be run")


def _looked_at(
    bench: Bench, samples: Iterator[Sample], but: frozenset[str]
) -> Iterator[tuple[Sample, str, bool, bool]]:
    """Each with its key in the journal, whether that need not be told, and whether it is fit."""

    def told(sample: Sample) -> tuple[Sample, str, bool | None]:
        key = bench.prober.key("usable", sample.digest, *bench.undefined)
        if sample.digest in but:
            return sample, key, False
        found = bench.journal.recall(key)
        return sample, key, None if found is None else bool(found[0])

    def look(asked: tuple[Sample, str, bool | None]) -> tuple[Sample, str, bool, bool]:
        sample, key, fit = asked
        return sample, key, fit is not None, _has_reference(bench, sample) if fit is None else fit

    def room(asked: tuple[Sample, str, bool | None]) -> int:
        return bench.references.at_once(asked[0])

    for first in samples:
        yield look(told(first))
        at_once = bench.references.at_once(first)
        while bench.in_turn and (few := [told(s) for s in islice(samples, at_once)]):
            # All are done before another session takes its turn.
            yield from list(side_by_side(look, few, room))
        yield from side_by_side(look, map(told, samples), room)


def _has_reference(bench: Bench, sample: Sample) -> bool:
    bench.time.check()
    try:
        outputs = bench.references.of(sample)
    except RunnerFailedError:
        return False
    floats = {n: a for n, a in outputs.items() if a.dtype.kind == "f"}
    if not all(bool(np.isfinite(a).any()) or a.size == 0 for a in floats.values()):
        return False
    # A copy that has left what the model is made for says nothing of one that has not.
    new = [a for n, a in floats.items() if sample.drawn and n not in bench.undefined]
    return not any(bool(np.isnan(a).any()) for a in new)
