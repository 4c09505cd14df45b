"""The rows of the CSV files."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from bisect_trt.base.display import counted, plural
from bisect_trt.base.outcomes import Finding
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.evaluate.result import Evaluation
from bisect_trt.model.graph import Graph
from bisect_trt.model.layers import Layer
from bisect_trt.model.patterns import Origin, Pattern, list_origins
from bisect_trt.model.tensor_types import captured_names
from bisect_trt.report.columns import PINS
from bisect_trt.report.record import Record
from bisect_trt.steps.answer import RunState

_SHOWN = 6


def in_words(
    pinned: Sequence[str], patterns: Sequence[Pattern], layers: Sequence[Layer]
) -> list[str]:
    """The pins by block, the largest first: "5 of the 5 LayerNorms: Pow, ReduceMean of each"; what
    is in no pattern, by module.
    """
    wanted, known = set(pinned), {layer.name: layer for layer in layers}
    lines: list[tuple[int, str]] = []
    told = set[str]()
    groups: dict[tuple[str, tuple[str, ...]], list[Pattern]] = {}
    for pattern in patterns:
        ops = tuple(known[n].op for n in pattern.layers if n in wanted and n in known)
        if ops and told.isdisjoint(n for n in pattern.layers if n in wanted):
            groups.setdefault((pattern.kind, ops), []).append(pattern)
            told.update(n for n in pattern.layers if n in wanted)
    totals = Counter(p.kind for p in patterns)
    for (kind, ops), members in groups.items():
        counted = ", ".join(f"{n} {op}" if n > 1 else op for op, n in Counter(ops).items())
        one = "" if len(members) == 1 else " of each"
        which = f"{len(members)} of the {totals[kind]} {plural(kind)}" if totals[kind] > 1 else kind
        inside = "" if ops == (kind,) else f": {counted}{one}"
        lines.append((len(members) * len(ops), which + inside))
    scopes: dict[str, list[str]] = {}
    for name in pinned:
        if name not in told and name in known:
            scopes.setdefault(_module(known[name].scope), []).append(known[name].op)
    for scope, left in scopes.items():
        counted = ", ".join(f"{n} {op}" if n > 1 else op for op, n in Counter(left).most_common())
        lines.append((len(left), f"{scope or 'the main graph'}: {counted}"))
    lines.sort(key=lambda line: -line[0])
    shown = [words for _, words in lines[:_SHOWN]]
    if len(lines) > _SHOWN:
        unsaid = sum(pins for pins, _ in lines[_SHOWN:])
        blocks = "1 block" if len(lines) == _SHOWN + 1 else f"{len(lines) - _SHOWN} blocks"
        shown.append(f"and {unsaid} more in {blocks}, in pins.csv")
    return shown


def _module(scope: str) -> str:
    """The two outermost parts of a scope."""
    return "/".join([part for part in scope.split("/") if part][:2])


WRONG_BELOW_DB = 20.0


def is_measured(table: pd.DataFrame) -> pd.Series[bool]:
    """Whether the errors of each row of a layer table are known."""
    # A layer of which nothing is finite has no error either, but a count of what is not.
    counted = table["nonfinite"].notna() if "nonfinite" in table else False
    return table["max_abs"].notna() | counted


def is_wrong(table: pd.DataFrame) -> pd.Series[bool]:
    """Whether each row of a layer table is wrong with everything reduced; a layer whose errors are
    not known is not.
    """
    broken = ~table["finite"].astype(bool) & is_measured(table)
    return broken | (table["snr_db"] < WRONG_BELOW_DB)


def failure_sources(graph: Graph, wrong: Mapping[str, bool]) -> frozenset[str]:
    """The wrong layers all of whose inputs are right."""
    spoilt: set[str] = set()
    sources = []
    for node, name in zip(graph.proto.graph.node, graph.names, strict=True):
        reads_wrong = not spoilt.isdisjoint((*node.input, *captured_names(node)))
        if wrong.get(name, reads_wrong):
            spoilt.update(node.output)
            if not reads_wrong:
                sources.append(name)
    return frozenset(sources)


def layers_table(known: RunState, plan: PrecisionPlan) -> pd.DataFrame:
    """A row a layer, or a row each of those that ``--mark`` asks for, as far as the run came;
    ``source`` marks layers that are wrong although what they read is right (see
    ``failure_sources``).
    """
    table = with_origins(_all_layers(known, plan), list_origins(known.problem.graph))
    marked = known.problem.marked
    return table if marked is None else table[table["layer"].isin(marked)].reset_index(drop=True)


def _all_layers(known: RunState, plan: PrecisionPlan) -> pd.DataFrame:
    if known.baselines is None:
        rows = [{"layer": x.name, "op": x.op, "scope": x.scope} for x in known.problem.layers]
        return pd.DataFrame([{**row, "pinned": False} for row in rows])
    table = known.baselines.layers.copy()
    table["pinned"] = table["layer"].isin(plan.pinned)
    if known.triage is not None:
        table["sensitivity"] = table["layer"].map(dict(known.triage.sensitivity.scores))
        places = {name: place for place, name in enumerate(known.triage.ranking, start=1)}
        table["rank"] = table["layer"].map(places)
    if known.engine is not None and known.engine.table is not None:
        table = known.engine.table.joined(table)
    wrong = dict(zip(table["layer"], is_wrong(table), strict=True))
    table["source"] = table["layer"].isin(failure_sources(known.problem.graph, wrong))
    return table


def with_origins(table: pd.DataFrame, origins: Mapping[str, Origin]) -> pd.DataFrame:
    """A layer table with what each layer's exporter said of where it comes from (``module``,
    ``module_class``, ``file``, ``line``, ``code``), blank where it said nothing.
    """
    found = [origins.get(str(name), Origin()) for name in table["layer"]]
    lines = pd.Series([o.line or None for o in found], index=table.index, dtype="Int64")
    return table.assign(
        module=[o.module for o in found],
        module_class=[o.module_class for o in found],
        file=[o.file for o in found],
        line=lines,
        code=[o.code for o in found],
    )


_SHOWN_LAYERS, _SHOWN_INPUTS = 40, 12
_LAYER_COLUMNS = [
    "layer",
    "op",
    "pinned",
    "sensitivity",
    "introduced_max_abs",
    "max_abs",
    "snr_db",
    "finite",
    "engine_max_abs",
    "engine_finite",
    "ref_min",
    "ref_max",
]

_COMPARED_COLUMNS = [
    "layer",
    "op",
    "values",
    "introduced_snr_db",
    "introduced_max_abs",
    "max_abs",
    "snr_db",
    "engine_max_abs",
    "engine_finite",
    "ref_min",
    "ref_max",
]

COST_COLUMNS = [
    "engine",
    "outcome",
    "pins",
    "latency_ms",
    "engine_mb",
    "build_s",
    "context_s",
    "evaluation_s",
]
OUTPUT_COLUMNS = [
    "baseline",
    "output",
    "outcome",
    "score",
    "max_abs",
    "mean_abs",
    "median_abs",
    "rel_range",
    "cosine",
    "snr_db",
]
_STEPS = ("write", "parse", "build", "load", "context", "run")


def outputs_table(baselines: Mapping[str, Evaluation]) -> pd.DataFrame:
    """A row for each baseline and output: worst errors over the samples, then their means."""
    rows: list[dict[str, Any]] = []
    for label, result in baselines.items():
        if not result.worst:
            rows.append(
                {
                    "baseline": label,
                    "output": "",
                    "outcome": result.verdict.value,
                    "score": result.score,
                }
            )
        for output, error in result.worst.items():
            mean = result.mean[output]
            rows.append(
                {
                    "baseline": label,
                    "output": output,
                    "outcome": result.verdict.value,
                    "score": result.score,
                    **error.as_dict(),
                    "mean_over_samples_max_abs": mean.max_abs,
                    "mean_over_samples_rmse": mean.rmse,
                    "mean_over_samples_cosine": mean.cosine,
                }
            )
    return pd.DataFrame(rows)


def search_table(evaluations: Sequence[Evaluation]) -> pd.DataFrame:
    """A row for each distinct evaluation, in order."""
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
    """A row for each pin of ``plan`` with its proof."""
    places = {id(one): place for place, one in enumerate(log)}
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
            # Its score is told in units of what it was held to.
            row["score_without"] = found.score * share
            logged = found.seen_in or found
            row["proof_evaluation"] = places[id(logged)]
            row |= {"missed_on": found.worst_on, "of_all_given": logged.on_given}
        row["inherited"] = found is None and layer.name in inherited
        rows.append(row)
    return pd.DataFrame(rows, columns=[column.name for column in PINS])


def cost_table(results: Mapping[str, Evaluation]) -> pd.DataFrame:
    """A row for each engine: latency, size, build time, and the tool's own share of the
    evaluation's time.
    """
    rows: list[dict[str, Any]] = []
    for label, result in results.items():
        facts = result.facts
        if "latency_ms" in facts:
            seconds = facts["seconds"]
            rows.append(
                {
                    "engine": label,
                    "outcome": result.verdict.value,
                    "pins": len(result.plan.pinned),
                    "latency_ms": facts["latency_ms"],
                    "engine_mb": facts["engine_bytes"] / 1e6,
                    **{f"{step}_s": seconds.get(step, math.nan) for step in _STEPS},
                    "evaluation_s": result.seconds,
                    "own_share": _own_share(result.seconds, facts),
                }
            )
    return pd.DataFrame(rows)


def findings_of(results: Sequence[Evaluation]) -> list[Finding]:
    """What the engines' builders and read-backs found, each once; an evaluation that broke says so
    with its log's last lines.
    """
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
    """The rows of the inputs' table worth showing: those with the largest scores under the plan."""
    scored = [c for c in table if str(c).startswith("plan_score_")]
    if not scored:
        return table.head(_SHOWN_INPUTS)
    order = table[scored].max(axis=1).sort_values(ascending=False, kind="stable").index
    return table.loc[order].head(_SHOWN_INPUTS)


def worst_layers(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of the layer table worth showing: pinned layers, then those that do most alone."""
    by = next(c for c in ("sensitivity", "introduced_max_abs", "layer") if c in table)
    ranked = table.sort_values(["pinned", by], ascending=[False, False], kind="stable")
    known = [c for c in _LAYER_COLUMNS if c in ranked]
    if not ranked["pinned"].any():
        known.remove("pinned")
    return ranked[known].head(_SHOWN_LAYERS)


def suspect_layers(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of the layer table that a comparison shows: layers that make values which are not
    finite, then those that only pass them on, then by the error that each introduces.
    """
    if "introduced_finite" not in table:
        return worst_layers(table)
    makes = ~table["introduced_finite"].astype(bool)
    broken = ~table["finite"].astype(bool) & table["ref_max"].notna()
    where = np.select([makes, broken], ["not finite: made here", "not finite"], "")
    by_error = table["introduced_snr_db"].mask(makes, -np.inf)  # those stay in the network's order
    order = np.select([makes, broken], [0, 1], 2)
    ranked = table.assign(values=where, _order=order, _error=by_error)
    ranked = ranked.sort_values(["_order", "_error"], kind="stable")
    known = [c for c in _COMPARED_COLUMNS if c in ranked]
    return ranked[known].head(_SHOWN_LAYERS)


def shown_pins(result: Record) -> pd.DataFrame:
    """The pins with their proof; where none is proved, with what each layer does alone."""
    if result.pins["proved"].any() or result.pins.empty:
        return result.pins
    pins = result.pins[["layer", "op", "scope"]]
    if "sensitivity" not in result.layers:
        return pins
    return pins.merge(result.layers[["layer", "sensitivity"]], on="layer", how="left")


def _own_share(seconds: float, facts: Mapping[str, Any]) -> float:
    """The part of an evaluation's ``seconds`` that is not TensorRT's: typed model, transport,
    comparison.
    """
    theirs = sum(
        facts.get("seconds", {}).get(step, 0.0)
        for step in ("parse", "build", "load", "context", "run", "latency")
    )
    return (seconds - theirs) / seconds if seconds else math.nan
