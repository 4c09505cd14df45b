"""How long an emulated inference takes: counted from the model, and by a clock where that is far
off. How much is tested follows it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from bisect_trt.core.errors import RunnerFailedError
from bisect_trt.probe.journal import Journal, Row
from bisect_trt.runners.emulator.runner import EmulatedRunner
from bisect_trt.runners.ort.devices import CPU
from bisect_trt.stations.case.case import Case

_ON_GPU, _OF_THREE = 0.05, 0.4
"""Beside two cores; a third of a draw's inferences are the second emulator's."""

_FAR, _NOTICED_S = 16.0, 0.05
"""So many times what was counted, and at least so many seconds: it was not counted right."""

_AGAIN, _AGAIN_S = 5, 1.0


class Pace:
    """What an inference takes in the mean.

    Args:
        case: what is run.
        emulator: what runs it.
        journal: keeps what a clock said.
        key: the journal's, of the parts that name an answer.
        beside_engine: whether an engine judges, and the second emulator need not.
    """

    def __init__(
        self,
        case: Case,
        emulator: EmulatedRunner,
        journal: Journal,
        key: Callable[..., str],
        *,
        beside_engine: bool,
    ) -> None:
        self._case = case
        self._emulator = emulator
        self._journal = journal
        self._key = key
        self._beside_engine = beside_engine
        self._took_s = 0.0

    @property
    def usual_seconds(self) -> float:
        """About what one of a draw's inferences takes in the mean, counted from the model: on a GPU
        a small part of it, but for those of a second emulator, which is on the CPU.
        """
        if not self._is_far:
            return self._counted_s
        return float(_FAR ** round(math.log(self._took_s, _FAR)))

    @property
    def _counted_s(self) -> float:
        usual = self._case.usual_seconds
        if self._emulator.device != CPU:
            usual *= _ON_GPU if self._beside_engine else _OF_THREE
        return usual

    def took(self, seconds: float) -> None:
        """Hear that an emulated inference took so long. Loops, and what stands behind shapes that
        follow from values, are not counted; only where that is far from what was counted does a
        clock decide, and by powers of 16.

        What is far is looked at again, and kept: a machine that was busy when a small network's
        first probes ran gave 117 pins tested on 25 draws where it otherwise gives 107 and 80.
        """
        self._took_s = seconds
        if self._is_far:
            self._took_s = min(seconds, self.timed_again())

    @property
    def _is_far(self) -> bool:
        return self._took_s >= max(_FAR * self._counted_s, _NOTICED_S)

    def timed_again(self) -> float:
        """An inference's seconds by the quickest of a few, each from the inputs on; of a slow one's
        there are fewer. Infinite where it fails.
        """
        sample, plan = self._case.samples[0], self._case.base
        key = self._key("took", plan.digest, sample.digest)
        known = self._journal.recall(key)
        if known is not None:
            return float(known[0])
        quickest, began = math.inf, time.perf_counter()
        for _ in range(_AGAIN):
            self._emulator.forget()
            before = time.perf_counter()
            try:
                next(iter(self._emulator.outputs(plan, [sample])))
            except RunnerFailedError:  # the probe has said so
                break
            now = time.perf_counter()
            quickest = min(quickest, now - before)
            if now - began > _AGAIN_S:
                break
        self._journal.record([Row(key, "took", quickest)])
        return quickest
