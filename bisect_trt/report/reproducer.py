"""The folder that a reduction leaves: ready to attach to a bug report, and written whole."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
from jinja2 import Environment, PackageLoader, StrictUndefined

from bisect_trt.core.errors import BadInputError, MachineError, is_disk_full
from bisect_trt.core.names import markdown
from bisect_trt.core.precision import Precision
from bisect_trt.core.scratch import draft_prefix, sweep
from bisect_trt.graph.load import save_model
from bisect_trt.report.reduced import as_json, engine_of, figures, reduced_how, sentence
from bisect_trt.report.write import to_json
from bisect_trt.stations.array_files import write_npz
from bisect_trt.stations.reduce import SMALL, Reduced
from bisect_trt.stations.seeded_weights import Seeded, kept_apart
from bisect_trt.stations.seen import Suspect

RECORD, MODEL, INPUTS, EXPECTED = "reduce.json", "model.onnx", "inputs.npz", "expected.npz"
RUN, README, WEIGHTS = "run.py", "README.md", "model.weights"
FILES = frozenset({RECORD, MODEL, f"{MODEL}.data", INPUTS, EXPECTED, RUN, README, WEIGHTS})
_RUNS = 10
_KIND = "bisect-trt reduce"


def check_folder(folder: Path, read: Sequence[Path] = ()) -> None:
    """Refuse a folder that no reduction wrote.

    Args:
        folder: where the reproducer will be; need not be there.
        read: files that the reduction reads, which may not lie in it.

    Raises:
        BadInputError: it holds other files, or cannot be written.
    """
    if folder.exists() and not folder.is_dir():
        raise BadInputError(f"--out {folder}: not a folder; choose another name")
    held = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
    strange = [name for name in held if name not in FILES]
    if strange or (held and not _is_ours(folder / RECORD)):
        what = strange[0] if strange else held[0]
        raise BadInputError(
            f"--out {folder}: holds {what}, which no `bisect-trt reduce` wrote; choose another "
            "folder, or move it away"
        )
    for path in read:
        if path.resolve().parent == folder.resolve():
            raise BadInputError(
                f"--out {folder}: {path} would be written over; choose another folder"
            )
    there = next((p for p in folder.resolve().parents if p.exists()), None)
    if there is None or not there.is_dir() or not os.access(there, os.W_OK):
        raise BadInputError(f"--out {folder}: cannot be written; choose another folder")


def remove_reproducer(folder: Path) -> None:
    """Remove one that a reduction wrote; anything else is left alone."""
    if _is_ours(folder / RECORD):
        shutil.rmtree(folder, ignore_errors=True)


def write_reproducer(reduced: Reduced, folder: Path, made_by: str) -> None:
    """Write the reproducer, in the place of an earlier one.

    Args:
        reduced: what was found.
        folder: as :func:`check_folder` allowed it.
        made_by: the command that found it.

    Raises:
        MachineError: the disk is full; an earlier reproducer is still there then.
        BadInputError: the folder cannot be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        sweep(folder.parent)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=draft_prefix()) as made:
            draft = Path(made) / "new"
            draft.mkdir()
            _write(reduced, draft, made_by)
            if folder.exists():
                os.replace(folder, Path(made) / "old")
            os.replace(draft, folder)
    except OSError as error:
        raise _not_written(folder, error) from error


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
    size = sum(path.stat().st_size for path in folder.iterdir())
    text = _readme(reduced, made_by, size)
    (folder / README).write_text(text, encoding="utf-8", errors="replace")
    record = {"kind": _KIND, **as_json(reduced), "made_by": made_by, "bytes": size}
    (folder / RECORD).write_text(to_json(record) + "\n", encoding="utf-8")


def _script(reduced: Reduced, seeded: Sequence[Seeded]) -> str:
    rows = [(s.dtype, s.size, s.seed, s.mean, s.deviation) for s in seeded]
    return _rendered(
        "run.py.j2",
        runs=_RUNS,
        tf32=reduced.precision is Precision.TF32,
        allowed=repr({n: reduced.seen.allowed[n] for n in reduced.expected}),
        seeded=repr(rows),
        module=engine_of(reduced),
    )


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
        size=f"{size / 2**20:.1f} MB" if size >= 2**20 else f"{size / 2**10:.1f} kB",
        onnx=onnx.__version__,
    )


def _rendered(name: str, **values: Any) -> str:
    environment = Environment(
        loader=PackageLoader("bisect_trt.report"),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
    )
    return str(environment.get_template(name).render(**values))


def _is_ours(record: Path) -> bool:
    try:
        found = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("kind") == _KIND


def _not_written(folder: Path, error: OSError) -> BadInputError | MachineError:
    if is_disk_full(error):
        return MachineError(f"--out {folder}: the disk is full; free some space")
    return BadInputError(f"--out {folder}: cannot be written ({error.strerror})")
