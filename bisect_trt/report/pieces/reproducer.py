"""The folder that a reduction leaves: ready to attach to a bug report, and written whole."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx

from bisect_trt.core.names import markdown
from bisect_trt.core.precision import Precision
from bisect_trt.graph.files.save import save_model
from bisect_trt.report.files.owned_folder import OwnedFolder
from bisect_trt.report.files.write import to_json
from bisect_trt.report.page.html import text_environment
from bisect_trt.report.pieces.reduced import as_json, engine_of, figures, reduced_how, sentence
from bisect_trt.stations.case.array_files import write_npz
from bisect_trt.stations.pieces.reduce import SMALL, Reduced
from bisect_trt.stations.pieces.seeded_weights import Seeded, kept_apart
from bisect_trt.stations.pieces.seen import Suspect

RECORD, MODEL, INPUTS, EXPECTED = "reduce.json", "model.onnx", "inputs.npz", "expected.npz"
RUN, README, WEIGHTS, DRAWN = "run.py", "README.md", "model.weights", "weights.py"
FOLDER = OwnedFolder(
    "bisect-trt reduce",
    frozenset({RECORD, MODEL, f"{MODEL}.data", INPUTS, EXPECTED, RUN, README, WEIGHTS, DRAWN}),
    RECORD,
)
_RUNS = 10


def write_reproducer(reduced: Reduced, folder: Path, made_by: str) -> None:
    """Write the reproducer, in the place of an earlier one.

    Args:
        reduced: what was found.
        folder: as ``FOLDER.check`` allowed it.
        made_by: the command that found it.

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
        (folder / DRAWN).write_text(text, encoding="utf-8")
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
        unsteady=reduced.suspect is Suspect.UNSTEADY,
        by_command=reduced.suspect is Suspect.CHECK,
        made_by=made_by.replace("`", "'"),
        figures=[markdown(line) for line in figures(reduced)],
        how=[markdown(line) for line in reduced_how(reduced)],
        nodes=[(markdown(n), markdown(op)) for n, op in reduced.nodes],
        weights=weights,
        seeded=len(reduced.seeded),
        draws=RUN if engine_of(reduced) is not None else DRAWN,
        size=f"{size / 2**20:.1f} MB" if size >= 2**20 else f"{size / 2**10:.1f} kB",
        onnx=onnx.__version__,
    )


def _rendered(name: str, **values: Any) -> str:
    return str(text_environment().get_template(name).render(**values))
