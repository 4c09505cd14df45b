"""What it costs that some layers are held, in FP32 or reduced, whatever the search would say."""

from __future__ import annotations

from dataclasses import replace

from bisect_trt.core.finding import Finding
from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.numerics.requirements import times
from bisect_trt.stations.bench import Bench
from bisect_trt.stations.case import Case

_MOST_TRIED = 16
_SHOWN = 4


def note_held(case: Case, bench: Bench, answer: PrecisionPlan) -> None:
    """Say of ``answer`` which pins that ``--pin`` holds it does without, and how much better it
    would be with those that ``--lower`` holds.

    The first emulator tells, a probe a held pin (sixteen at most) and one for the rest.
    """
    base = replace(case.base, pin_precision=answer.pin_precision, held=frozenset())
    held = [x.name for x in case.layers if x.name in case.held_pins]
    if held:
        tried = held[:_MOST_TRIED]
        plans = [base.with_pins(answer.pinned - {name}) for name in tried]
        results = bench.prober.probe_many(plans)
        needless = [n for n, r in zip(tried, results, strict=True) if r.verdict.passed]
        said = "none could be left out"
        if needless:
            more = f" and {len(needless) - _SHOWN} more" if len(needless) > _SHOWN else ""
            said = f"the set passes without {', '.join(needless[:_SHOWN])}{more}, each alone"
        asked = "" if len(tried) == len(held) else f" ({_MOST_TRIED} of them were tried)"
        bench.note(Finding("held", held[0], f"--pin holds {_layers(len(held))}{asked}: {said}"))
    if case.held_low:
        shown = bench.prober.probe(base.with_pins(answer.pinned))
        full = bench.prober.probe(base.with_pins(answer.pinned | case.held_low))
        bench.note(
            Finding(
                "held",
                min(case.held_low),
                f"--lower holds {_layers(len(case.held_low))}: {times(shown.score)}; with them "
                f"pinned too it would be {times(full.score)}",
            )
        )


def _layers(count: int) -> str:
    return "1 layer" if count == 1 else f"{count} layers"


def blame_lowered(case: Case, bench: Bench, base: PrecisionPlan) -> str:
    """What to add where even all other pins miss the requirement; empty where nothing is held."""
    if not case.held_low:
        return ""
    every = bench.prober.probe(base.with_pins(x.name for x in case.layers))
    if not every.verdict.passed:
        return ""
    return (
        f" --lower holds {_layers(len(case.held_low))} that it takes: with them pinned too the "
        f"requirement is met ({times(every.score)})."
    )
