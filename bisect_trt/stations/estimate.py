"""What a run would cost, said before it starts."""

from __future__ import annotations

import time
from dataclasses import dataclass

from bisect_trt.core.memory import free_bytes, in_words, peak_bytes
from bisect_trt.core.observer import Observer
from bisect_trt.graph.load import weights_size
from bisect_trt.runners.emulator.runner import EmulatedRunner
from bisect_trt.search.facts import information_bound
from bisect_trt.stations.case import Case, load
from bisect_trt.stations.sensitivity import affordable
from bisect_trt.stations.settings import Settings

_USUAL_SHARE, _LARGE_SHARE = 0.02, 0.1
_BASELINES, _PROBES_A_PIN = 6, 8
_WORKER_BYTES = 150_000_000
_START_S = 1.0
"""Loading, sessions, the second emulator and the report; a single-layer run goes through half the
network node by node, about one probe."""


@dataclass(frozen=True)
class Estimate:
    """What a run would cost, for ``samples`` inputs by ``workers`` workers.

    ``memory_bytes`` is about the peak of all processes, ``free_bytes`` what there is, 0 where
    nobody says. ``probes`` is expected for a set of a fiftieth of the layers, ``fewest`` for one
    pin, ``most`` for a tenth of the layers; ``information_bound`` is the fewest yes-or-no answers
    that tell the expected set from the others; ``seconds`` follows from one measured inference.
    """

    layers: int
    samples: int
    workers: int
    memory_bytes: int
    free_bytes: int
    effect_runs: int
    probes: int
    fewest: int
    most: int
    information_bound: float
    seconds_per_probe: float
    seconds: float

    @property
    def sentence(self) -> str:
        """The estimate for a person."""
        inputs = "1 input" if self.samples == 1 else f"{self.samples} inputs"
        workers = "1 worker" if self.workers == 1 else f"{self.workers} workers"
        memory = f"about {in_words(self.memory_bytes)} of memory"
        if self.free_bytes:
            memory += f" ({in_words(self.free_bytes)} free)"
        return (
            f"{self.layers} layers, {inputs}, {workers}: about {self.probes} probes and "
            f"{self.effect_runs} single-layer runs in {self.seconds:.0f} s, {memory}."
        )


def _memory(case: Case) -> int:
    """About the peak of a run, from that of the inference just made: the second emulator holds the
    weights once more, a worker the model and its rounded weights.
    """
    weights = weights_size(case.graph.proto)
    own = peak_bytes() + weights
    workers = case.settings.workers
    return own + (workers * (3 * weights + _WORKER_BYTES) if workers > 1 else 0)


def expected_probes(pins: int) -> int:
    """A set of k pins takes about four probes a pin to grow, and as many again to shrink and
    prove.
    """
    return _BASELINES + _PROBES_A_PIN * pins


def estimate(settings: Settings) -> Estimate:
    """Price a run without searching or writing anything: one emulated inference is measured, twice,
    the second counts.

    Raises:
        BadInputError: what a run would refuse too.
    """
    case = load(settings, Observer())
    runner = EmulatedRunner(case.graph, settings.precision)
    seconds = 0.0
    for _ in range(2):
        began = time.perf_counter()
        for _ in runner.outputs(case.base, case.samples):
            pass
        seconds = time.perf_counter() - began
    count = len(case.names)
    rows = affordable(len(case.names), seconds)
    usual, large = (
        min(count, max(2, round(share * count))) for share in (_USUAL_SHARE, _LARGE_SHARE)
    )
    probes = expected_probes(usual)
    return Estimate(
        len(case.layers),
        len(case.samples),
        settings.workers,
        _memory(case),
        free_bytes() or 0,
        rows,
        probes,
        expected_probes(1),
        expected_probes(large),
        information_bound(count, usual),
        seconds,
        _START_S + rows * seconds + (probes + _BASELINES) * seconds,
    )
