"""Writes the sentences of the report and of the screen."""

from __future__ import annotations

import math
import shlex
from typing import Any

import pandas as pd

from bisect_trt.base.display import counted, printable, some_of
from bisect_trt.base.outcomes import (
    CONFIDENCE,
    FP32,
    Cause,
    InputKind,
    Reproducibility,
    Validation,
    ValidationVerdict,
)
from bisect_trt.inputs.samples import FEW_INPUTS
from bisect_trt.metrics.requirements import NOTHING_ALLOWED, brief, times
from bisect_trt.metrics.statistics import lower_bound
from bisect_trt.report.record import Record
from bisect_trt.search.find import Regime
from bisect_trt.steps.validation_inputs import WANTED
from bisect_trt.steps.verify import GOLDEN, Verification


def tone(result: Record) -> str:
    """The colour of the answer: ``bad``, ``ok``, or ``unsure``.

    A plan is ``unsure`` that is not validated, or that reduces hardly any layer.
    """
    if not result.passed:
        return "bad"
    validation = result.validation
    sure = validation is not None and validation.word is ValidationVerdict.VALIDATED
    return "ok" if sure and not is_nearly_all(result) else "unsure"


def is_nearly_all(result: Record) -> bool:
    """Whether a finished search kept nearly every layer in FP32."""
    free = result.layer_count - len(result.plan.held)
    searched = (result.complete or result.ranked) and not result.out_of_time
    found = len(result.plan.chosen)
    # Such a plan is FP32 with casts around it, and saves nothing.
    return result.passed and searched and found >= max(2.0, 0.9 * free)


def number(value: Any) -> str:
    """A value for a table: four digits, words for flags, blank for what is unknown."""
    value = value.item() if hasattr(value, "item") else value  # NumPy's numbers
    if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else printable(str(value))


def per_cent(share: float) -> str:
    """A share such as ``95 %``."""
    return f"{100.0 * share:.3g} %"


def scores_in_words(table: pd.DataFrame) -> pd.DataFrame:
    """Replaces the score that stands for "a miss where none is allowed" by words."""
    shown = table
    for name in (c for c in table if "score" in str(c) or c == "sensitivity"):
        beyond = pd.to_numeric(table[name], errors="coerce").eq(NOTHING_ALLOWED)
        if beyond.any():
            words = table[name].astype(object).mask(beyond, brief(NOTHING_ALLOWED))
            shown = shown.assign(**{str(name): words})
    return shown


def sources(layers: pd.DataFrame) -> str:
    """The first layers that are wrong though their inputs are right."""
    if "source" not in layers or not layers["source"].any():
        return ""
    names = layers.loc[layers["source"].astype(bool), "layer"].astype(str).tolist()
    return f"Errors start at {some_of(names, 3)}."


def score_without(pin: Any) -> str:
    """The score without a pin; one below 1 comes with the tolerance share that it misses."""
    score, share = float(pin.score_without), float(pin.tolerance_share)
    words = times(score, str(pin.outcome_without))
    return words if score > 1.0 else f"{words} (held to {share:.3g})"


def is_least(pin: Any) -> bool:
    """Whether :func:`score_without` is a lower bound, since the first miss ended the evaluation."""
    return not getattr(pin, "of_all_given", True) and math.isfinite(pin.score_without)


def unproved(result: Record, pin: Any = None) -> str:
    """Why a pin without a proof is in the plan."""
    if getattr(pin, "inherited", False):
        return "moves values between kept layers"
    if getattr(pin, "held", False):
        return why_held(result)
    return "necessity not tested" if result.ranked else "not yet proved"


def sensitivity_sentences(result: Record) -> list[str]:
    """What the pins are ordered by, and which were not measured; empty where none was."""
    scores = result.layers.get("sensitivity")
    if result.pins.empty or scores is None or not scores.notna().any():
        return []
    lines = [
        "The pins are ordered by sensitivity: the score, in multiples of the tolerance, when only "
        "this layer is reduced."
    ]
    held = result.pins[result.pins["held"]]
    searched = set(result.pins["layer"]).difference(held["layer"])
    measured = set(result.layers["layer"][scores.notna()])
    if searched - measured:
        lines.append("Those that were not measured alone follow by rank.")
    if len(held):
        why = unproved(result, next(held.itertuples()))
        lines.append(f"Not measured, and last: {counted(len(held), 'layer')} ({why}).")
    return lines


def is_lifted(result: Record) -> bool:
    """Whether the source model is reduced already, so that its FP32 layers are held."""
    return any(finding.kind == "lifted" for finding in result.findings)


def why_held(result: Record) -> str:
    """Why layers are in FP32 from the start."""
    if is_lifted(result):
        return "FP32 in the source"
    by_user = any(word.startswith(("--keep-fp32", "--pin")) for word in shlex.split(result.command))
    by_engine = any(finding.kind == "held" for finding in result.findings)
    # Which of them are whose is not recorded.
    if by_user + by_engine + result.is_repaired != 1:
        return "held from the start"
    if by_user:
        return "held by --keep-fp32"
    return "held for the engine" if by_engine else "kept by the repair"


def searched_pins(result: Record) -> frozenset[str]:
    """The pinned layers that the search chose: not held, and no movers between such."""
    pins = result.pins
    inherited = pins["layer"][pins["inherited"].astype(bool)] if "inherited" in pins else ()
    return result.plan.chosen.difference(map(str, inherited))


def layers_in_words(result: Record) -> str:
    """How many layers the graph of the plan has, such as ``75 layers``."""
    count = counted(result.layer_count, "layer")
    changed = result.is_repaired and result.layer_count != given_layers(result)
    return f"the repaired graph's {count}" if changed else count


def given_layers(result: Record) -> int:
    """How many layers the model as given has."""
    rows = (len(choice.pinned) for choice in result.choice_rows if choice.name == FP32)
    return next(rows, result.layer_count)


def judged_by(result: Record) -> str:
    """The runner that decided, with the latencies of engines."""
    if not sum(result.evaluations.values()):
        return "nothing was judged"
    if result.engine is None:
        return "judged by emulation, not yet by an engine"
    shown = ("fp32", result.precision.value, "plan")
    costs = ", ".join(f"{name} {ms}" for name, ms in latencies(result).items() if name in shown)
    builds = counted(result.engine.builds_beyond_baselines or 0, "build")
    judge = f"decided on {result.runner}, {builds} beyond the baselines"
    return f"{judge}; latency {costs}" if costs else judge


def latencies(result: Record) -> dict[str, str]:
    """The latency of each engine by what it runs: a precision, or the plan."""
    if "latency_ms" not in result.cost:
        return {}
    rows = result.cost.to_dict(orient="records")
    return {str(r["engine"]).rpartition(" ")[2]: f"{number(r['latency_ms'])} ms" for r in rows}


def search_sentences(result: Record) -> list[str]:
    """The kind of the set of pins, and what finding it took."""
    facts = result.search_facts
    if facts is None:
        return []
    kind = f"{facts.regime}; the" if facts.regime else "The"
    if facts.regime == Regime.DIFFUSE.value:
        # It is accumulation only where no layer misses alone.
        word = "diffuse accumulation" if result.cause is Cause.ACCUMULATION else "spread"
        kind = f"{word} over {facts.spread_over} layers; the"
    lines = [f"{kind} pins are {'; '.join(facts.blocks)}."]
    return [*lines, f"The search emulated {counted(facts.emulated_evaluations, 'set')} of pins."]


def _reproducibility_sentences(facts: Reproducibility | None) -> list[str]:
    """How often the engine ran, and whether its outputs were always the same."""
    if facts is None:
        return []
    where = "one process" if facts.processes == 1 else f"{facts.processes} processes"
    bits = "in each process an input always had the same answer, bit for bit"
    if not facts.reproducible:
        bits = f"{facts.differing} runs differed from the others of their input and process"
    lines = [f"{facts.passed} of {facts.runs} runs in {where} met the requirement; {bits}."]
    if facts.right is not None and facts.processes > 1:
        # Runs of one process are right or wrong together, so only processes are counted.
        bound = 100.0 * lower_bound(facts.right, facts.processes)
        lines.append(
            f"Every run did in {facts.right} of the {where}, so in at least {bound:.0f} % of all, "
            "with 95 % confidence: an engine that is seldom wrong is not found so."
        )
    return lines


def engine_sentences(result: Record) -> list[str]:
    """What else was found on the engine."""
    facts = result.engine
    if facts is None:
        return []
    lines = [
        f"The engine's FP32 is {facts.fp32_is}; pins were emulated as "
        f"{facts.pins_emulated_as.upper()}."
    ]
    lines += _reproducibility_sentences(facts.reproducibility)
    effect = facts.marking_effect
    if effect is not None:
        lines.append(
            f"Layer errors come from {facts.layer_errors_from} "
            f"({counted(facts.marked_batches or 0, 'build')}). "
            f"Marking moved the final score from {number(effect.unmarked_score)} to "
            f"{number(effect.marked_score)}: the unmarked engine decides."
        )
    if facts.pins_added_by_engine is not None:
        lines.append(
            f"The emulator was held to {number(facts.tolerance_share)} of the tolerance; "
            f"{counted(facts.builds_beyond_baselines or 0, 'build')} beyond the baselines, "
            f"{counted(len(facts.pins_added_by_engine), 'pin')} added by the engine's own "
            "evaluations."
        )
    if facts.out_of_builds:
        lines.append(
            "The budget of builds was spent: this is the best plan seen, and not every pin is "
            "proved. Raise --max-builds to go on."
        )
    return lines


def validation_sentences(validation: Validation | None) -> list[str]:
    """The inputs that the plan was tested on, the results and their confidence."""
    if validation is None:
        return []
    lines = [_tested(validation)]
    if validation.word is ValidationVerdict.OVERFITTED:
        lines.append("It passes your inputs and fails on similar ones (overfitted).")
        worst = max(validation.missed, key=lambda tally: tally.worst_score)
        lines.append(f"The worst of them is {worst.worst}: {times(worst.worst_score)}.")
    if validation.fitted:
        lines.append(
            "The search used the given inputs only (--robust 0): the plan is fitted to them."
        )
    out = validation.holdout
    if out.worst and out.worst_score > 1.0:
        lines.append(f"The worst of those held out is {out.worst}: {times(out.worst_score)}.")
    if beyond := _beyond(validation):
        lines.append(beyond)
    augmented = validation.augmented.tested
    if validation.unfinished:
        lines.append(
            "The run ended before the plan was validated; search.csv has what the search tried."
        )
    elif not validation.perturbed.tested:
        lines.append(f"No perturbed{'' if augmented else ' or augmented'} inputs were tested.")
    if augmented:
        apart = out.tested * validation.holdout_size
        few = validation.given.tested * validation.set_size + apart < FEW_INPUTS
        advice = ": give 20 inputs or more" if few else ""
        lines.append(f"Augmented inputs are no substitute for real ones{advice}.")
    return lines


def _tested(validation: Validation) -> str:
    """The verdict, and how many inputs of each kind passed."""
    found = f"Passed: {tested_words(validation)}."
    verdict = verdict_words(validation)
    return f"{verdict}. {found}" if verdict else found


def tested_words(validation: Validation) -> str:
    """How many inputs of each kind passed, and what share of all that bounds if validated."""
    size = validation.set_size
    out = validation.holdout_size
    apart = "held out" if out == 1 else f"sets of {out} held out"
    units = {InputKind.GIVEN: _inputs(size), InputKind.HOLDOUT: apart}
    tallies = [
        f"{tally.passed} of {tally.tested} {units.get(kind, kind.value)}"
        for kind, tally in validation.tested
    ]
    found = " \u00b7 ".join(tallies)
    if validation.word is not ValidationVerdict.VALIDATED:
        return found
    share = f"at least {per_cent(validation.wanted)} of such inputs"
    if validation.augmented.tested and validation.wanted_of_augmented < validation.wanted:
        of_augmented = per_cent(validation.wanted_of_augmented)
        is_bounded = validation.wanted_of_augmented > 0.0
        share += f", {of_augmented} of augmented ones" if is_bounded else ", augmented ones aside"
    return f"{found} ({share}, {per_cent(CONFIDENCE)} confidence)"


def verdict_words(validation: Validation | None) -> str:
    """The verdict, and the share it was reached for; blank where there is none."""
    if validation is None or validation.word is None:
        return ""
    words = validation.word.value.capitalize()
    if validation.wanted < WANTED:  # --robust below the default
        words += f" for the {per_cent(validation.wanted)} asked for"
    return words


def of_one_input(answer: str, validation: Validation | None) -> str:
    """Puts a warning before ``answer`` where only one input was given."""
    return f"With one input: {answer}" if validation is not None and validation.of_one else answer


def _inputs(size: int) -> str:
    """The unit that is counted where ``size`` inputs are judged together."""
    return "inputs" if size == 1 else f"sets of {size} inputs"


def _beyond(validation: Validation) -> str:
    """Why a plan whose copies pass often enough is not validated; blank for others."""
    limit = validation.prediction_limit
    if not validation.is_bounded or validation.leaves_room or validation.word is None:
        return ""
    if validation.holdout.worst_score > limit:  # a held-out input refutes the limit
        return ""
    copies = "Copies" if validation.perturbed.tested else "Augmented inputs"
    if validation.of_one:
        return f"{copies} of your input pass often enough, but one input is not enough."
    other = "another input" if validation.set_size == 1 else "another set of inputs"
    start = f"{copies} pass often enough, but {other} may use"
    if not math.isinf(limit):
        return f"{start} up to {times(limit)}. With few inputs we also require a safety margin."
    if validation.set_size > 1:
        why = "this metric on so few inputs gives no bound"
    elif not validation.has_margin:
        why = "the metric says whether an input passes, not how nearly"
    elif math.inf in (validation.perturbed.worst_score, validation.augmented.worst_score):
        why = "some copies give NaN or infinite values"
    else:
        why = "no copy shows any error, so their margin is unknown"
    return f"{start} any multiple of the tolerance: {why}."


def verdict(found: Verification) -> str:
    """Says whether the plan holds, with a warning where only one input was given."""
    validation = found.validation
    failed = [check.what for check in found.checks if check.validation is False]
    does_hold = failed in ([], [GOLDEN])
    what = "reduced model" if found.reduced else "plan"
    answer = f"The {what} holds." if does_hold else f"The {what} does not hold."
    if does_hold and validation is not None and validation.word is ValidationVerdict.OVERFITTED:
        answer = f"The {what} passes your inputs and fails on similar ones (overfitted)."
    if failed == [GOLDEN]:
        answer += " But the reference does not give the golden outputs."
    return of_one_input(answer, validation)


def validation_lines(found: Verification) -> list[str]:
    """The validation's sentences, the worst given input, and the notes."""
    validation = found.validation
    lines = validation_sentences(validation)
    if validation is not None and validation.given.passed < validation.given.tested:
        given = validation.given
        lines.append(f"The worst of those given is {given.worst}: {times(given.worst_score)}.")
    return [*lines, *found.notes]


def plan_line(found: Verification) -> str:
    """The size of the plan and its requirements."""
    pins, base = len(found.plan.pinned), found.plan.base.value.upper()
    requirements = ", ".join(found.requirements)
    kept = f"{counted(pins, 'layer')} in FP32, the rest in {base}" if pins else f"all in {base}"
    return f"{kept}; requirement: {requirements}"
