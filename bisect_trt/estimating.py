"""What a run would cost, said before it starts."""

from __future__ import annotations

import time
from dataclasses import dataclass

from bisect_trt.compare.requirements import load_metric, parse_requirements
from bisect_trt.graph.layers import list_layers
from bisect_trt.graph.load import load_model
from bisect_trt.inputs import input_specs, load_samples
from bisect_trt.precision import PrecisionPlan
from bisect_trt.runners.emulated import EmulatedRunner
from bisect_trt.sensitivity import affordable
from bisect_trt.settings import Settings


@dataclass(frozen=True)
class Estimate:
    """What a run would cost: ``probes`` is an expected count, ``seconds`` follows from one measured inference."""

    layers: int
    effect_runs: int
    probes: int
    seconds_per_probe: float
    seconds: float

    @property
    def sentence(self) -> str:
        """The estimate for a person."""
        return (
            f"{self.layers} layers, {self.effect_runs} single-layer runs and about {self.probes} probes of "
            f"{self.seconds_per_probe * 1e3:.0f} ms: about {self.seconds:.0f} s"
        )


def estimate(settings: Settings) -> Estimate:
    """Price a run without searching or writing anything: one emulated inference is measured, twice, the second counts."""
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
    # A set of k pins takes about four probes a pin to grow, and as many again to shrink and prove; k is taken as 2 % of n.
    probes = 6 + 8 * max(2, len(layers) // 50)
    return Estimate(len(layers), rows, probes, seconds, rows * seconds / 2 + (probes + 6) * seconds)
