"""A folder that one command writes, whole, and that nothing else may lie in."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bisect_trt.core.disk.scratch import draft_prefix, sweep
from bisect_trt.core.errors import BadInputError, not_written


@dataclass(frozen=True)
class OwnedFolder:
    """What ``command`` writes: ``files`` are all names that may be in it, ``record`` is the one
    whose ``kind`` says so.
    """

    command: str
    files: frozenset[str]
    record: str

    def check(self, folder: Path, read: Sequence[Path] = ()) -> None:
        """Refuse a folder that the command did not write.

        Args:
            folder: where the files will be; need not be there.
            read: files that the command reads, which may not lie in it.

        Raises:
            BadInputError: it holds other files, or cannot be written.
        """
        if folder.exists() and not folder.is_dir():
            raise BadInputError(f"--out {folder}: not a folder; choose another name")
        held = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
        strange = [name for name in held if name not in self.files]
        if strange or (held and not self.is_ours(folder)):
            what = strange[0] if strange else held[0]
            raise BadInputError(
                f"--out {folder}: holds {what}, which no `{self.command}` wrote; choose another "
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

    def is_ours(self, folder: Path) -> bool:
        """Whether the command wrote it."""
        try:
            found = json.loads((folder / self.record).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return isinstance(found, dict) and found.get("kind") == self.command

    def remove(self, folder: Path) -> None:
        """Remove one that the command wrote; anything else is left alone."""
        if self.is_ours(folder):
            shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def written(self, folder: Path) -> Iterator[Path]:
        """An empty folder that takes the place of ``folder`` when the block ends well.

        Raises:
            MachineError: the disk is full; what was in ``folder`` is still there then.
            BadInputError: it cannot be written.
        """
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            sweep(folder.parent)
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=draft_prefix()) as made:
                draft = Path(made) / "new"
                draft.mkdir()
                yield draft
                if folder.exists():
                    os.replace(folder, Path(made) / "old")
                os.replace(draft, folder)
        except OSError as error:
            raise not_written(f"--out {folder}", error) from error
