"""What a run would cost, said before it starts."""

from __future__ import annotations

import time
from dataclasses import dataclass

from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.graph.layers import list_layers
from bisect_trt.graph.load import load_model
from bisect_trt.numerics.requirements import load_metric, parse_requirements
from bisect_trt.report.pin_words import information_bound
from bisect_trt.runners.emulator.runner import EmulatedRunner
from bisect_trt.stations.samples import input_specs, load_samples
from bisect_trt.stations.sensitivity import affordable
from bisect_trt.stations.settings import Settings

_USUAL_SHARE, _LARGE_SHARE = 0.02, 0.1
_BASELINES, _PROBES_A_PIN = 6, 8
_START_S = 1.0
"""Loading, sessions, the second emulator and the report; a single-layer run walks half the network
node by node, about one probe.
"""


@dataclass(frozen=True)
class Estimate:
    """What a run would cost. ``probes`` is expected for a set of a fiftieth of the layers,
    ``fewest`` for one pin, ``most`` for a tenth of the layers; ``information_bound`` is the fewest
    yes-or-no answers that tell the expected set from the others; ``seconds`` follows from one
    measured inference.
    """

    layers: int
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
        return (
            f"{self.layers} layers, {self.effect_runs} single-layer runs and about {self.probes} "
            "probes of "
            f"{self.seconds_per_probe * 1e3:.0f} ms: about {self.seconds:.0f} s ({self.fewest} "
            f"probes for one pin, {self.most} for a tenth "
            f"of the layers; no search averages fewer than {self.information_bound:.0f} for the "
            "expected set)"
        )


def expected_probes(pins: int) -> int:
    """A set of k pins takes about four probes a pin to grow, and as many again to shrink and
    prove.
    """
    return _BASELINES + _PROBES_A_PIN * pins


def estimate(settings: Settings) -> Estimate:
    """Price a run without searching or writing anything: one emulated inference is measured, twice,
    the second counts.
    """
    model = load_model(settings.model)
    metrics = dict(load_metric(m) for m in settings.metrics)
    parse_requirements(settings.require, [o.name for o in model.proto.graph.output], metrics)
    samples = load_samples(settings.inputs, input_specs(model.proto))
    layers = [x.name for x in list_layers(model.proto) if settings.precision in x.precisions]
    runner = EmulatedRunner(model.proto, samples, settings.precision)
    seconds = 0.0
    for _ in range(2):
        began = time.perf_counter()
        for _ in runner.outputs(PrecisionPlan(settings.precision)):
            pass
        seconds = time.perf_counter() - began
    rows = len(affordable(layers, {}, seconds))
    usual, large = (
        min(len(layers), max(2, round(share * len(layers))))
        for share in (_USUAL_SHARE, _LARGE_SHARE)
    )
    probes = expected_probes(usual)
    return Estimate(
        len(layers),
        rows,
        probes,
        expected_probes(1),
        expected_probes(large),
        information_bound(len(layers), usual),
        seconds,
        _START_S + rows * seconds + (probes + _BASELINES) * seconds,
    )
