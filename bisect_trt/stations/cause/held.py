"""What it costs that some layers are held, in FP32 or reduced, whatever the search would say."""

from __future__ import annotations

from dataclasses import replace

from bisect_trt.core.finding import Finding
from bisect_trt.core.names import counted, some_of
from bisect_trt.core.precision import PrecisionPlan
from bisect_trt.numerics.scores import times
from bisect_trt.probe.result import ProbeResult
from bisect_trt.stations.bench.bench import Bench
from bisect_trt.stations.case.case import Case

_MOST_TRIED = 16
_SAID = "emulated on the given inputs"
_SHOWN = 4


def note_held(case: Case, bench: Bench, answer: PrecisionPlan) -> None:
    """Say of ``answer`` which pins that ``--pin`` holds it does without, and how much better it
    would be with those that ``--lower`` holds.

    The first emulator tells, on the given inputs: a probe a held pin (sixteen at most) and one for
    the rest. Where it does not pass the answer itself, as it need not where an engine decides, it
    has nothing to say.

    Args:
        case: which layers are held.
        bench: what runs the plans, and keeps what is said.
        answer: the plan that is written.
    """
    asked_for = case.held_pins - case.unfit - case.source_fp32
    if not asked_for and not case.held_low:
        return
    base = replace(case.base, pin_precision=answer.pin_precision, held=frozenset())
    shown = bench.prober.probe(base.with_pins(answer.pinned))
    if not shown.verdict.passed:
        return
    held = [x.name for x in case.layers if x.name in asked_for]
    if held:
        tried = held[:_MOST_TRIED]
        plans = [base.with_pins(answer.pinned - {name}) for name in tried]
        results = bench.prober.probe_many(plans)
        needless = [n for n, r in zip(tried, results, strict=True) if r.verdict.passed]
        said = "none could be left out"
        if needless:
            said = f"the set passes without {some_of(needless, _SHOWN)}, each alone"
        asked = "" if len(tried) == len(held) else f" ({_MOST_TRIED} of them were tried)"
        bench.note(
            Finding(
                "held", held[0], f"--pin holds {counted(len(held), 'layer')}{asked}; {_SAID} {said}"
            )
        )
    if case.held_low:
        full = bench.prober.probe(base.with_pins(answer.pinned | case.held_low))
        bench.note(
            Finding(
                "held",
                min(case.held_low),
                f"--lower holds {counted(len(case.held_low), 'layer')}; {_SAID} the set uses "
                f"{times(shown.score)}, with them pinned too {times(full.score)}",
            )
        )


def blame_lowered(case: Case, every: ProbeResult) -> str:
    """What to add where even all other pins miss the requirement; empty where nothing is held, or
    where ``every`` layer pinned misses it too.
    """
    if not case.held_low or not every.verdict.passed:
        return ""
    return f" With what --lower holds pinned too the requirement is met ({times(every.score)})."
