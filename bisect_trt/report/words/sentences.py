"""What a result says to people, sentence by sentence; the documents and the screen share them."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from bisect_trt.core.diagnosis import Cause
from bisect_trt.core.names import counted, printable, some_of
from bisect_trt.core.steadiness import Steadiness
from bisect_trt.numerics.confidence import lower_bound
from bisect_trt.numerics.scores import NOTHING_ALLOWED, brief, times
from bisect_trt.report.record.record import Record
from bisect_trt.search.facts import Regime

_NAMED = 3


def number(value: Any) -> str:
    """A number for a table: short, honest about infinities, blank where there is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return printable(str(value))
    if isinstance(value, float) and math.isnan(value):
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def scores_told(table: pd.DataFrame) -> pd.DataFrame:
    """``table`` with words for the number that stands for a miss where none is allowed."""
    told = table
    for name in (c for c in table if "score" in str(c)):
        beyond = pd.to_numeric(table[name], errors="coerce").eq(NOTHING_ALLOWED)
        if beyond.any():
            words = table[name].astype(object).mask(beyond, brief(NOTHING_ALLOWED))
            told = told.assign(**{str(name): words})
    return told


def sources(layers: pd.DataFrame) -> str:
    """Which layers are wrong while what they read is right, the first in the network first."""
    if "source" not in layers or not layers["source"].any():
        return ""
    names = layers.loc[layers["source"].astype(bool), "layer"].astype(str).tolist()
    return f"Errors start at {some_of(names, _NAMED)}."


def misses_alone(layers: pd.DataFrame) -> str:
    """Which layers miss the requirement when only they are lowered, the worst first."""
    if "alone_score" not in layers:
        return ""
    worst = layers.sort_values("alone_score", ascending=False, kind="stable")
    names, known = worst.loc[worst["alone_score"] > 1.0, "layer"], worst["alone_score"].count()
    if not known:
        return ""
    if names.empty:
        return (
            f"Of {counted(known, 'layer')} measured alone none misses the requirement, on those "
            "inputs and draws."
        )
    which = some_of(names.astype(str).tolist(), _NAMED)
    return f"{which} {'misses' if len(names) == 1 else 'miss'} the requirement alone."


def score_without(pin: Any) -> str:
    """What the set without a pin scores; where it would meet the requirement, also what a set is
    held to while it is made smaller.

    Args:
        pin: a row of pins.csv, as ``itertuples`` gives it.
    """
    score, share = float(pin.score_without), float(pin.tolerance_share)
    said = times(score, str(pin.verdict_without))
    return said if score > 1.0 else f"{said} (held to {share:.3g})"


def is_least(pin: Any) -> bool:
    """Whether :func:`score_without` is the least that the set scores: one sample was enough to
    tell.
    """
    return not getattr(pin, "of_all_given", True) and math.isfinite(pin.score_without)


def unproved(result: Record, pin: Any = None) -> str:
    """What a pin without a proof rests on.

    Args:
        result: the run.
        pin: its row of pins.csv, as ``itertuples`` gives it; None for those of the search.
    """
    if getattr(pin, "inherited", False):
        return "moves values between kept layers"
    if getattr(pin, "held", False):
        return "FP32 in the source" if is_lifted(result) else "held from the start"
    return "ranked, not proved" if result.ranked else "not yet proved"


def is_lifted(result: Record) -> bool:
    """Whether the source is reduced already, so that its FP32 layers are held."""
    return any(finding.kind == "lifted" for finding in result.findings)


def judged_by(result: Record) -> str:
    """Who decided, and on an engine what the pins cost."""
    if not sum(result.probes.values()):
        return "nothing was judged"
    if result.engine is None:
        return "judged by emulation, not yet by an engine"
    rows = result.cost.to_dict(orient="records")
    latency = {str(row["engine"]).rpartition(" ")[2]: row["latency_ms"] for row in rows}
    shown = ("fp32", result.precision.value, "plan")
    costs = ", ".join(f"{name} {number(ms)} ms" for name, ms in latency.items() if name in shown)
    builds = result.engine.builds_beyond_baselines or 0
    said = f"decided on {result.runner}, {counted(builds, 'build')} beyond the baselines"
    return f"{said}; latency {costs}" if costs else said


def search_sentences(result: Record) -> list[str]:
    """What kind of set it is and what finding it took."""
    facts = result.search_facts
    if facts is None:
        return []
    kind = f"{facts.regime}; the" if facts.regime else "The"
    if facts.regime == Regime.DIFFUSE.value:
        # Where some layers miss alone it is no accumulation, however many are pinned.
        word = "diffuse accumulation" if result.cause is Cause.ACCUMULATION else "spread"
        kind = f"{word} over {facts.spread_over} layers; the"
    lines = [f"{kind} pins are {'; '.join(facts.blocks)}."]
    auc = ""
    if not math.isnan(facts.suspicion_auc):
        auc = f" Suspicion ranked the pins with an AUC of {facts.suspicion_auc:.3f}."
    lines.append(
        f"The search emulated {counted(facts.emulated_probes, 'set')} of pins; by yes and no "
        f"alone, telling {len(result.plan.chosen)} of {result.layer_count} layers apart takes "
        f"{facts.information_bound:.0f} answers at least.{auc}"
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
    bits = "in each process an input always had the same answer, bit for bit"
    if not seen.steady:
        bits = f"{seen.differing} runs differed from the others of their input and process"
    lines = [f"{seen.passed} of {seen.runs} runs in {where} met the requirement; {bits}."]
    if seen.right is not None and seen.processes > 1:
        # The runs of one process are no observations of their own: an engine was seen to be right
        # in every run of some processes and in none of others.
        bound = 100.0 * lower_bound(seen.right, seen.processes)
        lines.append(
            f"Every run did in {seen.right} of the {where}, so in at least {bound:.0f} % of all, "
            "with 95 % confidence: an engine that is seldom wrong is not found so."
        )
    return lines


def engine_sentences(result: Record) -> list[str]:
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
            f"Layer errors come from {facts.layer_errors_from} "
            f"({counted(facts.marked_batches or 0, 'build')}). "
            f"Marking moved the final score from {number(effect.unmarked_score)} to "
            f"{number(effect.marked_score)}: the unmarked engine decides."
        )
    if facts.pins_added_by_engine is not None:
        lines.append(
            f"The emulator was held to {number(facts.tolerance_share)} of the tolerance; "
            f"{counted(facts.builds_beyond_baselines or 0, 'build')} beyond the baselines, "
            f"{counted(len(facts.pins_added_by_engine), 'pin')} added by the engine's own probes."
        )
    if facts.out_of_builds:
        lines.append(
            "The budget of builds was spent: this is the best plan seen, and not every pin is "
            "proved. Raise --max-builds to go on."
        )
    return lines
