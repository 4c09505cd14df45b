"""What layers do alone, row by row: from the journal where it is there, else measured while there
is time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.core.sample import Sample
from bisect_trt.probe.journal import Row, RowBuffer
from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.case.case import Case

_FIRST_ROUND = 32
"""Layers are measured in rounds that double, each from the start of the network."""

EffectRow = tuple[float, NDArray[np.float32]]
"""A layer's score on one sample, and its signed errors."""


class EffectRows:
    """Layers measured on all samples: ``rows`` has each one's scores and signed errors, ``runs``
    counts the inferences made for them.

    Args:
        case: the model and the requirements.
        bench: runs each layer lowered alone.
        samples: those to measure on.
        lowered: the plan whose errors say which elements are looked at.
    """

    def __init__(
        self, case: Case, bench: Bench, samples: Sequence[Sample], lowered: PrecisionPlan
    ) -> None:
        self._case, self._bench, self._samples, self._lowered = case, bench, samples, lowered
        self.rows: dict[str, list[EffectRow]] = {}
        self.runs = 0
        self._began = time.monotonic()

    def take_while(
        self,
        order: Sequence[str],
        budget_s: float,
        probe_seconds: float,
        worth: Callable[[int], bool] = lambda _: True,
    ) -> None:
        """Measure layers in rounds of growing size for ``budget_s`` seconds; a round is no longer
        than what is left, by the last one's pace.

        Args:
            order: the layers, the first ones first.
            budget_s: in seconds.
            probe_seconds: about what one inference takes.
            worth: asked after each round but the first, which has to open sessions: whether to go
                on where so many can be measured in all.
        """
        deadline = time.monotonic() + budget_s
        a_layer = max(len(self._samples) * probe_seconds, 1e-6)
        size = max(1, min(_FIRST_ROUND, int(budget_s / 4.0 / a_layer)))
        done = 0
        while done < len(order):
            began = time.monotonic()
            fitting = int((deadline - began) / a_layer) if done else size
            asked = order[done : done + max(0, min(size, fitting))]
            if not asked or not self.take(asked, deadline):
                return
            now = time.monotonic()
            a_layer = max((now - began) / len(asked), 1e-6)
            done, size = done + len(asked), 2 * size
            if done > len(asked) and not worth(done + int((deadline - now) / a_layer)):
                return

    def take(self, layers: Sequence[str], deadline: float) -> bool:
        """Measure ``layers``; false where ``deadline``, by the monotonic clock, came before the
        last of them.
        """
        found: dict[str, list[EffectRow]] = {name: [] for name in layers}
        for sample in self._samples:
            if not self._on(sample, found, deadline):
                break
        complete = {n: rows for n, rows in found.items() if len(rows) == len(self._samples)}
        self.rows.update(complete)
        return len(complete) == len(found)

    def _on(self, sample: Sample, found: dict[str, list[EffectRow]], deadline: float) -> bool:
        """Add a row for ``sample`` to each layer; false where ``deadline`` ended it."""
        bench, lowered = self._bench, self._lowered
        keys = {name: _key(bench, sample, lowered, name) for name in found}
        missing = []
        for name, key in keys.items():
            known = bench.journal.recall(key)
            if known is None:
                missing.append(name)
            else:
                found[name].append((float(known[0]), np.frombuffer(known[1], np.float32)))
        buffer = RowBuffer(bench.journal)
        try:
            for name, score, vector in _effects(self._case, bench, sample, missing, lowered):
                buffer.add(Row(keys[name], "effect", score, vector.tobytes()))
                found[name].append((score, vector))
                self.runs += 1
                now = time.monotonic()
                expected = self._expected(deadline, now)
                bench.observer.progress(self.runs, expected, f"effect of {name} alone")
                if now > deadline:
                    return False
        finally:
            buffer.flush()
        return True

    def _expected(self, deadline: float, now: float) -> int:
        """How many runs there will be in all: every layer's, or as many as there is time for."""
        every = len(self._case.names) * len(self._samples)
        fitting = self.runs * max(0.0, deadline - now) / max(now - self._began, 1e-6)
        return min(every, self.runs + int(min(fitting, every)))


def _effects(
    case: Case, bench: Bench, sample: Sample, layers: Sequence[str], lowered: PrecisionPlan
) -> Iterator[tuple[str, float, NDArray[np.float32]]]:
    """(layer, score, signed errors) for each of ``layers`` lowered alone on ``sample``."""
    if not layers:
        return
    runner = bench.fleet or bench.emulator
    chosen = bench.disturbed(sample, lowered)
    for name, outputs in runner.effects(sample, case.settings.precision, layers):
        if outputs is None:
            yield name, math.inf, np.full(chosen.size, np.nan, np.float32)
        else:
            score = case.requirements.score(bench.references.of(sample), outputs)
            yield name, score, chosen.errors(outputs)


def _key(bench: Bench, sample: Sample, lowered: PrecisionPlan, layer: str) -> str:
    return bench.prober.key("effect", lowered.digest, sample.digest, layer)
