"""Samples judged one by one or in sets that are judged together, each run once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from threading import RLock

from bisect_trt.core.names import some_of
from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.core.sample import Sample
from bisect_trt.numerics.arrays import Arrays
from bisect_trt.probe.answers import Answers
from bisect_trt.probe.execution import Execution
from bisect_trt.probe.journal import Row
from bisect_trt.probe.result import SampleResult


class Sets:
    """What ``execution`` shows on sets of samples, or ``answers`` knows; these are read under
    ``lock``. ``on_inference`` hears after each how many were made, and of how many.
    """

    def __init__(
        self,
        execution: Execution,
        answers: Answers,
        lock: RLock,
        on_inference: Callable[[int, int], None],
    ) -> None:
        self._execution = execution
        self._answers = answers
        self._lock = lock
        self._on_inference = on_inference

    def judged(
        self, plan: PrecisionPlan, samples: Sequence[Sample], size: int, rows: list[Row]
    ) -> Iterator[tuple[str, SampleResult]]:
        """Each set's name and result, as it comes.

        Args:
            plan: what to run.
            samples: in whole sets.
            size: how many make a set that is judged together.
            rows: new answers are added to them.
        """
        sets = [samples[i : i + size] for i in range(0, len(samples), size)]
        collective = bool(self._execution.requirements.collective)
        with self._lock:
            known = {s.digest: self._answers.of(plan, s) for s in samples}
            told = [self._answers.of_all(plan, of) if collective else [] for of in sets]
        for place, of in enumerate(sets):  # what will be run again is judged again with its set
            if collective and any(known[s.digest] is None for s in of):
                told[place] = None
        # Draws may be equal, as rotations of a few token ids are: such are run once.
        new: dict[str, Sample] = {}
        for of, values in zip(sets, told, strict=True):
            for s in of:
                if values is None or known[s.digest] is None:
                    new.setdefault(s.digest, s)
        kept: dict[str, Arrays] | None = {} if collective else None
        asked_of = len(new)
        executed = self._execution.run(plan, list(new.values()), None, kept)
        for of, values in zip(sets, told, strict=True):
            found = []
            for sample in of:
                result = known[sample.digest]
                asked = values is None or result is None
                if asked and new.pop(sample.digest, None) is not None:
                    known[sample.digest] = result = next(executed)
                    rows.append(self._answers.row(plan, sample, result))
                    self._on_inference(asked_of - len(new), asked_of)
                assert result is not None
                found.append(result)
            if size == 1 and not collective:
                yield of[0].name, found[0]
                continue
            score, more = self._execution.score(plan, of, found, values, kept or {})
            rows += more
            yield some_of([s.name for s in of], 1), SampleResult.together(found, score)
