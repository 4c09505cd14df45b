"""Makes the rows of the CSV files."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from bisect_trt.base.display import counted, plural, some_of
from bisect_trt.base.outcomes import (
    AS_IS,
    BF16,
    FITTED,
    FP32,
    KNEE,
    PLAN,
    REPAIRED,
    Candidate,
    ChoiceTimes,
    Finding,
)
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.evaluate.result import Evaluation
from bisect_trt.metrics.parser import parse_known
from bisect_trt.metrics.requirements import MAX_SCORE, Requirement, brief
from bisect_trt.model.graph import Graph
from bisect_trt.model.layers import Layer
from bisect_trt.model.lost_constants import constant_sizes
from bisect_trt.model.patterns import Origin, Pattern, list_origins
from bisect_trt.model.walk import captured_names
from bisect_trt.report.choices import Choice, Passes
from bisect_trt.report.columns import PINS, names_in
from bisect_trt.report.record import Record
from bisect_trt.report.repairs import RepairFacts
from bisect_trt.steps.answer import RunState


def in_words(
    pinned: Sequence[str], patterns: Sequence[Pattern], layers: Sequence[Layer]
) -> list[str]:
    """Describes the pins by block, the largest first, such as "5 of the 5 LayerNorms: Pow of each".

    Pins outside of every pattern are grouped by module.
    """
    by_name = {layer.name: layer for layer in layers}
    left = {name: by_name[name] for name in pinned if name in by_name}
    chosen = frozenset(left)
    groups: dict[tuple[str, tuple[str, ...]], int] = {}
    for pattern in patterns:
        members = [name for name in pattern.layers if name in chosen]
        if members and all(name in left for name in members):
            ops = tuple(left.pop(name).op for name in members)
            groups[pattern.kind, ops] = groups.get((pattern.kind, ops), 0) + 1
    totals = Counter(pattern.kind for pattern in patterns)
    lines: list[tuple[int, str]] = []
    for (kind, ops), count in groups.items():
        which = f"{count} of the {totals[kind]} {plural(kind)}" if totals[kind] > 1 else kind
        inside = "" if ops == (kind,) else f": {_operators(ops)}{' of each' * (count > 1)}"
        lines.append((count * len(ops), which + inside))
    modules: dict[str, list[str]] = {}
    for layer in left.values():
        outermost = [part for part in layer.scope.split("/") if part][:2]
        modules.setdefault("/".join(outermost) or "the main graph", []).append(layer.op)
    for module, operators in modules.items():
        common = [op for op, count in Counter(operators).most_common() for _ in range(count)]
        lines.append((len(operators), f"{module}: {_operators(common)}"))
    lines.sort(key=lambda line: -line[0])
    shown = [words for _, words in lines[:6]]
    if rest := lines[6:]:
        pins = sum(count for count, _ in rest)
        shown.append(f"and {pins} more in {counted(len(rest), 'block')}, in pins.csv")
    return shown


def _operators(ops: Sequence[str]) -> str:
    return ", ".join(f"{n} {op}" if n > 1 else op for op, n in Counter(ops).items())


def is_measured(table: pd.DataFrame) -> pd.Series[bool]:
    """Whether each row of a layer table has errors."""
    # A layer without any finite value has no error, but a count of its non-finite values.
    counted = table["nonfinite"].notna() if "nonfinite" in table else False
    return table["max_abs"].notna() | counted


def is_wrong(table: pd.DataFrame) -> pd.Series[bool]:
    """Whether each layer is wrong with everything reduced: below 20 dB, or not finite."""
    broken = ~table["finite"].astype(bool) & is_measured(table)
    return broken | (table["snr_db"] < 20.0)


def failure_sources(graph: Graph, wrong: Mapping[str, bool]) -> frozenset[str]:
    """The wrong layers whose inputs are all right."""
    wrong_tensors: set[str] = set()
    sources = []
    # Nodes are in execution order, so what a node reads is known before it.
    for node, name in zip(graph.proto.graph.node, graph.names, strict=True):
        reads_wrong = not wrong_tensors.isdisjoint((*node.input, *captured_names(node)))
        if wrong.get(name, reads_wrong):  # a node without errors of its own passes them on
            wrong_tensors.update(node.output)
            if not reads_wrong:
                sources.append(name)
    return frozenset(sources)


def layers_table(state: RunState, plan: PrecisionPlan) -> pd.DataFrame:
    """A row per layer, or per layer of ``--mark``, with what the run has measured."""
    table = _all_layers(state, plan)
    by_name = list_origins(state.problem.graph)
    origins = [by_name.get(str(name), Origin()) for name in table["layer"]]
    for column in ("module", "module_class", "file", "line", "code"):
        table[column] = [getattr(origin, column) for origin in origins]
    table["line"] = table["line"].astype("Int64").mask(table["line"] == 0)
    sizes = constant_sizes(state.problem.graph)
    ends = [sizes.get(str(name), (math.nan, math.nan)) for name in table["layer"]]
    table["constant_min"], table["constant_max"] = [e[0] for e in ends], [e[1] for e in ends]
    marked = state.problem.marked
    return table if marked is None else table[table["layer"].isin(marked)].reset_index(drop=True)


def _all_layers(state: RunState, plan: PrecisionPlan) -> pd.DataFrame:
    if state.baselines is None:
        rows = [{"layer": x.name, "op": x.op, "scope": x.scope} for x in state.problem.layers]
        return pd.DataFrame([{**row, "pinned": False} for row in rows])
    table = state.baselines.layers.copy()
    table["pinned"] = table["layer"].isin(plan.pinned)
    if state.triage is not None:
        table["sensitivity"] = table["layer"].map(dict(state.triage.sensitivity.scores))
        places = {name: place for place, name in enumerate(state.triage.ranking, start=1)}
        table["rank"] = table["layer"].map(places)
    if state.engine is not None and state.engine.table is not None:
        table = state.engine.table.joined(table)
    wrong = dict(zip(table["layer"], is_wrong(table), strict=True))
    table["source"] = table["layer"].isin(failure_sources(state.problem.graph, wrong))
    return table


_COMPARED_COLUMNS = names_in(
    "layer op values introduced_snr_db introduced_max_abs max_abs snr_db engine_max_abs "
    "engine_finite ref_min ref_max"
)
COST_COLUMNS = names_in("engine outcome pins latency_ms engine_mb build_s context_s evaluation_s")
OUTPUT_COLUMNS = names_in(
    "baseline output outcome score max_abs mean_abs median_abs rel_range cosine snr_db"
)
MAX_CHOICE_NAME = 24
"""Characters of a choice's name from which on its rules are counted, not named."""

_STEPS = ("write", "parse", "build", "load", "context", "run")
_TENSORRT_STEPS = ("parse", "build", "load", "context", "run", "latency")


def outputs_table(baselines: Mapping[str, Evaluation]) -> pd.DataFrame:
    """A row per baseline and output: worst errors over the samples, then their means."""
    rows: list[dict[str, Any]] = []
    for label, result in baselines.items():
        of_all = {"outcome": result.verdict.value, "score": result.score}
        if not result.worst:  # it gave no outputs
            rows.append({"baseline": label, "output": "", **of_all})
        for output, error in result.worst.items():
            row = {"baseline": label, "output": output, **of_all, **error.as_dict()}
            for metric in ("max_abs", "rmse", "cosine"):
                row[f"mean_over_samples_{metric}"] = getattr(result.mean[output], metric)
            rows.append(row)
    return pd.DataFrame(rows)


def search_table(evaluations: Sequence[Evaluation]) -> pd.DataFrame:
    """A row per distinct evaluation, in order."""
    rows = [
        {
            "evaluation": index,
            "runner": p.runner,
            "on": p.on,
            "base": p.plan.base.value,
            "pins": len(p.plan.pinned),
            "outcome": p.verdict.value,
            "score": p.score,
            "seconds": round(p.seconds, 4),
            "note": p.note,
            "pinned": json.dumps(sorted(p.plan.pinned))
            if len(p.plan.pinned) <= 64
            else counted(len(p.plan.pinned), "layer"),
        }
        for index, p in enumerate(evaluations)
    ]
    return pd.DataFrame(rows)


def pins_table(
    layers: Sequence[Layer],
    plan: PrecisionPlan,
    proof: Mapping[str, Evaluation],
    log: Sequence[Evaluation],
    shares: Mapping[str, float],
) -> pd.DataFrame:
    """A row per pin of ``plan``, with its proof."""
    # By identity: equal evaluations have rows of their own in search.csv.
    places = {id(evaluation): place for place, evaluation in enumerate(log)}
    rows: list[dict[str, Any]] = []
    inherited = plan.inherited
    for layer in layers:
        if layer.name not in plan.pinned:
            continue
        row: dict[str, Any] = {"layer": layer.name, "op": layer.op, "scope": layer.scope}
        row["held"] = layer.name in plan.held
        found = proof.get(layer.name)
        if found is None:
            row |= {"proved": False, "proved_on": "", "tolerance_share": math.nan}
            row |= {"outcome_without": "", "score_without": math.nan, "proof_evaluation": -1}
            row |= {"missed_on": "", "of_all_given": False}
        else:
            share = shares.get(found.runner, 1.0)
            row |= {"proved": True, "proved_on": found.runner, "tolerance_share": share}
            row["outcome_without"] = found.verdict.value
            # A search with a share of the tolerance scores in multiples of that share.
            row["score_without"] = found.score * share
            logged = found.seen_in or found
            row["proof_evaluation"] = places[id(logged)]
            row |= {"missed_on": found.worst_on, "of_all_given": logged.on_given}
        row["inherited"] = found is None and layer.name in inherited
        rows.append(row)
    return pd.DataFrame(rows, columns=[column.name for column in PINS])


def cost_table(results: Mapping[str, Evaluation]) -> pd.DataFrame:
    """A row per engine: latency, size, and the seconds of each part of its evaluation."""
    rows: list[dict[str, Any]] = []
    for label, result in results.items():
        facts = result.facts
        if "latency_ms" not in facts:
            continue
        seconds, whole = facts["seconds"], result.seconds
        in_tensorrt = sum(seconds.get(step, 0.0) for step in _TENSORRT_STEPS)
        rows.append(
            {
                "engine": label,
                "outcome": result.verdict.value,
                "pins": len(result.plan.pinned),
                "latency_ms": facts["latency_ms"],
                "engine_mb": facts["engine_bytes"] / 1e6,
                **{f"{step}_s": seconds.get(step, math.nan) for step in _STEPS},
                "evaluation_s": whole,
                "own_share": (whole - in_tensorrt) / whole if whole else math.nan,
            }
        )
    return pd.DataFrame(rows)


def findings_of(results: Sequence[Evaluation]) -> list[Finding]:
    """Findings of the engines' builds, each once, and evaluations that failed to run."""
    found: dict[str, Finding] = {}
    for result in results:
        for entry in result.facts.get("findings", ()):
            found.setdefault(entry["message"], Finding(**entry))
        if result.note and not result.worst:
            plan = f"{result.plan.base.value} with {counted(len(result.plan.pinned), 'pin')}"
            message = f"{result.runner}, {plan}: {result.verdict}: {result.note}"
            found.setdefault(message, Finding("engine-failure", "", message))
    return list(found.values())


def worst_inputs(table: pd.DataFrame) -> pd.DataFrame:
    """The 12 rows of the inputs table with the largest scores under the plan."""
    scored = [c for c in table if str(c).startswith("plan_score_")]
    if not scored:
        return table.head(12)
    order = table[scored].max(axis=1).sort_values(ascending=False, kind="stable").index
    return table.loc[order].head(12)


def candidates_table(candidates: Sequence[Candidate]) -> pd.DataFrame:
    """A row per plan that was built and timed for the answer, the chosen one marked."""
    rows = [
        {
            "": ">" if one.chosen else "",
            "plan": one.name,
            "FP32 layers": len(one.layers),
            "worst score": one.score,
            "ms": "" if one.latency_ms is None else f"{one.latency_ms:.3f}",
            "passes": "yes" if one.passed else "no",
        }
        for one in candidates
    ]
    return pd.DataFrame(rows)


def times_table(times: Sequence[ChoiceTimes]) -> pd.DataFrame:
    """A row per choice that was timed, both ways to launch it."""
    rows = [
        {
            "choice": one.name,
            "CUDA graph, ms": "" if one.graph_ms is None else f"{one.graph_ms:.3f}",
            "single launches, ms": f"{one.plain_ms:.3f}",
            "between quartiles, ms": f"{one.spread_ms:.3f}",
        }
        for one in times
    ]
    return pd.DataFrame(rows)


def choices_table(
    choices: Sequence[Choice], rules: Sequence[str], requirements: Sequence[str] = ()
) -> pd.DataFrame:
    """A row per choice, in the order of :func:`by_weight`, the recommended one marked.

    ``rules`` are those of the repair. A single one of ``requirements`` gives the errors in its unit
    where that has one; other scores are shares of the tolerance.
    """
    rows, precision = [], _precision_of(choices)
    only = parse_known(requirements[0]) if len(requirements) == 1 else None
    head, values = _worst_errors(only, [choice.worst_score for choice in choices])
    shown = dict(zip((choice.name for choice in choices), values, strict=True))
    for choice in by_weight(choices):
        row: dict[str, object] = {"": ">" if choice.recommended else ""}
        row["choice"] = _choice_in_words(choice, rules, precision)
        row |= {"FP32 layers": len(choice.pinned), head: shown[choice.name]}
        if any(choice.latency_ms is not None for choice in choices):
            row["ms"] = "" if choice.latency_ms is None else f"{choice.latency_ms:.3f}"
        row[f"{precision} saving kept"] = share_kept(choice)
        rows.append({**row, "passes": _PASSES[choice.passes]})
    return pd.DataFrame(rows)


def by_weight(choices: Sequence[Choice]) -> list[Choice]:
    """What there is, then what passes, the recommended and the fastest first; FP32 is the last."""

    def weight(choice: Choice) -> tuple[int, bool, float, int]:
        places = {AS_IS: 0, FP32: 3}
        place = places.get(choice.name, 2 if choice.passes is Passes.NO else 1)
        time = math.inf if choice.latency_ms is None else choice.latency_ms
        return place, not choice.recommended, time, len(choice.pinned)

    return sorted(choices, key=weight)


def _precision_of(choices: Sequence[Choice]) -> str:
    """The precision asked for, in capitals: that of the first row."""
    return choices[0].plan.base.value.upper() if choices else "FP16"


def _choice_in_words(choice: Choice, rules: Sequence[str], precision: str) -> str:
    """A row's name for a reader, such as "3 layers in FP32"."""
    if choice.name == AS_IS:
        return f"{precision} {AS_IS}"
    if choice.name in (PLAN, KNEE):
        kept = f"{counted(len(choice.pinned), 'layer')} in FP32"
        return f"{kept} (knee)" if choice.name == KNEE else kept
    words = choice.in_words(rules)
    if len(words) <= MAX_CHOICE_NAME or not choice.repaired:
        return words
    return f"{choice.name} ({len(rules)} rules)"


def _worst_errors(only: Requirement | None, scores: Sequence[float]) -> tuple[str, list[str]]:
    """The column's head and its cells, in the metric's unit where every finite score has one."""
    values = [math.nan if only is None else only.value_at(score) for score in scores]
    number = [score < MAX_SCORE for score in scores]
    if only is None or any(n and math.isnan(v) for n, v in zip(number, values, strict=True)):
        cells = [
            f"{s:{',.0f' if s >= 100.0 else '.3g'}} of tolerance" if n else brief(s)
            for s, n in zip(scores, number, strict=True)
        ]
        return "worst score", cells
    unit = " dB" if only.metric.endswith("_db") else ""
    metric = only.metric.removesuffix("_db").upper() if unit else only.metric
    digits = ".1f" if unit else ".6g" if only.at_least else ".3g"
    cells = [
        brief(s) if math.isnan(v) else "exact" if math.isinf(v) else f"{v:{digits}}{unit}"
        for s, v in zip(scores, values, strict=True)
    ]
    return f"{only.aggregate} {metric}", cells


def cures_table(result: Record) -> pd.DataFrame:
    """A row per usual cure, tried or not, with its error and its time."""
    by_name = {choice.name: choice for choice in result.choice_rows}
    has_time = any(choice.latency_ms is not None for choice in result.choice_rows)
    rows = []
    low = result.precision.value.upper()
    for name, words in (
        (AS_IS, f"plain {low}"),
        (REPAIRED, "graph repaired"),
        (FITTED, "weights rounded to fit"),
        (KNEE, "fewer layers in FP32 (knee)"),
        (PLAN, "layers in FP32"),
        (BF16, "BF16"),
        (TF32, "TF32"),
        (FP32, "FP32"),
    ):
        # The knee is a choice only where one was found.
        if words == low or (name == KNEE and name not in by_name):
            continue
        row: dict[str, object] = {"cure": words, "FP32 layers": "", "worst score": ""}
        row |= {"ms": ""} if has_time else {}
        row |= {f"{low} saving kept": "", "passes": "not tried"}
        choice = by_name.get(name)
        if name == TF32:
            row |= _in_tf32(result)
        elif choice is not None:
            row["FP32 layers"] = len(choice.pinned)
            row["worst score"] = brief(choice.worst_score)
            if choice.latency_ms is not None:
                row["ms"] = f"{choice.latency_ms:.3f}"
            row[f"{low} saving kept"] = share_kept(choice)
            row["passes"] = _PASSES[choice.passes]
        rows.append(row)
    return pd.DataFrame(rows)


TF32 = "TF32"


def _in_tf32(result: Record) -> dict[str, object]:
    """The cells of everything in TF32, from the baselines; empty where it was not run."""
    if result.by_requirement.empty:
        return {}
    scores = [
        float(score)
        for baselines in result.by_requirement["baselines"]
        for label, score in baselines.items()
        if label.removeprefix(f"{result.runner} ") == "tf32"
    ]
    if not scores:
        return {}
    passes = Passes.GIVEN if max(scores) <= 1.0 else Passes.NO
    return {"FP32 layers": 0, "worst score": brief(max(scores)), "passes": _PASSES[passes]}


_PASSES = {Passes.VALIDATED: "validated", Passes.GIVEN: "your inputs", Passes.NO: "no"}


def share_kept(choice: Choice) -> str:
    """The share of the saving, with a ~ where it is estimated."""
    if choice.saving_kept is None:
        return ""
    return f"{'~' if choice.is_estimated else ''}{choice.saving_kept:.0%}".replace("%", " %")


def repairs_table(facts: RepairFacts) -> pd.DataFrame:
    """A row per edit of the graph."""
    rows = []
    for row in facts.rows:
        found: dict[str, object] = {"rule": row.rule, "nodes": some_of(list(row.nodes))}
        found |= {"in the code": ", ".join(row.sources), "edit": row.sentence}
        changed = [f"{name}: {before}, then {after}" for name, before, after in row.constants]
        constants = some_of(changed, 3, "; ")
        found |= {"constants": constants, "largest before": _maybe(row.largest_before)}
        found |= {"largest after": _maybe(row.largest_after), "nodes added": row.nodes_added}
        found |= {"score without the rule": _maybe(row.score_without), "identity": row.identity}
        rows.append(found)
    table = pd.DataFrame(rows)
    return table.drop(columns=[c for c in ("in the code",) if len(table) and not table[c].any()])


def _maybe(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def suspect_layers(table: pd.DataFrame) -> pd.DataFrame:
    """The 40 rows of the layer table that ``compare`` shows, the worst first.

    Layers that make non-finite values come first, then layers that pass them on.
    """
    makes = ~table["introduced_finite"].astype(bool)
    broken = ~table["finite"].astype(bool) & table["ref_max"].notna()
    where = np.select([makes, broken], ["not finite: made here", "not finite"], "")
    by_error = table["introduced_snr_db"].mask(makes, -np.inf)  # these keep the network's order
    order = np.select([makes, broken], [0, 1], 2)
    ranked = table.assign(values=where, _order=order, _error=by_error)
    ranked = ranked.sort_values(["_order", "_error"], kind="stable")
    return ranked[[c for c in _COMPARED_COLUMNS if c in ranked]].head(40)


def pins_by_effect(result: Record) -> pd.DataFrame:
    """The pins by sensitivity, the largest first, with their proofs and their layers' columns.

    Those that were not measured alone follow by rank, then those that only move values, then those
    held from the start.
    """
    if result.pins.empty:
        return result.pins
    names = ("sensitivity", "rank", "module", "file", "line")
    present = [c for c in names if c in result.layers]
    pins = result.pins.merge(result.layers[["layer", *present]], on="layer", how="left")
    order = [c for c in ("held", "inherited", "sensitivity", "rank") if c in pins]
    rising = [name != "sensitivity" for name in order]
    return pins.sort_values(order, ascending=rising, kind="stable")


def shown_pins(result: Record) -> pd.DataFrame:
    """The pins for a page, in the same order; without the columns that say nothing of them."""
    pins = pins_by_effect(result)
    if pins.empty:
        return pins
    unused = [c for c in ("held", "inherited") if c in pins and not pins[c].any()]
    unused += ["proved"] if pins["proved"].all() else []
    if not pins["proved"].any():
        unused += [c.name for c in PINS if c.name not in ("layer", "op", "held", "inherited")]
    return pins.drop(columns={"rank", *unused} & {*pins})


def requirements_table(
    texts: Sequence[str],
    reduced: Sequence[Evaluation],
    plan: Sequence[Evaluation],
    baselines: Mapping[str, Evaluation],
) -> pd.DataFrame:
    """A row per requirement: its worst scores reduced, under the plan and in each baseline."""
    by_label = {label: r.by_condition for label, r in baselines.items() if r.by_condition}
    rows = []
    for place, text in enumerate(texts):
        row: dict[str, object] = {"requirement": text}
        for name, results in (("reduced", reduced), ("plan", plan)):
            scores = [r.by_condition[place] for r in results if r.by_condition]
            row[f"{name}_score"] = max(scores, default=math.nan)
        row["baselines"] = {label: scores[place] for label, scores in by_label.items()}
        rows.append(row)
    return pd.DataFrame(rows)


def judged_scores(table: pd.DataFrame) -> dict[str, float]:
    """The score that decides each requirement.

    It is the plan's; without a plan FP32's if that misses, else that of everything reduced.
    """
    if not len(table):
        return {}
    fp32 = table["baselines"].map(
        lambda scores: max((s for label, s in scores.items() if label.endswith("fp32")), default=0)
    )
    other = fp32.astype(float) if fp32.max() > 1.0 else table["reduced_score"]
    return dict(zip(table["requirement"], table["plan_score"].fillna(other), strict=True))
