"""What to do where the answer is not yet good."""

from __future__ import annotations

import shlex
from typing import Any

import pandas as pd

from bisect_trt.core.diagnosis import Cause
from bisect_trt.core.holds import CONFIDENCE, Holds, Robustness
from bisect_trt.core.names import counted
from bisect_trt.core.precision import Precision
from bisect_trt.numerics.confidence import draws_needed
from bisect_trt.report.record.record import Record
from bisect_trt.report.words.tone import is_nearly_all, tone

_FEW, _APART, _FAR, _WORTH_A_WORD = 0.25, 0.1, 4.0, 8
"""Of the given inputs: where no more ask for nearly all pins, or for half of some, they may be what
is unusual; not where copies miss more often by so much, nor where none misses by so many
tolerances: what misses by little asks for its pins as the others do."""

_BY_PINS = (Cause.OVERFLOW, Cause.ROUNDING, Cause.ACCUMULATION, Cause.UNKNOWN)
"""What pins were searched for."""


def next_step(result: Record) -> str:
    """What to do where the answer is not yet good, blank where it is."""
    odd = _odd_inputs(result) or _held_with_half(result) or _held_on_given(result)
    if tone(result) == "ok":
        return f"What next: {odd}." if odd else ""
    if result.cause in _BY_PINS and not result.passed and _engine_meets_in_fp32(result):
        return "What next: ship it in FP32, whose engine meets the requirement, or loosen that."
    if tone(result) != "unsure":
        return ""
    if result.interrupted:
        return "What next: run the same command again: it goes on from here."
    if result.out_of_time:
        return "What next: run the same command again, or with a larger --budget: it goes on."
    steps = []
    if is_nearly_all(result):
        if _meets_in_tf32(result):
            steps.append("run everything in TF32, which meets it on the given inputs")
        if fewer := _with_fewer(result):
            steps.append(fewer)
        if not steps:
            steps.append("ship it in FP32, or loosen the requirement")
    elif odd:
        steps.append(odd)
    if result.holds is not None and result.holds.word is not Robustness.ROBUST:
        if result.holds.fitted:
            steps.append("search without --robust 0")
        elif not any(metric.endswith("@all") for metric in result.metrics):
            # Of a metric of all inputs no number of them tells what it would be on others.
            plan = shlex.quote(f"{result.folder}/plan.json")
            more = f"give more inputs of the kind that it will meet{_how_many(result.holds)}"
            comma = "," if _how_many(result.holds) else ""
            on = f"{comma} and search on with --start-from {plan}"
            steps.append(more + (on if result.pinned else ""))
    return f"What next: {'; '.join(steps)}." if steps else ""


def _how_many(holds: Holds) -> str:
    """How many inputs speak for others by themselves, where their copies cannot."""
    enough = draws_needed(holds.wanted, CONFIDENCE)
    return "" if holds.has_margin or holds.set_size > 1 else f", {enough} in all"


def _engine_meets_in_fp32(result: Record) -> bool:
    """Whether the engine that decides was seen to, as a baseline."""
    if result.engine is None or result.outputs.empty or result.out_of_time or result.interrupted:
        return False
    ran = result.outputs["baseline"].eq(f"{result.runner} {Precision.FP32.value}")
    verdicts = result.outputs.loc[ran, "verdict"]
    return len(verdicts) > 0 and bool(verdicts.eq("pass").all())


def _meets_in_tf32(result: Record) -> bool:
    """Whether everything in TF32 was run, as a baseline, and met the requirement."""
    if result.outputs.empty or result.precision is Precision.TF32:
        return False
    ran = result.outputs["baseline"].str.removesuffix(", second emulator").str.split().str[-1]
    verdicts = result.outputs.loc[ran == Precision.TF32.value, "verdict"]
    return len(verdicts) > 0 and bool((verdicts == "pass").all())


def _odd_inputs(result: Record) -> str:
    """A few given inputs that ask for half of the pins or more, by the frontier, where nothing but
    their copies speaks for these; blank where there are none.
    """
    pins = len(result.plan.pinned)
    table = result.frontier
    if table.empty or "given_missed" not in table or pins < _WORTH_A_WORD:
        return ""
    missed = table["given_tested"] - table["given_passed"]
    few = (missed > 0) & (missed <= _FEW * table["given_tested"])
    few &= (table["pins"] <= pins / 2) & table["given_missed"].notna()
    few &= table["worst_score"] >= _FAR
    for kind in ("redrawn", "variants"):
        alike = table[f"{kind}_share"] >= table["given_share"] - _APART
        few &= alike | (table[f"{kind}_tested"] == 0)
    if not few.any():
        return ""
    row = table.assign(missed=missed)[few].sort_values(["missed", "pins"]).iloc[0]
    return _told_odd(row, str(row["given_missed"]), int(row["missed"]))


_TELLING = 10
"""Inputs, or sets of them, of which a row of the frontier says something: four sets that held were
followed by one of three that did not."""


def _held_with_half(result: Record) -> str:
    """A set on the frontier with half of the pins at most that held on all that its row looked at,
    blank where there is none: a prefix may hold more often than a longer one does, and what a row
    looks at bounds no share, which ``--pick`` does.
    """
    pins, table, holds = len(result.plan.pinned), result.frontier, result.holds
    if table.empty or holds is None or holds.fitted or pins < _WORTH_A_WORD:
        return ""
    held = (table["pins"] <= pins / 2) & (table["given_passed"] == table["given_tested"])
    for kind in ("redrawn", "variants"):
        held &= table[f"{kind}_passed"] == table[f"{kind}_tested"]
    looked_at = table["given_tested"] + table["redrawn_tested"] + table["variants_tested"]
    held &= looked_at >= _TELLING
    if not held.any():
        return ""
    row = table.assign(seen=looked_at)[held].sort_values("pins").iloc[0]
    seen = int(row["seen"])
    what = "inputs and copies" if holds.set_size == 1 else f"sets of {holds.set_size}"
    fewer = counted(int(row["pins"]), "pin")
    return (
        f"fewer may do: {fewer} held on all of {seen} {what} (frontier.csv, --pick "
        f"{holds.wanted:g})"
    )


_FEWER = 0.75
"""Of the answer's layers: so many at most are worth a word."""


def _held_on_given(result: Record) -> str:
    """How many layers hold on all given inputs, where copies of these ask for more; blank where
    that is nearly as many.
    """
    pins, table = len(result.plan.pinned), result.frontier
    if table.empty or not pins:
        return ""
    held = table[
        (table["given_passed"] == table["given_tested"]) & (table["pins"] <= _FEWER * pins)
    ]
    if held.empty:
        return ""
    row = held.sort_values("pins").iloc[0]
    few = counted(int(row["pins"]), "layer")
    return f"{few} hold on all {int(row['given_tested'])} given inputs, copies of them ask for more"


def _told_odd(row: pd.Series[Any], names: str, missed: int) -> str:
    near = "is a near tie, run without it" if missed == 1 else "are near ties, run without them"
    return (
        f"look at {names}: with {counted(int(row['pins']), 'pin')} no other of "
        f"{row['given_tested']} given inputs misses (if {'it' if missed == 1 else 'they'} {near})"
    )


def _with_fewer(result: Record) -> str:
    """What to do where some set on the frontier with fewer pins held on a given input, blank where
    none did: where it missed on a few, look at those.
    """
    if result.frontier.empty:
        return ""
    fewer = result.frontier[result.frontier["pins"] < len(result.plan.pinned)]
    some = fewer[fewer["given_passed"] > 0]
    if some.empty:
        return ""
    best = some.sort_values(["given_passed", "pins"], ascending=[False, True]).iloc[0]
    tested, names = best["given_tested"], best.get("given_missed")
    missed = tested - best["given_passed"]
    if isinstance(names, str) and 0 < missed <= _FEW * tested:
        return _told_odd(best, names, int(missed))
    if not missed:
        few = counted(int(best["pins"]), "layer")
        seen = f"all {counted(int(tested), 'given input')}"
        if result.holds is not None and result.holds.set_size > 1:
            seen = "the given inputs together"
        return f"take fewer: {few} hold on {seen} (frontier.csv, --pick SHARE)"
    return "take fewer pins, which hold on some inputs (frontier.csv, --pick SHARE)"
