"""The reports of `reduce` and `cure`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import onnx
import pandas as pd

from bisect_trt.base.display import cell, counted, markdown
from bisect_trt.base.outcomes import CONFIDENCE
from bisect_trt.base.plan import Precision
from bisect_trt.inputs.arrays import write_npz
from bisect_trt.model.save import save_model
from bisect_trt.reduction.cures import Cure, Cures
from bisect_trt.reduction.oracle import BAD_SHARE, FACTOR, PROCESSES, Observation, Suspect
from bisect_trt.reduction.reduce import SMALL, Reduced, Seeded, kept_apart
from bisect_trt.report.files import OwnedFolder, to_json
from bisect_trt.report.html import text_environment
from bisect_trt.report.text import number
from bisect_trt.runners.tensorrt.records import MODULES

TABLE, CURE_RECORD, CURED_MODEL = "cures.csv", "cures.json", "model.cured.onnx"
CURE_FOLDER = OwnedFolder(
    "bisect-trt cure",
    frozenset({TABLE, CURE_RECORD, CURED_MODEL, f"{CURED_MODEL}.data"}),
    CURE_RECORD,
)


def headline_of_cures(cures: Cures) -> str:
    """The answer in one sentence."""
    if not cures.needed:
        first = cures.tried[0]
        return (
            f"The model is right and reproducible as it is: {first.seen.runs} runs in "
            f"{PROCESSES} fresh "
            "processes; there is nothing to cure."
        )
    smallest = cures.smallest
    if smallest is None:
        spent = "" if cures.complete else f" before {_ended(cures)} the search"
        return f"None of {max(0, len(cures.tried) - 1)} cures works{spent}."
    written = f"; {CURED_MODEL} is that model" if smallest.model is not None else ""
    return f"Cured by {smallest.name}: {smallest.how}{written}."


def table_of_cures(cures: Cures) -> pd.DataFrame:
    """A row a cure, as cures.csv has them."""
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


def lines_of_cures(cures: Cures) -> list[str]:
    """A line a cure, for the screen."""
    return [_line(cure) for cure in cures.tried]


def cures_as_json(cures: Cures) -> dict[str, Any]:
    """The record for machines, models apart."""
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
                "seen": {**asdict(c.seen), "verdict": c.seen.verdict.value},
            }
            for c in cures.tried
        ],
    }


def write_cures(cures: Cures, folder: Path) -> None:
    """The table, the record and the cured model, in the place of earlier ones.

    Raises:
        BadInputError: the folder cannot be written.
        MachineError: the disk is full; what was there is there still.
    """
    with CURE_FOLDER.written(folder) as draft:
        smallest = cures.smallest
        if smallest is not None and smallest.model is not None:
            save_model(smallest.model, draft / CURED_MODEL)
        table_of_cures(cures).to_csv(draft / TABLE, index=False)
        (draft / CURE_RECORD).write_text(to_json(cures_as_json(cures)) + "\n", encoding="utf-8")


def _ended(cures: Cures) -> str:
    return "an interruption ended" if cures.interrupted else "--max-builds ended"


def _line(cure: Cure) -> str:
    seen = cure.seen
    if seen.failure:
        return f"{cure.name}: {seen.failure[:200]}"
    word = "right and reproducible" if cure.works else str(seen.suspect)
    return (
        f"{cure.name}: {word}; {seen.wrong} of {seen.runs} runs wrong in {seen.processes} "
        f"processes, {number(cure.latency_ms)} ms, {cure.engine_bytes / 2**20:.1f} MB"
    )


_NAMED = 6


def engine_of(reduced: Reduced) -> str | None:
    """The module of the TensorRT that did it; None where it was none."""
    return next((m for m in MODULES if m in reduced.versions), None)


def sentence(reduced: Reduced) -> str:
    """What is wrong with the subgraph, in one sentence."""
    version = ", ".join(f"{k} {v}" for k, v in reduced.versions.items() if k in _ENGINES)
    who = f"{version or 'The engine'} at {reduced.precision.value.upper()}"
    what = f"{counted(len(reduced.nodes), 'node')} ({_operators(reduced)})"
    if reduced.suspect is Suspect.CHECK:
        return f"The check calls a model of {what} bad."
    if reduced.suspect is Suspect.FAILED:
        return f"{who} does not build or run a model of {what}."
    if reduced.suspect is Suspect.NOT_REPRODUCIBLE:
        return f"{who} gives different answers to the same input on a model of {what}."
    return f"{who} gives wrong answers on a model of {what}."


_ENGINES = (*MODULES, "onnxruntime")


def headline(reduced: Reduced) -> str:
    """The answer: how small the subgraph is, and whether it could be smaller."""
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
    Suspect.NOT_REPRODUCIBLE: "Unsteady",
    Suspect.CHECK: "Fails the check",
}


def nothing_bad(whole: Observation) -> str:
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
    """What the whole and the subgraph showed, a line each."""
    if reduced.suspect is Suspect.CHECK:
        return [
            f"The whole model: {reduced.whole.failure}",
            f"The subgraph: {reduced.seen.failure}",
        ]
    lines = [f"The whole model: {_shown(reduced.whole)}", f"The subgraph: {_shown(reduced.seen)}"]
    if reduced.suspect in (Suspect.WRONG, Suspect.NOT_REPRODUCIBLE):
        lines.append(
            f"Wrong means an error over {FACTOR:g} times that of the subgraph emulated at "
            f"{reduced.explained.value.upper()}, against ONNX Runtime's CPU provider in FP32."
        )
    return lines


def reduced_how(reduced: Reduced) -> list[str]:
    """The steps of the search, a line each, and what they stand on."""
    lines = [f"{s.what}: {s.tried} tried, {counted(s.left, 'node')} left" for s in reduced.steps]
    kind = "calls of the check" if reduced.suspect is Suspect.CHECK else "engine builds"
    lines.append(f"In all {reduced.builds} {kind} in {reduced.seconds:.0f} s.")
    if reduced.suspect is Suspect.NOT_REPRODUCIBLE:
        lines.append(
            f"What was left out was tried in {PROCESSES} fresh processes: were {BAD_SHARE:.0%} of "
            f"them bad or more, one would have been seen with {CONFIDENCE:.0%} confidence."
        )
    if reduced.bypassed:
        lines.append(f"Bypassed, an input taking the output's place: {', '.join(reduced.bypassed)}")
    if reduced.always:
        lines.append(
            "No subgraph that was tried was ever fine: look whether the judge can tell good "
            "from bad."
        )
    return lines


def as_record(found: Reduced | Observation) -> dict[str, Any]:
    """What was found, for machines: where nothing is bad there is no subgraph."""
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
        "subgraph": _plain(reduced.seen),
        "steps": [asdict(step) for step in reduced.steps],
        "builds": reduced.builds,
        "seconds": reduced.seconds,
        "seeded": [asdict(weights) for weights in reduced.seeded],
        "versions": dict(reduced.versions),
    }


def _plain(seen: Observation) -> dict[str, Any]:
    return {**asdict(seen), "verdict": seen.verdict.value}


def _shown(seen: Observation) -> str:
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


RECORD, MODEL, INPUTS, EXPECTED = "reduce.json", "model.onnx", "inputs.npz", "expected.npz"
RUN, README, WEIGHTS, COPIED = "run.py", "README.md", "model.weights", "weights.py"
FOLDER = OwnedFolder(
    "bisect-trt reduce",
    frozenset({RECORD, MODEL, f"{MODEL}.data", INPUTS, EXPECTED, RUN, README, WEIGHTS, COPIED}),
    RECORD,
)
_RUNS = 10


def write_reproducer(reduced: Reduced, folder: Path, made_by: str) -> None:
    """Write the reproducer, in the place of an earlier one.

    Raises:
        MachineError: the disk is full; an earlier reproducer is still there then.
        BadInputError: the folder cannot be written.
    """
    with FOLDER.written(folder) as draft:
        _write(reduced, draft, made_by)


def _write(reduced: Reduced, folder: Path, made_by: str) -> None:
    write_npz(folder / INPUTS, reduced.sample.arrays)
    write_npz(folder / EXPECTED, reduced.expected)
    model, seeded = kept_apart(reduced.model, reduced.seeded, WEIGHTS)
    if seeded:
        (folder / MODEL).write_bytes(model.SerializeToString())
    else:
        save_model(model, folder / MODEL)
    if engine_of(reduced) is not None:
        (folder / RUN).write_text(_script(reduced, seeded), encoding="utf-8")
    elif seeded:
        text = _rendered("weights.py.j2", seeded=_rows(seeded))
        (folder / COPIED).write_text(text, encoding="utf-8")
    size = sum(path.stat().st_size for path in folder.iterdir())
    text = _readme(reduced, made_by, size)
    (folder / README).write_text(text, encoding="utf-8", errors="replace")
    record = {"kind": FOLDER.command, **as_json(reduced), "made_by": made_by, "bytes": size}
    (folder / RECORD).write_text(to_json(record) + "\n", encoding="utf-8")


def _script(reduced: Reduced, seeded: Sequence[Seeded]) -> str:
    return _rendered(
        "run.py.j2",
        runs=_RUNS,
        tf32=reduced.precision is Precision.TF32,
        allowed=repr({n: reduced.seen.allowed[n] for n in reduced.expected}),
        breaks=repr(list(reduced.seen.breaks)),
        seeded=_rows(seeded),
        module=engine_of(reduced),
    )


def _rows(seeded: Sequence[Seeded]) -> str:
    return repr([(s.dtype, s.size, s.seed, s.mean, s.deviation) for s in seeded])


def _readme(reduced: Reduced, made_by: str, size: int) -> str:
    if reduced.seeded:
        weights = "drawn anew"
    elif size > SMALL:
        weights = "too large"
    else:
        weights = "the model's own"
    return _rendered(
        "reproducer.md.j2",
        sentence=markdown(sentence(reduced)),
        versions=[(k, markdown(v)) for k, v in reduced.versions.items() if k != "profile"],
        engine=engine_of(reduced),
        not_reproducible=reduced.suspect is Suspect.NOT_REPRODUCIBLE,
        by_command=reduced.suspect is Suspect.CHECK,
        made_by=made_by.replace("`", "'"),
        figures=[markdown(line) for line in figures(reduced)],
        how=[markdown(line) for line in reduced_how(reduced)],
        nodes=[(markdown(n), markdown(op)) for n, op in reduced.nodes],
        weights=weights,
        seeded=len(reduced.seeded),
        copies=RUN if engine_of(reduced) is not None else COPIED,
        size=f"{size / 2**20:.1f} MB" if size >= 2**20 else f"{size / 2**10:.1f} kB",
        onnx=onnx.__version__,
    )


def _rendered(name: str, **values: Any) -> str:
    return str(text_environment().get_template(name).render(**values))
