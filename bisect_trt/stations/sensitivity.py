"""What each layer does to the outputs when it alone is lowered: measured, layer by layer, from one
exact history.

A layer that breaks the requirement alone must be pinned in every passing plan of a monotone model.
The signed effects of the others let the search predict sets. Each row is journalled as it comes, so
an interrupted pass goes on where it stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bisect_trt.core.errors import RunnerFailedError
from bisect_trt.core.observer import Observer
from bisect_trt.core.precision import Precision, PrecisionPlan
from bisect_trt.probe.journal import RunFolder
from bisect_trt.probe.prober import Prober
from bisect_trt.runners.base import Sample
from bisect_trt.runners.emulator.fleet import EmulatedFleet
from bisect_trt.runners.emulator.runner import EmulatedRunner

TIME_BUDGET_S = 120.0
"""Where one row for each layer would take longer, only the most suspicious layers get one."""


@dataclass(frozen=True)
class Sensitivity:
    """``effects``: each layer's signed errors in tolerances; ``scores``: its score when it alone is
    lowered.

    ``base`` is the error vector with everything lowered, ``order`` the norm to rank predictions by,
    ``runs`` how many rows were computed rather than recalled.
    """

    effects: Mapping[str, NDArray[np.float32]]
    scores: Mapping[str, float]
    base: NDArray[np.float32]
    order: float
    runs: int

    def under(self, limit: float) -> Sensitivity:
        """The same measurements in units of ``limit`` times the tolerance."""
        if limit == 1.0:
            return self
        effects = {name: row / np.float32(limit) for name, row in self.effects.items()}
        scores = {name: score / limit for name, score in self.scores.items()}
        return replace(self, effects=effects, scores=scores, base=self.base / np.float32(limit))

    @property
    def must_pin(self) -> frozenset[str]:
        """The layers that break the requirement alone."""
        return frozenset(name for name, score in self.scores.items() if not score <= 1.0)


def measure_sensitivity(
    prober: Prober,
    runner: EmulatedRunner | EmulatedFleet,
    samples: Sequence[Sample],
    references: Callable[[], Sequence[Mapping[str, NDArray[Any]]]],
    precision: Precision,
    layers: Sequence[str],
    folder: RunFolder,
    observer: Observer,
) -> Sensitivity:
    """One row for each of ``layers``, over all ``samples``; recalled from the journal where it is
    there.
    """
    rows: dict[str, list[NDArray[np.float32]]] = {name: [] for name in layers}
    scores = dict.fromkeys(layers, 0.0)
    runs = 0
    base = folder.recall(prober.key("base", precision.value))
    if base is None:
        sampler = prober.sampler
        assert sampler is not None
        try:
            outputs = runner.outputs(PrecisionPlan(precision))
            vector = np.concatenate([sampler.errors(i, o) for i, o in enumerate(outputs)])
        except RunnerFailedError:
            vector = np.full(sampler.size, np.nan, np.float32)
        folder.record(prober.key("base", precision.value), "base", sampler.order, vector.tobytes())
        base = (sampler.order, vector.tobytes())
    for number, sample in enumerate(samples):
        known = {
            name: folder.recall(prober.key("effect", precision.value, str(number), name))
            for name in layers
        }
        missing = [name for name, row in known.items() if row is None]
        if missing:
            sampler = prober.sampler
            assert sampler is not None
            for name, outputs_of_one in runner.effects(sample, precision, missing):
                if outputs_of_one is None:
                    score, row = math.inf, np.full(sampler.size_of(number), np.nan, np.float32)
                else:
                    score = prober.requirements.score(references()[number], outputs_of_one)
                    row = sampler.errors(number, outputs_of_one)
                folder.record(
                    prober.key("effect", precision.value, str(number), name),
                    "effect",
                    score,
                    row.tobytes(),
                )
                known[name] = (score, row.tobytes())
                runs += 1
                observer.progress(runs, len(missing) * len(samples), f"effect of {name} alone")
        for name, found in known.items():
            if found is not None:
                scores[name] = max(scores[name], float(found[0]))
                rows[name].append(np.frombuffer(found[1], np.float32))
    effects = {
        name: np.concatenate(parts) for name, parts in rows.items() if len(parts) == len(samples)
    }
    return Sensitivity(effects, scores, np.frombuffer(base[1], np.float32), float(base[0]), runs)


def affordable(
    layers: Sequence[str], suspicion: Mapping[str, float], probe_seconds: float
) -> list[str]:
    """The layers that rows fit into the time budget for: all of them, or the most suspicious
    ones.
    """
    count = int(TIME_BUDGET_S / max(probe_seconds / 2.0, 1e-6))
    if count >= len(layers):
        return list(layers)
    chosen = set(sorted(layers, key=lambda n: -suspicion.get(n, -math.inf))[:count])
    return [name for name in layers if name in chosen]
