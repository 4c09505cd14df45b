"""The gate over every fixture: its first run, a second from the caches, and one with a
requirement that no plan can meet: ``python -m benchmarks.gates``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, ROOT, machine
from fixtures import cases
from fixtures.__main__ import FILES
from fixtures.fixture import Fixture
from fixtures.models import ALL

ASKED, IMPOSSIBLE = "encoder_decomposed", "max_abs<=1e-12"
"""FP32 itself is further from the reference."""
_HEAD = "| gate | exit code | models that pass | evaluations | s | of `encoder_decomposed` |"


def written(fixtures: list[Fixture], folder: Path) -> Path:
    """A bisect.toml of ``fixtures`` in ``folder``."""
    lines = [f'out = "{folder / "gate"}"', "", "[defaults]", 'runner = "emulated"']
    shared: dict[bytes, str] = {}
    for fixture in fixtures:
        first = next(array.tobytes() for array in fixture.inputs.values())
        # Large inputs that are equal are kept once (fixtures/__main__.py).
        inputs = fixture.name
        if not (FILES / f"{inputs}.npz").exists():
            inputs = shared[first]
        shared.setdefault(first, fixture.name)
        lines += [
            "",
            f"[models.{fixture.name}]",
            f'model = "{FILES / fixture.name}.onnx"',
            f'input = "{FILES / inputs}.npz"',
            f'precision = "{fixture.precision}"',
            f'requirement = "{fixture.require}"',
        ]
        if fixture.metrics:
            lines.append(f"metric = {json.dumps(list(fixture.metrics))}")
    path = folder / "bisect.toml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def gate(project: Path) -> tuple[int, float, dict[str, Any]]:
    """One gate: its exit code, seconds and gate.json."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "bisect_trt", "gate", "--config", str(project), "--quiet"]
    code = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL).returncode
    seconds = time.perf_counter() - began
    return code, seconds, json.loads((project.parent / "gate" / "gate.json").read_text())


def main() -> None:
    """Print the table and keep it in ``benchmarks/results/gates.md``."""
    fixtures = [make() for make in (*ALL, *cases.FILES)]
    rows = []
    with tempfile.TemporaryDirectory(prefix="gates-") as folder:
        project = written(fixtures, Path(folder))
        for what in ("first", "second", "impossible"):
            if what == "impossible":
                asked = next(f for f in fixtures if f.name == ASKED)
                head, begin, rest = project.read_text().partition(f"[models.{ASKED}]")
                project.write_text(head + begin + rest.replace(asked.require, IMPOSSIBLE, 1))
            code, seconds, record = gate(project)
            models = record["models"]
            passed = sum(m["exit_code"] == 0 for m in models)
            evaluations = sum(m["new_evaluations"] or 0 for m in models)
            said = next(m["said"] for m in models if m["name"] == ASKED)
            rows.append(
                f"| {what} | {code} | {passed} of {len(models)} "
                f"| {evaluations} | {seconds:.0f} | {said} |"
            )
            print(rows[-1], flush=True)
    head = ["# The gate over every fixture", "", f"`python -m benchmarks.gates`, {machine()}", ""]
    note = [
        "",
        "No plan can help `unsavable`: it closes the gate each time.",
    ]
    text = "\n".join([*head, _HEAD, "| --- | --- | --- | --- | --- | --- |", *rows, *note])
    (RESULTS / "gates.md").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
