"""Files that appear whole or not at all, whoever interrupts."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bisect_trt.core.disk.scratch import draft_prefix


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A draft to write to; it takes the place of ``path`` when the block ends without an error.

    The draft lies alone in a folder beside ``path``, so that further files may be written there.

    Raises:
        OSError: the folder of ``path`` cannot be written.
    """
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=draft_prefix()) as folder:
        draft = Path(folder) / path.name
        yield draft
        draft.chmod(0o644)
        os.replace(draft, path)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write ``content`` (text as UTF-8) to ``path`` in one step.

    Raises:
        OSError: the folder of ``path`` cannot be written.
    """
    with written_whole(path) as draft:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)
