"""What ``--dry-run`` says beside what the run then takes: ``python -m benchmarks.sizes.estimates``.

Both sides of a row are made one after the other; the estimate shall be right within a factor of
two.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.common import DETECTOR, MODELS, RECOGNISER, ROOT, machine
from tests.models import line

FILES = ROOT / "fixtures" / "files"
WITHIN = 2.0


def cases(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """The six models with the arguments of their run: small and large, few culprits and many, one
    that is good as it is, one that is fitted to its input.
    """
    for name, require, more in (
        ("healthy", "rel_range<=1e-2", []),
        ("encoder_decomposed", "max_abs<=2e-3", []),
        ("nafnet", "max_abs<=1e-2", []),
        ("residual", "rel_range<=1e-3", ["--robust", "0"]),
    ):
        given = [str(FILES / f"{name}.onnx"), "--input", str(FILES / f"{name}.npz")]
        yield name, [*given, "--requirement", require, *more]
    page = ["--input", str(MODELS / "page.npz")]
    yield "PP-OCRv4 det", [str(DETECTOR), *page, "--requirement", "max_abs<=5e-2"]
    np.savez(folder / "line.npz", x=line(320))
    text = ["--input", str(folder / "line.npz")]
    yield "PP-OCRv4 rec", [str(RECOGNISER), *text, "--requirement", "atol=1e-2,rtol=1e-2"]


def seconds(arguments: list[str]) -> tuple[float, str]:
    """The wall time of the command, and what it printed."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "bisect_trt", "run", *arguments]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode not in (0, 1):
        raise SystemExit(ended.stderr)
    return time.perf_counter() - began, ended.stdout


def main() -> None:
    """Print a table; exit code 1 where an estimate is off by more."""
    print(f"{machine()}\n", flush=True)
    print("| model | layers | pins | estimate s | run s | estimate / run | dry run s |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    off = 0
    with tempfile.TemporaryDirectory(prefix="estimates-") as made:
        for name, arguments in cases(Path(made)):
            dry, said = seconds([*arguments, "--dry-run", "--json"])
            price = json.loads(said)
            out = ["--out", str(Path(made) / name.replace(" ", "_")), "--json"]
            taken, printed = seconds([*arguments, *out])
            pins, ratio = len(json.loads(printed)["pinned"]), price["seconds"] / taken
            off += not 1.0 / WITHIN <= ratio <= WITHIN
            figures = f"{price['seconds']:.1f} | {taken:.1f} | {ratio:.2f} | {dry:.1f}"
            print(f"| {name} | {price['layers']} | {pins} | {figures} |", flush=True)
    print(f"\n{off} of the estimates are off by more than a factor of {WITHIN:g}")
    sys.exit(int(off > 0))


if __name__ == "__main__":
    main()
