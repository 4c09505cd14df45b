"""The answer's first words: the verdict in a sentence, its colour, and what to do next."""

from __future__ import annotations

import math

from bisect_trt.core.diagnosis import Cause
from bisect_trt.core.names import counted
from bisect_trt.numerics.scores import times
from bisect_trt.report.record.record import Record
from bisect_trt.report.words.held_on import holds_sentences, of_one_input
from bisect_trt.report.words.next_step import next_step
from bisect_trt.report.words.sentences import is_lifted
from bisect_trt.report.words.tone import is_nearly_all

_BROKEN = ("build-failed", "crashed", "timed-out")


_REFUTED = "a test refutes it (the budget is spent)"

_ENGINE_TO_BLAME = {
    Cause.UNSTEADY: "The engine does not make up its mind: no plan can be trusted on it.",
    Cause.ENGINE_FAILED: "TensorRT does not build or run the model, in FP32 either.",
}


def headline(result: Record) -> str:
    """The answer in one sentence, and what it would mislead without."""
    said = [f.message.partition(": ")[0] for f in result.findings if f.weighty]
    answer = of_one_input(_answer(result), result.holds if result.passed else None)
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
    broken = result.pins["verdict_without"].isin(_BROKEN).sum() if len(result.pins) else 0
    if broken:
        # A run that breaks is no wrong number: the reader has to know which of the two it was.
        proof += f" ({broken} because the run breaks without it)"
    if result.ranked:
        alone = result.layers.get("alone_score")
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
    """On how many of the given inputs, where ``--holds-on`` or ``--pick`` let some miss it."""
    given = result.holds.given if result.holds is not None else None
    if given is None or given.passed == given.tested:
        return ""
    return f" on {given.passed} of the {given.tested} given inputs"


def answer_lines(result: Record) -> list[str]:
    """The answer's first lines: the sentence, on what it holds, the cause, before and after."""
    lines = [headline(result), *holds_sentences(result.holds)[:2], *not_covered(result)]
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
    """What everything lowered uses of the tolerance."""
    counting = " on those that count" if result.holds_on < 1.0 else ""
    return f"{times(result.base_score, _reduced_outcome(result))}{counting}"


def _reduced_outcome(result: Record) -> str:
    """The verdict of everything lowered, as a baseline; blank where it is not in the table."""
    if result.outputs.empty:
        return ""
    labels = result.outputs["baseline"].str.removesuffix(", second emulator").str.split().str[-1]
    found = result.outputs.loc[labels == result.precision.value, "verdict"]
    missed = found[found.ne("") & found.ne("pass")]
    return str(missed.iloc[-1]) if len(missed) else ""


def score_after(result: Record) -> str:
    """What the plan uses of the tolerance, and what the worst of the inputs does that may miss."""
    said = times(result.score)
    given = result.holds.given if result.holds is not None else None
    if given is None or given.passed == given.tested or not given.worst_score > 1.0:
        return said
    return f"{said} on those that count, {times(given.worst_score)} on the worst given input"


def left_behind(result: Record) -> str:
    """What an interrupted run leaves, for the terminal."""
    answer = of_one_input(_answer(result), result.holds)
    told = " ".join([answer, *holds_sentences(result.holds)])
    return (
        f"the best plan so far is in {result.folder}; run the same command again to go on from "
        f"here. {told}"
    )


def files_line(result: Record) -> str:
    """Where the report is, and the model to ship."""
    shipped = f"   model to ship: {result.folder}/model.typed.onnx" if result.passed else ""
    return f"report: {result.folder}/report.html{shipped}"
