"""Writes the sentences and files of `reduce` and `cure`."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import onnx
import pandas as pd

from bisect_trt.base.display import cell, counted, markdown, some_of
from bisect_trt.base.outcomes import CONFIDENCE
from bisect_trt.base.plan import Precision
from bisect_trt.inputs.npz import write_npz
from bisect_trt.model.save import save_model
from bisect_trt.reduction.cures import Cure, Cures
from bisect_trt.reduction.oracle import (
    BAD_SHARE,
    EXPECTED,
    INPUTS,
    MODEL,
    PROCESSES,
    ROUNDING_FACTOR,
    Observation,
    Suspect,
)
from bisect_trt.reduction.reduce import Reduced
from bisect_trt.report.files import OwnedFolder, to_json
from bisect_trt.report.html import text_environment
from bisect_trt.report.text import number
from bisect_trt.runners.tensorrt.records import MODULES

CURE_FOLDER = OwnedFolder(
    "bisect-trt cure",
    frozenset({"cures.csv", "cures.json", "model.cured.onnx", "model.cured.onnx.data"}),
    "cures.json",
)
FOLDER = OwnedFolder(
    "bisect-trt reduce",
    frozenset({"reduce.json", MODEL, f"{MODEL}.data", INPUTS, EXPECTED, "run.py", "README.md"}),
    "reduce.json",
)

MAX_NAMES = 6
"""Names that a sentence lists."""

_BAD = {
    Suspect.FAILED: "Fails to build or run",
    Suspect.WRONG: "Wrong",
    Suspect.NOT_REPRODUCIBLE: "Not reproducible",
    Suspect.CHECK: "Fails the check",
}


def headline_of_cures(cures: Cures) -> str:
    """The answer in one sentence."""
    if not cures.needed:
        return (
            f"The model is right and reproducible as it is: {cures.tried[0].seen.runs} runs in "
            f"{PROCESSES} fresh processes; there is nothing to cure."
        )
    smallest = cures.smallest
    if smallest is None:
        ended = "an interruption" if cures.interrupted else "--max-builds"
        spent = "" if cures.complete else f" before {ended} ended the search"
        return f"None of {max(0, len(cures.tried) - 1)} cures works{spent}."
    written = "; model.cured.onnx is that model" if smallest.model is not None else ""
    return f"Cured by {smallest.name}: {smallest.how}{written}."


def line_of_cure(cure: Cure) -> str:
    """A line on one cure, for the screen."""
    results = cure.seen
    if results.failure:
        return f"{cure.name}: {results.failure[:200]}"
    word = "right and reproducible" if cure.works else str(results.suspect)
    return (
        f"{cure.name}: {word}; {results.wrong} of {results.runs} runs wrong in {results.processes} "
        f"processes, {number(cure.latency_ms)} ms, {cure.engine_bytes / 2**20:.1f} MB"
    )


def table_of_cures(cures: Cures) -> pd.DataFrame:
    """A row per cure, for cures.csv."""
    return pd.DataFrame(
        [
            {
                "cure": cure.name,
                "works": cure.works,
                "right": cure.seen.runs > 0 and cure.seen.wrong == 0 and not cure.seen.failure,
                "reproducible": cure.seen.runs > 0 and cure.seen.differing == 0,
                "processes": cure.seen.processes,
                "runs": cure.seen.runs,
                "wrong_runs": cure.seen.wrong,
                "error_over_allowed": cure.seen.worst,
                "latency_ms": cure.latency_ms,
                "engine_bytes": cure.engine_bytes,
                "how": cell(cure.how),
                "failure": cell(cure.seen.failure),
            }
            for cure in cures.tried
        ]
    )


def cures_as_json(cures: Cures) -> dict[str, Any]:
    """The content of cures.json."""
    return {
        "kind": CURE_FOLDER.command,
        "complete": cures.complete,
        "smallest": cures.smallest.name if cures.smallest is not None else None,
        "tried": [
            {
                "cure": c.name,
                "how": c.how,
                "works": c.works,
                "marks": list(c.marks),
                "latency_ms": c.latency_ms,
                "engine_bytes": c.engine_bytes,
                "seen": _as_json(c.seen),
            }
            for c in cures.tried
        ],
    }


def write_cures(cures: Cures, folder: Path) -> None:
    """Writes the table, the record and the cured model over earlier ones.

    Raises:
        BadInputError: the folder cannot be written.
        MachineError: the disk is full; earlier files are unchanged.
    """
    with CURE_FOLDER.written(folder) as draft:
        smallest = cures.smallest
        if smallest is not None and smallest.model is not None:
            save_model(smallest.model, draft / "model.cured.onnx")
        table_of_cures(cures).to_csv(draft / "cures.csv", index=False)
        record = to_json(cures_as_json(cures))
        (draft / CURE_FOLDER.record).write_text(record + "\n", encoding="utf-8")


def sentence(reduced: Reduced) -> str:
    """What is wrong with the subgraph, in one sentence."""
    operators = Counter(op for _, op in reduced.nodes).most_common(MAX_NAMES)
    listed = ", ".join(f"{n} {op}" if n > 1 else op for op, n in operators)
    what = f"{counted(len(reduced.nodes), 'node')} ({listed})"
    if reduced.suspect is Suspect.CHECK:
        return f"The check calls a model of {what} bad."
    engines = [f"{k} {v}" for k, v in reduced.versions.items() if k in (*MODULES, "onnxruntime")]
    engine = f"{', '.join(engines) or 'The engine'} at {reduced.precision.value.upper()}"
    if reduced.suspect is Suspect.FAILED:
        return f"{engine} does not build or run a model of {what}."
    if reduced.suspect is Suspect.NOT_REPRODUCIBLE:
        return f"{engine} gives different answers to the same input on a model of {what}."
    return f"{engine} gives wrong answers on a model of {what}."


def headline(reduced: Reduced) -> str:
    """The answer: the size of the subgraph, and whether it could be smaller."""
    names = some_of([f"{n} ({op})" for n, op in reduced.nodes], MAX_NAMES)
    if reduced.complete:
        proof = "nothing can be left out"
    elif reduced.interrupted:
        proof = "the search was interrupted"
    else:
        proof = "the builds or the time that it may take ended the search"
    size = f"{len(reduced.nodes)} of {counted(reduced.of, 'node')}"
    return f"{_BAD[reduced.suspect]} with {size}: {names}; {proof}."


def nothing_bad(whole: Observation) -> str:
    """Why nothing was reduced."""
    if whole.by_command:
        return "The whole model passes the check (exit code 0): there is nothing to reduce."
    processes = counted(whole.processes, "fresh process")
    if whole.processes < PROCESSES:
        return (
            f"The whole model was right in {processes}, which says little: `bisect-trt reduce` "
            "looks longer."
        )
    return (
        f"The whole model is right: {whole.runs} runs in {processes}, error at most "
        f"{whole.worst:.2g} times what rounding explains, every answer the same; there is nothing "
        "to reduce."
    )


def figures(reduced: Reduced) -> list[str]:
    """The results of the whole model and of the subgraph, a line each."""
    lines = [
        f"The whole model: {_results(reduced.whole)}",
        f"The subgraph: {_results(reduced.seen)}",
    ]
    if reduced.suspect in (Suspect.WRONG, Suspect.NOT_REPRODUCIBLE):
        lines.append(
            f"Wrong means an error over {ROUNDING_FACTOR:g} times that of the subgraph emulated at "
            f"{reduced.explained.value.upper()}, against ONNX Runtime's CPU provider in FP32."
        )
    return lines


def _results(found: Observation) -> str:
    return found.failure or (
        f"{found.wrong} of {found.runs} runs wrong, {found.differing} of "
        f"{counted(found.processes, 'fresh process')} with different answers, error up to "
        f"{found.worst:.3g} times what rounding explains"
    )


def search_lines(reduced: Reduced) -> list[str]:
    """The steps of the search, a line each, and the limits of the result."""
    lines = [f"{s.what}: {s.tried} tried, {counted(s.left, 'node')} left" for s in reduced.steps]
    kind = "calls of the check" if reduced.suspect is Suspect.CHECK else "engine builds"
    lines.append(f"In all {reduced.builds} {kind} in {reduced.seconds:.0f} s.")
    if reduced.suspect is Suspect.NOT_REPRODUCIBLE:
        lines.append(
            f"What was left out was tried in {PROCESSES} fresh processes: were {BAD_SHARE:.0%} of "
            f"them bad or more, one would have been seen with {CONFIDENCE:.0%} confidence."
        )
    if reduced.always:
        lines.append(
            "No subgraph that was tried was ever fine: check that the judge can tell good from bad."
        )
    return lines


def as_record(found: Reduced | Observation) -> dict[str, Any]:
    """The content of reduce.json, without a subgraph where nothing is bad."""
    if isinstance(found, Observation):
        return {"suspect": None, "whole": _as_json(found)}
    return {
        "suspect": found.suspect.value,
        "precision": found.precision.value,
        "explained": found.explained.value,
        "nodes": [{"name": n, "op": op} for n, op in found.nodes],
        "of": found.of,
        "complete": found.complete,
        "interrupted": found.interrupted,
        "always": found.always,
        "input": found.sample.name,
        "whole": _as_json(found.whole),
        "subgraph": _as_json(found.seen),
        "steps": [asdict(step) for step in found.steps],
        "builds": found.builds,
        "seconds": found.seconds,
        "versions": dict(found.versions),
    }


def _as_json(found: Observation) -> dict[str, Any]:
    return {**asdict(found), "verdict": found.verdict.value}


def write_reproducer(reduced: Reduced, folder: Path, made_by: str) -> None:
    """Writes the reproducer over an earlier one.

    Raises:
        MachineError: the disk is full; an earlier reproducer is unchanged.
        BadInputError: the folder cannot be written.
    """
    engine = next((module for module in MODULES if module in reduced.versions), None)
    with FOLDER.written(folder) as draft:
        save_model(reduced.model, draft / MODEL)
        write_npz(draft / INPUTS, reduced.sample.arrays)
        write_npz(draft / EXPECTED, reduced.expected)
        if engine is not None:
            script = _rendered(
                "run.py.j2",
                module=engine,
                runs=10,
                tf32=reduced.precision is Precision.TF32,
                allowed=repr({n: reduced.seen.allowed[n] for n in reduced.expected}),
                breaks=repr(list(reduced.seen.breaks)),
            )
            (draft / "run.py").write_text(script, encoding="utf-8")
        size = sum(path.stat().st_size for path in draft.iterdir())
        readme = _rendered(
            "reproducer.md.j2",
            sentence=markdown(sentence(reduced)),
            versions=[(k, markdown(v)) for k, v in reduced.versions.items() if k != "profile"],
            engine=engine,
            not_reproducible=reduced.suspect is Suspect.NOT_REPRODUCIBLE,
            by_command=reduced.suspect is Suspect.CHECK,
            made_by=made_by.replace("`", "'"),
            figures=[markdown(line) for line in figures(reduced)],
            how=[markdown(line) for line in search_lines(reduced)],
            nodes=[(markdown(n), markdown(op)) for n, op in reduced.nodes],
            size=f"{size / 2**20:.1f} MB" if size >= 2**20 else f"{size / 2**10:.1f} kB",
            onnx=onnx.__version__,
        )
        (draft / "README.md").write_text(readme, encoding="utf-8", errors="replace")
        record = {"kind": FOLDER.command, **as_record(reduced), "made_by": made_by, "bytes": size}
        (draft / FOLDER.record).write_text(to_json(record) + "\n", encoding="utf-8")


def _rendered(name: str, **values: Any) -> str:
    return str(text_environment().get_template(name).render(**values))
