"""The first lines, and what to do next."""

from __future__ import annotations

import math
import shlex
from typing import Any

import pandas as pd

from bisect_trt.base.display import counted
from bisect_trt.base.outcomes import CONFIDENCE, Cause, Validation, ValidationVerdict
from bisect_trt.base.plan import Precision
from bisect_trt.metrics.requirements import times
from bisect_trt.metrics.statistics import copies_needed
from bisect_trt.report.record import Record
from bisect_trt.report.text import (
    is_lifted,
    is_nearly_all,
    of_one_input,
    tone,
    validation_sentences,
)

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
    if result.validation is not None and result.validation.word is not ValidationVerdict.VALIDATED:
        if result.validation.fitted:
            steps.append("search without --robust 0")
        elif not any(metric.endswith("@all") for metric in result.metrics):
            # Of a metric of all inputs no number of them tells what it would be on others.
            plan = shlex.quote(f"{result.folder}/plan.json")
            more = f"give more inputs of the kind that it will meet{_how_many(result.validation)}"
            comma = "," if _how_many(result.validation) else ""
            on = f"{comma} and search on with --start-from {plan}"
            steps.append(more + (on if result.pinned else ""))
    return f"What next: {'; '.join(steps)}." if steps else ""


def _how_many(validation: Validation) -> str:
    """How many inputs speak for others by themselves, where their copies cannot."""
    enough = copies_needed(validation.wanted, CONFIDENCE)
    return "" if validation.has_margin or validation.set_size > 1 else f", {enough} in all"


def _engine_meets_in_fp32(result: Record) -> bool:
    """Whether the engine that decides was seen to, as a baseline."""
    if result.engine is None or result.outputs.empty or result.out_of_time or result.interrupted:
        return False
    ran = result.outputs["baseline"].eq(f"{result.runner} {Precision.FP32.value}")
    verdicts = result.outputs.loc[ran, "outcome"]
    return len(verdicts) > 0 and bool(verdicts.eq("pass").all())


def _meets_in_tf32(result: Record) -> bool:
    """Whether everything in TF32 was run, as a baseline, and met the requirement."""
    if result.outputs.empty or result.precision is Precision.TF32:
        return False
    ran = result.outputs["baseline"].str.removesuffix(", second emulator").str.split().str[-1]
    verdicts = result.outputs.loc[ran == Precision.TF32.value, "outcome"]
    return len(verdicts) > 0 and bool((verdicts == "pass").all())


def _odd_inputs(result: Record) -> str:
    """A few given inputs that ask for half of the pins or more, by the trade-off curve, where
    nothing but their copies speaks for these; blank where there are none.
    """
    pins = len(result.plan.pinned)
    table = result.tradeoff
    if table.empty or "given_missed" not in table or pins < _WORTH_A_WORD:
        return ""
    missed = table["given_tested"] - table["given_passed"]
    few = (missed > 0) & (missed <= _FEW * table["given_tested"])
    few &= (table["pins"] <= pins / 2) & table["given_missed"].notna()
    few &= table["worst_score"] >= _FAR
    for kind in ("perturbed", "augmented"):
        alike = table[f"{kind}_share"] >= table["given_share"] - _APART
        few &= alike | (table[f"{kind}_tested"] == 0)
    if not few.any():
        return ""
    row = table.assign(missed=missed)[few].sort_values(["missed", "pins"]).iloc[0]
    return _told_odd(row, str(row["given_missed"]), int(row["missed"]))


_TELLING = 10
"""Inputs, or sets of them, of which a row of the trade-off curve says something: four sets that
held were followed by one of three that did not."""


def _held_with_half(result: Record) -> str:
    """A set on the trade-off curve with half of the pins at most that held on all that its row
    looked at, blank where there is none: a prefix may hold more often than a longer one does, and
    what a row looks at bounds no share, which ``--pick`` does.
    """
    pins, table, validation = len(result.plan.pinned), result.tradeoff, result.validation
    if table.empty or validation is None or validation.fitted or pins < _WORTH_A_WORD:
        return ""
    held = (table["pins"] <= pins / 2) & (table["given_passed"] == table["given_tested"])
    for kind in ("perturbed", "augmented"):
        held &= table[f"{kind}_passed"] == table[f"{kind}_tested"]
    looked_at = table["given_tested"] + table["perturbed_tested"] + table["augmented_tested"]
    held &= looked_at >= _TELLING
    if not held.any():
        return ""
    row = table.assign(seen=looked_at)[held].sort_values("pins").iloc[0]
    seen = int(row["seen"])
    what = "inputs and copies" if validation.set_size == 1 else f"sets of {validation.set_size}"
    fewer = counted(int(row["pins"]), "pin")
    return (
        f"fewer may do: {fewer} held on all of {seen} {what} (tradeoff.csv, --pick "
        f"{validation.wanted:g})"
    )


_FEWER = 0.75
"""Of the answer's layers: so many at most are worth a word."""


def _held_on_given(result: Record) -> str:
    """How many layers hold on all given inputs, where copies of these ask for more; blank where
    that is nearly as many.
    """
    pins, table = len(result.plan.pinned), result.tradeoff
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
    """What to do where some set on the trade-off curve with fewer pins held on a given input, blank
    where none did: where it missed on a few, look at those.
    """
    if result.tradeoff.empty:
        return ""
    fewer = result.tradeoff[result.tradeoff["pins"] < len(result.plan.pinned)]
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
        if result.validation is not None and result.validation.set_size > 1:
            seen = "the given inputs together"
        return f"take fewer: {few} hold on {seen} (tradeoff.csv, --pick SHARE)"
    return "take fewer pins, which hold on some inputs (tradeoff.csv, --pick SHARE)"


_BROKEN = ("build-failed", "crashed", "timed-out")


_REFUTED = "a test refutes it (the budget is spent)"

_ENGINE_TO_BLAME = {
    Cause.NOT_REPRODUCIBLE: "The engine does not make up its mind: no plan can be trusted on it.",
    Cause.ENGINE_FAILED: "TensorRT does not build or run the model, in FP32 either.",
}


def headline(result: Record) -> str:
    """The answer in one sentence, and what it would mislead without."""
    said = [f.message.partition(": ")[0] for f in result.findings if f.weighty]
    answer = of_one_input(_answer(result), result.validation if result.passed else None)
    return f"{answer} But {'; and '.join(said)}." if said else answer


def _answer(result: Record) -> str:
    name = result.precision.value.upper()
    if result.cause is Cause.GOLDEN_MISMATCH:
        return "The reference itself differs from the golden outputs: nothing was searched."
    if result.cause in _ENGINE_TO_BLAME:
        return _ENGINE_TO_BLAME[result.cause]
    if not result.passed:
        return "No plan found meets the requirement."
    if result.cause is Cause.NONE and result.is_refuted:
        return f"{name} meets the requirement on the given inputs, but {_REFUTED}."
    if result.cause is Cause.NONE:
        held = len(result.plan.held)
        if held and not is_lifted(result):
            pinned = f"with what is held in FP32 (layers: {held})"
            return f"{name} meets the requirement {pinned}{_of_given(result)}."
        return f"{name} meets the requirement as it is{_of_given(result)}: nothing to pin."
    if result.cause is Cause.TF32:
        return "Strict FP32 meets the requirement: turn TF32 off."
    each = "each of the others" if result.plan.held else "each"
    proof = f"{each} proved to be needed" if result.complete else "not yet proved to be minimal"
    share = result.pins["tolerance_share"].min() if len(result.pins) else math.nan
    if result.complete and share < 0.995:  # else the two digits would say 1
        proof = f"{each} proved to be needed within {share:.2g} of the tolerance"
    broken = result.pins["outcome_without"].isin(_BROKEN).sum() if len(result.pins) else 0
    if broken:
        # A run that breaks is no wrong number: the reader has to know which of the two it was.
        proof += f" ({broken} because the run breaks without it)"
    if result.ranked:
        alone = result.layers.get("sensitivity")
        by = "what each does" if alone is None or alone.notna().any() else "its own error"
        proof = f"ranked by {by}, not proved one by one"
    pins, layers = len(result.pinned), result.layer_count
    kept = f"Keep {pins} of {counted(layers, 'layer')} in FP32"
    if is_nearly_all(result):
        few = "Hardly any layer can leave" if pins < layers else "No layer can leave"
        if pins == layers and result.ranked:
            few = "No layer was found that can leave"
        kept = f"{few} FP32: keep {pins} of {layers} there"
    if result.plan.held:
        why = "FP32 in the source" if is_lifted(result) else "held from the start"
        kept += f" ({len(result.plan.held)} of them {why})"
    met = f"the requirement is met{_of_given(result)}"
    if result.is_refuted:
        met = f"the requirement is met{_of_given(result) or ' on the given inputs'}, but {_REFUTED}"
    return f"{kept} and {met}; {proof}."


def _of_given(result: Record) -> str:
    """On how many of the given inputs, where ``--allow-misses`` or ``--pick`` let some miss it."""
    given = result.validation.given if result.validation is not None else None
    if given is None or given.passed == given.tested:
        return ""
    return f" on {given.passed} of the {given.tested} given inputs"


def answer_lines(result: Record) -> list[str]:
    """The answer's first lines: the sentence, on what it holds, the cause, before and after."""
    lines = [headline(result), *validation_sentences(result.validation)[:2], *not_covered(result)]
    lines += [line for line in (next_step(result), result.sentence) if line]
    if not math.isnan(result.base_score):
        after = f"   after: {score_after(result)}" if result.passed else ""
        wanted = ", ".join(result.requirements)
        lines.append(f"before: {score_before(result)}{after}   requirement: {wanted}")
    return lines


FIRST_KINDS = ("alike", "offset", "quiet", "few-differ", "overflow-lost", "not-covered")
"""Kinds of findings that the first lines say."""

_FIRST_LINES = 3


def not_covered(result: Record) -> list[str]:
    """Which inputs nothing was seen of, in the first lines."""
    found = [f.message for kind in FIRST_KINDS for f in result.findings if f.kind == kind]
    return [f"{text[0].upper()}{text[1:]}." for text in found[:_FIRST_LINES]]


def score_before(result: Record) -> str:
    """What everything reduced uses of the tolerance."""
    counting = " on those that count" if result.given_share < 1.0 else ""
    return f"{times(result.base_score, _reduced_outcome(result))}{counting}"


def _reduced_outcome(result: Record) -> str:
    """The verdict of everything reduced, as a baseline; blank where it is not in the table."""
    if result.outputs.empty:
        return ""
    labels = result.outputs["baseline"].str.removesuffix(", second emulator").str.split().str[-1]
    found = result.outputs.loc[labels == result.precision.value, "outcome"]
    missed = found[found.ne("") & found.ne("pass")]
    return str(missed.iloc[-1]) if len(missed) else ""


def score_after(result: Record) -> str:
    """What the plan uses of the tolerance, and what the worst of the inputs does that may miss."""
    said = times(result.score)
    given = result.validation.given if result.validation is not None else None
    if given is None or given.passed == given.tested or not given.worst_score > 1.0:
        return said
    return f"{said} on those that count, {times(given.worst_score)} on the worst given input"


def left_behind(result: Record) -> str:
    """What an interrupted run leaves, for the terminal."""
    answer = of_one_input(_answer(result), result.validation)
    told = " ".join([answer, *validation_sentences(result.validation)])
    return (
        f"the best plan so far is in {result.folder}; run the same command again to go on from "
        f"here. {told}"
    )


def files_line(result: Record) -> str:
    """Where the report is, and the model to ship."""
    shipped = f"   model to ship: {result.folder}/model.typed.onnx" if result.passed else ""
    return f"report: {result.folder}/report.html{shipped}"
