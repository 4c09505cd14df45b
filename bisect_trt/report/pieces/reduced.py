"""What a reduction says to people and machines."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from bisect_trt.core.holds import CONFIDENCE
from bisect_trt.core.names import counted
from bisect_trt.runners.tensorrt.module import MODULES
from bisect_trt.stations.pieces.engine_trials import BAD_SHARE, PROCESSES
from bisect_trt.stations.pieces.explained import FACTOR
from bisect_trt.stations.pieces.reduce import Reduced
from bisect_trt.stations.pieces.seen import Seen, Suspect

_NAMED = 6


def engine_of(reduced: Reduced) -> str | None:
    """The module of the TensorRT that did it; None where it was none."""
    return next((m for m in MODULES if m in reduced.versions), None)


def sentence(reduced: Reduced) -> str:
    """What is wrong with the piece, in one sentence."""
    version = ", ".join(f"{k} {v}" for k, v in reduced.versions.items() if k in _ENGINES)
    who = f"{version or 'The engine'} at {reduced.precision.value.upper()}"
    what = f"{counted(len(reduced.nodes), 'node')} ({_operators(reduced)})"
    if reduced.suspect is Suspect.CHECK:
        return f"The check calls a model of {what} bad."
    if reduced.suspect is Suspect.FAILED:
        return f"{who} does not build or run a model of {what}."
    if reduced.suspect is Suspect.UNSTEADY:
        return f"{who} gives different answers to the same input on a model of {what}."
    return f"{who} gives wrong answers on a model of {what}."


_ENGINES = (*MODULES, "onnxruntime")


def headline(reduced: Reduced) -> str:
    """The answer: how small the piece is, and whether it could be smaller."""
    left, names = len(reduced.nodes), [f"{n} ({op})" for n, op in reduced.nodes]
    more = f" and {left - _NAMED} more" if left > _NAMED else ""
    proof = "the builds or the time that it may take ended the search"
    if reduced.complete:
        proof = "nothing can be left out"
    elif reduced.interrupted:
        proof = "the search was interrupted"
    return (
        f"{_BAD[reduced.suspect]} with {left} of {counted(reduced.of, 'node')}: "
        f"{', '.join(names[:_NAMED])}{more}; {proof}."
    )


_BAD = {
    Suspect.FAILED: "Fails to build or run",
    Suspect.WRONG: "Wrong",
    Suspect.UNSTEADY: "Unsteady",
    Suspect.CHECK: "Fails the check",
}


def nothing_bad(whole: Seen) -> str:
    """Why nothing was reduced."""
    if whole.by_command:
        return "The whole model passes the check (exit code 0): there is nothing to reduce."
    if whole.processes < PROCESSES:
        seen = counted(whole.processes, "fresh process")
        return (
            f"The whole model was right in {seen}, which says little: `bisect-trt reduce` looks "
            "longer."
        )
    return (
        f"The whole model is right: {whole.runs} runs in "
        f"{counted(whole.processes, 'fresh process')}, error at most {whole.worst:.2g} times what "
        "rounding explains, every answer the same; there is nothing to reduce."
    )


def figures(reduced: Reduced) -> list[str]:
    """What the whole and the piece showed, a line each."""
    if reduced.suspect is Suspect.CHECK:
        return [f"The whole model: {reduced.whole.failure}", f"The piece: {reduced.seen.failure}"]
    lines = [f"The whole model: {_shown(reduced.whole)}", f"The piece: {_shown(reduced.seen)}"]
    if reduced.suspect in (Suspect.WRONG, Suspect.UNSTEADY):
        lines.append(
            f"Wrong means an error over {FACTOR:g} times that of the piece emulated at "
            f"{reduced.explained.value.upper()}, against ONNX Runtime's CPU provider in FP32."
        )
    return lines


def reduced_how(reduced: Reduced) -> list[str]:
    """The steps of the search, a line each, and what they stand on."""
    lines = [f"{s.what}: {s.tried} tried, {counted(s.left, 'node')} left" for s in reduced.steps]
    kind = "calls of the check" if reduced.suspect is Suspect.CHECK else "engine builds"
    lines.append(f"In all {reduced.builds} {kind} in {reduced.seconds:.0f} s.")
    if reduced.suspect is Suspect.UNSTEADY:
        lines.append(
            f"What was left out was tried in {PROCESSES} fresh processes: were {BAD_SHARE:.0%} of "
            f"them bad or more, one would have been seen with {CONFIDENCE:.0%} confidence."
        )
    if reduced.bypassed:
        lines.append(f"Bypassed, an input taking the output's place: {', '.join(reduced.bypassed)}")
    if reduced.always:
        lines.append(
            "No piece that was tried was ever fine: look whether the judge can tell good from bad."
        )
    return lines


def as_record(found: Reduced | Seen) -> dict[str, Any]:
    """What was found, for machines: where nothing is bad there is no piece."""
    if isinstance(found, Reduced):
        return as_json(found)
    return {"suspect": None, "whole": _plain(found)}


def as_json(reduced: Reduced) -> dict[str, Any]:
    """The record for machines, arrays and model apart."""
    return {
        "suspect": reduced.suspect.value,
        "precision": reduced.precision.value,
        "explained": reduced.explained.value,
        "nodes": [{"name": n, "op": op} for n, op in reduced.nodes],
        "bypassed": list(reduced.bypassed),
        "of": reduced.of,
        "complete": reduced.complete,
        "interrupted": reduced.interrupted,
        "always": reduced.always,
        "input": reduced.sample.name,
        "whole": _plain(reduced.whole),
        "piece": _plain(reduced.seen),
        "steps": [asdict(step) for step in reduced.steps],
        "builds": reduced.builds,
        "seconds": reduced.seconds,
        "seeded": [asdict(weights) for weights in reduced.seeded],
        "versions": dict(reduced.versions),
    }


def _plain(seen: Seen) -> dict[str, Any]:
    return {**asdict(seen), "verdict": seen.verdict.value}


def _shown(seen: Seen) -> str:
    if seen.failure:
        return seen.failure
    return (
        f"{seen.wrong} of {seen.runs} runs wrong, {seen.differing} of "
        f"{counted(seen.processes, 'fresh process')} with different answers, error up to "
        f"{seen.worst:.3g} times what rounding explains"
    )


def _operators(reduced: Reduced) -> str:
    most = Counter(op for _, op in reduced.nodes).most_common(_NAMED)
    return ", ".join(f"{n} {op}" if n > 1 else op for op, n in most)
