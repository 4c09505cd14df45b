"""Writes the first lines of an answer, and what to do next."""

from __future__ import annotations

import math
import shlex

import pandas as pd

from bisect_trt.base.display import counted
from bisect_trt.base.outcomes import (
    BF16,
    CONFIDENCE,
    FP32,
    Cause,
    ErrorShare,
    ValidationVerdict,
)
from bisect_trt.base.plan import Precision
from bisect_trt.inputs.images import IMAGES
from bisect_trt.metrics.requirements import times
from bisect_trt.metrics.statistics import copies_needed
from bisect_trt.report.choices import recommended
from bisect_trt.report.record import Record
from bisect_trt.report.text import (
    given_layers,
    is_lifted,
    is_nearly_all,
    layers_in_words,
    of_one_input,
    searched_pins,
    tone,
    validation_sentences,
    why_held,
)

MIN_PINS_FOR_ADVICE = 8
"""Number of pins from which on advice about fewer of them is given."""

FIRST_KINDS = (IMAGES, "alike", "offset", "few-differ", "overflow-lost", "not-covered")
"""Kinds of findings that stand in the first lines."""

_BY_PINS = (Cause.OVERFLOW, Cause.ROUNDING, Cause.ACCUMULATION, Cause.UNKNOWN)
"""Causes that pins can cure."""

_BROKEN = ("build-failed", "crashed", "timed-out")
_REFUTED = "validation rejects it (the budget is spent)"
_SETTLED = {
    Cause.GOLDEN_MISMATCH: "The reference itself differs from the golden outputs: nothing was "
    "searched.",
    Cause.NOT_REPRODUCIBLE: "The engine is not reproducible: no plan can be trusted on it.",
    Cause.ENGINE_FAILED: "TensorRT does not build or run the model, in FP32 either.",
}


def next_step(result: Record) -> str:
    """What the user can do next; blank where the answer is good."""
    steps = next_steps(result)
    return f"What next: {'; '.join(steps)}." if steps else ""


def next_steps(result: Record) -> list[str]:
    """What the user can do next, the best first; empty where the answer is good."""
    steps = _steps(result)
    if is_lifted(result) and not (result.interrupted or result.out_of_time):
        steps.insert(0, "give the FP32 model that it was made from")
    return steps


def _steps(result: Record) -> list[str]:
    """What else than another model the user can try, the best first."""
    how = tone(result)
    advice = _odd_inputs(result) or _fewer_pins(result)
    if how == "ok":
        return [advice] if advice else []
    if how == "bad":
        unfinished = result.out_of_time or result.interrupted
        fp32 = _met_in(result, Precision.FP32, runner=result.runner)
        if result.cause in _BY_PINS and result.engine is not None and fp32 and not unfinished:
            return ["ship it in FP32, whose engine meets the requirement, or loosen that"]
        return []
    if result.interrupted:
        return ["run the same command again: it goes on from here"]
    if result.out_of_time:
        return ["run the same command again, or with a larger --budget: it goes on"]
    steps = []
    if is_nearly_all(result) and not _is_fp32_by_time(result):
        if result.precision is not Precision.TF32 and _met_in(result, Precision.TF32):
            steps.append("run everything in TF32, which meets it on the given inputs")
        if advice or _some_hold_with_fewer(result):
            fewer = (
                "keep fewer layers in FP32, which is enough for some inputs (tradeoff.csv, "
                "--allow-misses SHARE)"
            )
            steps.append(advice or fewer)
        steps = steps or ["ship it in FP32, or loosen the requirement"]
    elif advice:
        steps.append(advice)
    return [*steps, *_more_inputs(result)]


def _more_inputs(result: Record) -> list[str]:
    """What would validate a plan that is not validated."""
    validation = result.validation
    if validation is None or validation.word is ValidationVerdict.VALIDATED:
        return []
    if validation.fitted:
        return ["search without --robust 0"]
    if any(metric.endswith("@all") for metric in result.metrics):
        return []  # a metric over all inputs is one number, which more inputs do not bound
    step = "give more inputs of the kind that it will meet"
    if not validation.has_margin and validation.set_size == 1:
        # Without a margin copies prove nothing; this many given inputs are validated by themselves.
        step += f", {copies_needed(validation.wanted, CONFIDENCE)} in all"
        step += "," if result.pinned else ""
    if result.pinned:
        step += f" and search on with --start-from {shlex.quote(f'{result.folder}/plan.json')}"
    return [step]


def _outcomes(result: Record, precision: Precision, runner: str = "") -> pd.Series[str]:
    """Outcomes of the baselines with everything in ``precision``, on ``runner`` if given."""
    if result.outputs.empty:
        return pd.Series(dtype=str)
    # Labels are such as "fp16", "fp16, second emulator" and "tensorrt fp16".
    label = result.outputs["baseline"]
    if runner:
        return result.outputs.loc[label == f"{runner} {precision.value}", "outcome"]
    ran = label.str.removesuffix(", second emulator").str.split().str[-1]
    return result.outputs.loc[ran == precision.value, "outcome"]


def _met_in(result: Record, precision: Precision, runner: str = "") -> bool:
    outcomes = _outcomes(result, precision, runner)
    return len(outcomes) > 0 and bool(outcomes.eq("pass").all())


def _odd_inputs(result: Record) -> str:
    """Advice on a few given inputs that cause half of the pins or more; blank for none."""
    pins, table = len(result.plan.pinned), result.tradeoff
    if table.empty or "given_missed" not in table or pins < MIN_PINS_FOR_ADVICE:
        return ""
    missed = table["given_tested"] - table["given_passed"]
    odd = (missed > 0) & (missed <= 0.25 * table["given_tested"])
    odd &= (table["pins"] <= pins / 2) & table["given_missed"].notna()
    odd &= table["worst_score"] >= 4.0  # ordinary inputs miss by less
    for kind in ("perturbed", "augmented"):
        # Where copies of other inputs miss more often, the given ones are not odd.
        alike = table[f"{kind}_share"] >= table["given_share"] - 0.1
        odd &= alike | (table[f"{kind}_tested"] == 0)
    if not odd.any():
        return ""
    row = table.assign(missed=missed)[odd].sort_values(["missed", "pins"]).iloc[0]
    # A near tie, such as between two classes, flips with any rounding.
    one = int(row["missed"]) == 1
    near = "it is a near tie, run without it" if one else "they are near ties, run without them"
    return (
        f"look at {row['given_missed']}: with {counted(int(row['pins']), 'layer')} in FP32 no "
        f"other of {row['given_tested']} given inputs misses (if {near})"
    )


def _fewer_pins(result: Record) -> str:
    """Advice on a smaller set of the trade-off curve that passed on all given inputs."""
    pins, table, validation = len(result.plan.pinned), result.tradeoff, result.validation
    if table.empty or not pins:
        return ""
    passed = table["given_passed"] == table["given_tested"]
    passed &= table["pins"] <= 0.75 * pins  # a smaller gain is not worth a second run
    tested = table["given_tested"] + table["perturbed_tested"] + table["augmented_tested"]
    all_passed = passed & (tested >= 10)  # fewer show little
    for kind in ("perturbed", "augmented"):
        all_passed &= table[f"{kind}_passed"] == table[f"{kind}_tested"]
    has_many = pins >= MIN_PINS_FOR_ADVICE
    if validation is not None and not validation.fitted and has_many and all_passed.any():
        row = table.assign(tested=tested)[all_passed].sort_values("pins").iloc[0]
        size = validation.set_size
        what = "inputs and copies" if size == 1 else f"sets of {size}"
        return (
            f"try fewer: with {counted(int(row['pins']), 'layer')} in FP32 all of {row['tested']} "
            f"{what} passed (tradeoff.csv)"
        )
    if not passed.any():
        return ""
    row = table[passed].sort_values("pins").iloc[0]
    few = counted(int(row["pins"]), "layer")
    given = int(row["given_tested"])
    return f"with {few} in FP32 all {given} given inputs pass; copies of them need more layers"


def _some_hold_with_fewer(result: Record) -> bool:
    """Whether some given input passes with fewer pins than the plan has."""
    table = result.tradeoff
    if table.empty:
        return False
    fewer = table["pins"] < len(result.plan.pinned)
    return bool((fewer & (table["given_passed"] > 0)).any())


def headline(result: Record) -> str:
    """The answer in one sentence, with the findings that limit it."""
    limits = [f.message.partition(": ")[0] for f in result.findings if f.weighty]
    answer = of_one_input(_answer(result), result.validation if result.passed else None)
    return f"{answer} But {'; and '.join(limits)}." if limits else answer


def _answer(result: Record) -> str:
    """The answer in one sentence."""
    if result.cause in _SETTLED:
        return _SETTLED[result.cause]
    if not result.passed:
        return "No plan found meets the requirement."
    chosen = recommended(result.choice_rows)
    if chosen is not None and chosen.name == BF16:
        return "Run everything in BF16: no layer needs FP32 and the requirement is met."
    if _is_fp32_by_time(result):
        return "Ship it in FP32: nothing that meets the requirement takes less time."
    if result.cause is Cause.TF32:
        return "TF32 is too imprecise; disable it. Strict FP32 meets the requirement."
    where, refuted = of_given(result), ""
    if result.is_refuted:
        where, refuted = where or " on the given inputs", f", but {_REFUTED}"
    if result.cause is not Cause.NONE:
        kept = _kept(result)
        if result.is_fitted:
            kept = f"The weights are rounded to fit. {kept}"
            if not result.pinned:
                none = "The weights are rounded to fit: no layer needs FP32"
                return f"{none} and the requirement is met{where}{refuted}."
        elif result.is_repaired:
            rules = ", ".join(result.repair.rules)
            kept = f"The graph is repaired ({rules}). {kept}"
            if not searched_pins(result):
                none = f"The graph is repaired ({rules}): {_held(result)}"
                return f"{none} and the requirement is met{where}{refuted}."
        kept = f"{kept} and the requirement is met{where}{refuted}"
        return f"{kept}; {proof_words(result)}." if searched_pins(result) else f"{kept}."
    meets = f"{result.precision.value.upper()} meets the requirement"
    if refuted:
        return f"{meets}{where}{refuted}."
    held = len(result.plan.held)
    if held and not is_lifted(result):
        return f"{meets} with {counted(held, 'layer')} held in FP32{where}."
    return f"{meets} as it is{where}: no layer needs FP32."


def _is_fp32_by_time(result: Record) -> bool:
    """Whether FP32 is the answer because an engine's clock says so."""
    chosen = recommended(result.choice_rows)
    timed = result.engine is not None and len(result.engine.times) > 0
    return timed and chosen is not None and chosen.name == FP32


def _held(result: Record) -> str:
    """The layers in FP32 of a plan that chooses none, in words."""
    if not result.pinned:
        return "no layer needs FP32"
    verb = "stays" if len(result.pinned) == 1 else "stay"
    return f"{counted(len(result.pinned), 'layer')} {verb} in FP32"


def _kept(result: Record) -> str:
    """How many layers to keep in FP32, without a full stop."""
    pins, layers, held = len(result.pinned), result.layer_count, len(result.plan.held)
    kept = f"Keep {pins} of {layers_in_words(result)} in FP32"
    if is_nearly_all(result):
        few = "Hardly any layer can leave"
        if pins == layers:
            few = "No layer was found that can leave" if result.ranked else "No layer can leave"
        of = str(layers) if layers == given_layers(result) else layers_in_words(result)
        kept = f"{few} FP32: keep {pins} of {of} there"
    if held:
        whose = "" if held == pins else f"{held} of them "
        kept += f" ({whose}{why_held(result)})"
    return kept


def proof_words(result: Record) -> str:
    """The evidence that the pins are needed, or why they are there where none was searched."""
    if result.plan.held and not searched_pins(result):
        return why_held(result)
    if result.ranked:
        scores = result.layers.get("sensitivity")
        is_measured = scores is None or scores.notna().any()
        by = "measured impact" if is_measured else "its own error"
        return f"chosen by {by}; whether each is necessary was not tested"
    each = "each of the others" if result.plan.held else "each"
    proof = f"{each} proved to be needed" if result.complete else "not yet proved to be minimal"
    share = result.pins["tolerance_share"].min() if len(result.pins) else math.nan
    if result.complete and share < 0.995:  # larger shares round to 1
        proof += f" at {share:.2g} of the tolerance"
    broken = result.pins["outcome_without"].isin(_BROKEN).sum() if len(result.pins) else 0
    # A crash is weaker evidence than a wrong number, so these pins are counted apart.
    return f"{proof} ({broken} because the run breaks without it)" if broken else proof


def of_given(result: Record) -> str:
    """How many given inputs pass, where some are allowed to miss; blank if all pass."""
    given = result.validation.given if result.validation is not None else None
    if given is None or given.passed == given.tested:
        return ""
    return f" on {given.passed} of the {given.tested} given inputs"


def cause_sentence(result: Record) -> str:
    """The cause, and the few layers that make nearly all of the error where there are such."""
    if result.error_share is None:
        return result.sentence
    # Behind several causes "it" says of none.
    named = set(result.causes[0].layers) if len(result.causes) == 1 else set()
    said = _share_sentence(result.error_share, is_named=named == set(result.error_share.layers))
    return f"{result.sentence} {said}".strip()


def _share_sentence(found: ErrorShare, *, is_named: bool) -> str:
    """What few layers do, which ``is_named`` says that the sentence before has named."""
    one, which = len(found.layers) == 1, ", ".join(found.layers)
    layers = counted(len(found.layers), "layer")
    if math.isnan(found.share):
        verb, them = ("makes", "it") if one else ("make", "them")
        left = f"With {them} in FP32, {times(found.left)} is left."
        return f"{layers} {verb} the error infinite: {which}. {left}"
    # Rounded down: "100 %" would be said of 99.5.
    share = f"{math.floor(100.0 * found.share + 1e-6)} % of the error"
    if is_named:
        return f"It makes {share}." if one else f"They make {share}."
    return f"{share} is made by {layers}: {which}."


def not_covered(result: Record) -> list[str]:
    """Findings for the first lines: how images were read, kinds of inputs that were not tested."""
    found = [f for kind in FIRST_KINDS for f in result.findings if f.kind == kind]
    images = [f for f in found if f.kind == IMAGES]
    shown = [f.message for f in (*images, *[f for f in found if f.kind != IMAGES][:3])]
    return [f"{text[0].upper()}{text[1:]}." for text in shown]


def score_before(result: Record) -> str:
    """The score with everything reduced, in words."""
    counting = " on those that count" if result.given_share < 1.0 else ""
    outcomes = _outcomes(result, result.precision)
    missed = outcomes[outcomes.ne("") & outcomes.ne("pass")]
    outcome = str(missed.iloc[-1]) if len(missed) else ""
    return f"{times(result.base_score, outcome)}{counting}"


def score_after(result: Record) -> str:
    """The score of the plan in words, with that of the worst input that may miss."""
    score = times(result.score)
    given = result.validation.given if result.validation is not None else None
    if given is None or given.passed == given.tested or not given.worst_score > 1.0:
        return score
    return f"{score} on those that count, {times(given.worst_score)} on the worst given input"


def left_behind(result: Record) -> str:
    """What an interrupted run leaves, for the terminal."""
    answer = of_one_input(_answer(result), result.validation)
    sentences = " ".join([answer, *validation_sentences(result.validation)])
    return (
        f"the best plan so far is in {result.folder}; run the same command again to go on from "
        f"here. {sentences}"
    )


def files_line(result: Record) -> str:
    """The paths of the report and of the model to ship."""
    shipped = f"   model to ship: {result.folder}/model.typed.onnx" if result.passed else ""
    return f"report: {result.folder}/report.html{shipped}"
