"""What a result says to people, sentence by sentence; the documents and the screen share them."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from bisect_trt.core.diagnosis import Cause
from bisect_trt.core.holds import Holds, Robustness
from bisect_trt.core.names import printable
from bisect_trt.core.steadiness import Steadiness
from bisect_trt.numerics.confidence import lower_bound
from bisect_trt.numerics.requirements import times
from bisect_trt.report.result import Result
from bisect_trt.search.facts import Regime
from bisect_trt.stations.case import FEW_INPUTS

_NAMED = 3
_BROKEN = ("build-failed", "crashed", "timed-out")


_ENGINE_TO_BLAME = {
    Cause.UNSTEADY: "The engine does not make up its mind: no plan can be trusted on it.",
    Cause.ENGINE_FAILED: "TensorRT does not build or run the model, in FP32 either.",
}


def number(value: Any) -> str:
    """A number for a table: short, honest about infinities, blank where there is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return printable(str(value))
    if isinstance(value, float) and math.isnan(value):
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def headline(result: Result) -> str:
    """The answer in one sentence, and what it would mislead without."""
    said = [f.message.partition(": ")[0] for f in result.findings if f.weighty]
    return " ".join([_answer(result), *(f"But {words}." for words in said)])


def _answer(result: Result) -> str:
    name = result.precision.value.upper()
    if result.cause is Cause.GOLDEN_MISMATCH:
        return "The reference itself differs from the golden outputs: nothing was searched."
    if result.cause in _ENGINE_TO_BLAME:
        return _ENGINE_TO_BLAME[result.cause]
    if not result.passed:
        return "No plan found meets the requirement."
    if result.cause is Cause.NONE:
        held = len(result.plan.held)
        if held:
            return f"{name} meets the requirement with what --pin holds in FP32 (layers: {held})."
        return f"{name} meets the requirement as it is: nothing to pin."
    if result.cause is Cause.TF32:
        return "Strict FP32 meets the requirement: turn TF32 off."
    each = "each of the others" if result.plan.held else "each"
    proof = f"{each} proved to be needed" if result.complete else "not yet proved to be minimal"
    share = result.pins["tolerance_share"].min() if len(result.pins) else math.nan
    if result.complete and share < 1.0:
        proof = f"{each} proved to be needed within {share:.2g} of the tolerance"
    broken = result.pins["verdict_without"].isin(_BROKEN).sum() if len(result.pins) else 0
    if broken:
        # A run that breaks is no wrong number: the reader has to know which of the two it was.
        proof += f" ({broken} because the run breaks without it)"
    if result.ranked:
        proof = "ranked by what each does, not proved one by one"
    kept = f"Keep {len(result.pinned)} of {result.layer_count} layers in FP32"
    if result.plan.held:
        kept += f" ({len(result.plan.held)} of them held by --pin)"
    return f"{kept} and the requirement is met; {proof}."


def answer_lines(result: Result) -> list[str]:
    """The answer's first lines: the sentence, on what it holds, the cause, before and after."""
    lines = [headline(result), *holds_sentences(result.holds)[:2], result.sentence]
    if not math.isnan(result.base_score):
        after = f"   after: {times(result.score)}" if result.passed else ""
        wanted = ", ".join(result.requirements)
        lines.append(f"before: {times(result.base_score)}{after}   requirement: {wanted}")
    return lines


def files_line(result: Result) -> str:
    """Where the report is, and the model to ship."""
    shipped = f"   model to ship: {result.folder}/model.typed.onnx" if result.passed else ""
    return f"report: {result.folder}/report.html{shipped}"


def holds_sentences(holds: Holds | None) -> list[str]:
    """On what the plan was tested, and with what confidence: what is claimed is what was tested."""
    if holds is None:
        return []
    given, size = holds.given, holds.set_size
    what = "inputs" if size == 1 else f"sets of {size} inputs"
    told = [f"given {given.passed} of {given.tested} {what}"]
    for kind, words in (
        (holds.redrawn, "redrawn {} of {} roundings"),
        (holds.variants, "variants {} of {}"),
        (holds.holdout, "held out {} of {} inputs"),
    ):
        if kind.tested:
            counted = words.format(kind.passed, kind.tested)
            counted += f" (sets of {size})" if size > 1 and kind is not holds.holdout else ""
            told.append(f"{counted}, at least {100.0 * kind.lower_bound:.1f} %")
    said = "With one input: holds" if given.tested == size == 1 else "Holds"
    sure = {1: "", 2: " with 95 % confidence"}.get(len(told), ", each with 95 % confidence")
    word = f"{holds.word.value.capitalize()}. " if holds.word is not None else ""
    lines = [f"{word}{said} on {'; '.join(told)}{sure}."]
    if holds.fitted:
        lines.append("Searched on the given inputs only (--robust 0): the set is fitted to them.")
    if holds.variants.tested:
        advice = ": give 20 inputs or more, and a fifth is kept apart to test on"
        few = given.tested * size + holds.holdout.tested < FEW_INPUTS
        lines.append(
            "Variants of the given inputs (shifted, scaled, mixed) are no substitute for real "
            f"ones{advice if few else ''}."
        )
    return lines


def meaning_of(holds: Holds | None) -> str:
    """What the word for a plan's tests means, where it is not plain."""
    if holds is None or holds.word in (None, Robustness.ROBUST):
        return ""
    wanted = f"{100.0 * holds.wanted:.3g} %"
    if holds.word is Robustness.LUCKY:
        return f"Lucky: some kind of input misses the {wanted} asked for by more than chance."
    return (
        f"Undecided: the tests neither show the {wanted} asked for of every kind of input, nor "
        "refute it."
    )


def sources(layers: pd.DataFrame) -> str:
    """Which layers are wrong while what they read is right, the first in the network first."""
    if "source" not in layers or not layers["source"].any():
        return ""
    return f"Errors start at {_few(layers.loc[layers['source'].astype(bool), 'layer'])}."


def misses_alone(layers: pd.DataFrame) -> str:
    """Which layers miss the requirement when only they are lowered, the worst first."""
    if "alone_score" not in layers:
        return ""
    worst = layers.sort_values("alone_score", ascending=False, kind="stable")
    names = worst.loc[worst["alone_score"] > 1.0, "layer"]
    if names.empty:
        return "No layer misses the requirement alone."
    return f"{_few(names)} {'misses' if len(names) == 1 else 'miss'} the requirement alone."


def _few(names: pd.Series[str]) -> str:
    """The first of ``names``, and how many more there are."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(str(n) for n in names[:_NAMED])}{more}"


def unproved(result: Result) -> str:
    """What a pin without a proof rests on."""
    return "ranked, not proved" if result.ranked else "not yet proved"


def judged_by(result: Result) -> str:
    """Who decided, and on an engine what the pins cost."""
    if result.engine is None:
        return "judged by emulation, not yet by an engine"
    rows = result.cost.to_dict(orient="records")
    latency = {str(row["engine"]).rpartition(" ")[2]: row["latency_ms"] for row in rows}
    shown = ("fp32", result.precision.value, "plan")
    costs = ", ".join(f"{name} {number(ms)} ms" for name, ms in latency.items() if name in shown)
    builds = result.engine.builds_beyond_baselines or 0
    said = f"decided on {result.runner}, {builds} builds beyond the baselines"
    return f"{said}; latency {costs}" if costs else said


def search_sentences(result: Result) -> list[str]:
    """What kind of set it is and what finding it took."""
    facts = result.search_facts
    if facts is None:
        return []
    diffuse = facts.regime == Regime.DIFFUSE.value
    spread = f" over {facts.spread_over} layers" if diffuse else ""
    kind = f"{facts.regime}{spread}; the" if facts.regime else "The"
    lines = [f"{kind} pins are {'; '.join(facts.blocks)}."]
    auc = ""
    if not math.isnan(facts.suspicion_auc):
        auc = f" Suspicion ranked the pins with an AUC of {facts.suspicion_auc:.3f}."
    lines.append(
        f"{facts.emulated_probes} emulated probes and {result.effect_runs} single-layer runs; by "
        f"yes and no alone, telling {len(result.plan.chosen)} of {result.layer_count} layers apart "
        f"takes {facts.information_bound:.0f} answers at least.{auc}"
    )
    if facts.violations:
        lines.append(
            f"{facts.violations} failing sets held a passing one: here more pins are not always "
            "better."
        )
    return lines


def _steadiness_sentences(seen: Steadiness | None) -> list[str]:
    """How often the engine was run, and whether it gave one answer."""
    if seen is None:
        return []
    where = "one process" if seen.processes == 1 else f"{seen.processes} processes"
    bound = 100.0 * lower_bound(seen.passed, seen.runs)
    bits = "in each process an input always had the same answer, bit for bit"
    if not seen.steady:
        bits = f"{seen.differing} runs differed from the others of their input and process"
    return [
        f"{seen.passed} of {seen.runs} runs in {where} met the requirement, at least {bound:.1f} % "
        f"of all do with 95 % confidence; {bits}."
    ]


def engine_sentences(result: Result) -> list[str]:
    """What else the engine showed."""
    facts = result.engine
    if facts is None:
        return []
    lines = [
        f"The engine's FP32 is {facts.fp32_is}; pins were emulated as "
        f"{facts.pins_emulated_as.upper()}."
    ]
    lines += _steadiness_sentences(facts.steadiness)
    effect = facts.probe_effect
    if effect is not None:
        lines.append(
            f"Layer errors come from {facts.layer_errors_from} ({facts.marked_batches} builds). "
            f"Marking moved the final score from {number(effect.unmarked_score)} to "
            f"{number(effect.marked_score)}: the unmarked engine decides."
        )
    if facts.pins_added_by_engine is not None:
        lines.append(
            f"The emulator was held to {number(facts.tolerance_share)} of the tolerance; "
            f"{facts.builds_beyond_baselines} builds beyond the baselines, "
            f"{len(facts.pins_added_by_engine)} pins added by the engine's own probes."
        )
    if facts.out_of_builds:
        lines.append(
            "The budget of builds was spent: this is the best plan seen, and not every pin is "
            "proved. Raise --max-builds to go on."
        )
    return lines
