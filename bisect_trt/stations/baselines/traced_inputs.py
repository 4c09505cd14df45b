"""The given inputs that the table of the layers is made from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from bisect_trt.core.errors import RunnerFailedError
from bisect_trt.core.precision import Precision
from bisect_trt.core.sample import Sample, evenly
from bisect_trt.numerics.blocks import largest_finite
from bisect_trt.numerics.rounding import LARGEST, rounded
from bisect_trt.probe.journal import Row
from bisect_trt.probe.result import meets
from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.case.case import Case

MOST_TRACED = 2
"""Each costs two inferences node by node: the table is made from so many inputs as a rule."""

_MORE = 2
"""Inputs beyond :data:`MOST_TRACED` for layers that leave the range on no other."""

_MOST_ASKED, _ASKED_S, _INFERENCES = 16, 8.0, 3.0
"""Of further inputs no more than these are asked where layers leave the range, nor more than fit
into so many seconds as a rule: node by node it takes about three inferences."""


def traced_inputs(case: Case, bench: Bench) -> list[Sample]:
    """Samples spread over the given ones; among them one with values that are not finite, where
    there is any, and those on which layers leave the precision's range that do not on the others:
    where infinities come from must not be missed, and outputs may hide them (a normalisation that
    divides by infinity gives zeros).

    Args:
        case: the given inputs.
        bench: knows how they do, and runs them node by node.
    """

    def is_finite(sample: Sample) -> bool:
        found = bench.prober.known(case.base, sample)
        return found is None or math.isfinite(found.score)

    chosen = list(evenly(case.samples, MOST_TRACED))
    if all(map(is_finite, chosen)):
        broken = next((s for s in case.samples if not is_finite(s)), None)
        chosen[-1:] = [broken] if broken is not None else chosen[-1:]
    taken = {sample.digest for sample in chosen}
    others = [s for s in case.samples if s.digest not in taken]
    asked = evenly(others, min(len(others), ranges_asked(case, bench.pace.usual_seconds)))
    beyond = _beyond(case, bench, asked)
    if not any(beyond.values()):
        return chosen
    beyond |= _beyond(case, bench, chosen)
    seen = set().union(*(beyond[s.digest] for s in chosen))
    for _ in range(_MORE):
        most = max(asked, key=lambda s: len(beyond[s.digest] - seen))
        if not beyond[most.digest] - seen:
            break
        chosen.append(most)
        seen |= beyond[most.digest]
    return chosen


def ranges_asked(case: Case, usual_seconds: float) -> int:
    """On how many given inputs, beyond those of the table, layers are asked for their range.

    Args:
        case: the inputs and the precision; BF16 has FP32's range.
        usual_seconds: what an inference usually takes.
    """
    if case.settings.precision is not Precision.FP16:
        return 0
    fitting = int(_ASKED_S / (_INFERENCES * usual_seconds))
    return max(0, min(len(case.samples) - MOST_TRACED, _MOST_ASKED, fitting))


def misses_within(case: Case, bench: Bench) -> bool:
    """Whether everything lowered misses a given input on which no layer exceeds the range.

    Args:
        case: the given inputs.
        bench: knows how they do, and runs them node by node.
    """
    known = [(s, bench.prober.known(case.base, s)) for s in case.samples]
    missed = [s for s, found in known if found is not None and not meets(found, 1.0)]
    beyond = _beyond(case, bench, evenly(missed, _MOST_ASKED))
    return any(not layers for layers in beyond.values())


def _beyond(case: Case, bench: Bench, samples: Sequence[Sample]) -> dict[str, set[str]]:
    """The layers that give finite values beyond the range, by the samples' digests; recalled from
    the journal where it is there.
    """
    precision = case.settings.precision
    names = set(case.names)
    found: dict[str, set[str]] = {}
    for number, sample in enumerate(samples):
        key = bench.prober.key("beyond the range", precision.value, sample.digest)
        known = bench.journal.recall(key)
        if known is None:
            bench.observer.progress(number, len(samples), f"ranges on {sample.name}")
            exact = bench.emulator.exact(sample, precision)
            layers = set[str]()
            with suppress(RunnerFailedError):  # as far as it comes: the table says what it means
                for name, _, values in exact:
                    if _leaves(largest_finite(values), precision):
                        layers.add(name)
            known = sorted(layers), b""
            bench.journal.record([Row(key, "beyond", known[0])])
        found[sample.digest] = names.intersection(known[0])
    return found


def _leaves(size: float, precision: Precision) -> bool:
    if size <= LARGEST[precision]:
        return False
    return bool(np.isinf(rounded(np.full(1, size, np.float32), precision)[0]))
