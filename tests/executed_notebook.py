"""docs/notebook.ipynb executed: by a test, and by `make notebook`, which saves its outputs."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "docs" / "notebook.ipynb"


def executed(path: Path = NOTEBOOK) -> nbformat.NotebookNode:
    """The notebook with the outputs that its cells have here.

    Raises:
        CellExecutionError: a cell did.
    """
    notebook = nbformat.read(path, as_version=4)
    # No time limit but the suite's: no test may depend on how busy the machine is.
    client = NotebookClient(notebook, timeout=None, record_timing=False)
    client.execute(env={**os.environ, "PYTHONPATH": str(ROOT)})
    # Which Python it was says nothing, and would change with every machine.
    del notebook.metadata.language_info["version"]
    return notebook


if __name__ == "__main__":
    nbformat.write(executed(), NOTEBOOK)
