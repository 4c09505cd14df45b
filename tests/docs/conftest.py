"""Where the pages' commands run."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from PIL import Image

from fixtures.__main__ import FILES
from tests.conftest import run_model
from tests.copies import FEWEST
from tests.docs.pages import ROOT, blocks_of
from tests.docs.shell import ran


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout's folder as the pages find it: a model, inputs, and a run that was made."""
    folder = tmp_path_factory.mktemp("workshop")
    for name in ("fixtures", "examples"):
        (folder / name).symlink_to(ROOT / name)
    for kind, name in (("onnx", "model.onnx"), ("npz", "real.npz")):
        shutil.copy(FILES / f"encoder_decomposed.{kind}", folder / name)
    with np.load(folder / "real.npz") as arrays:
        inputs = dict(arrays)
    (folder / "more").mkdir()
    for factor in (0.8, 1.1):
        scaled = {name: (factor * array).astype(array.dtype) for name, array in inputs.items()}
        np.savez(folder / "more" / f"{factor}.npz", **scaled)
    (folder / "photos").mkdir()
    colours = np.add.outer(np.arange(60), np.arange(80))[..., None] + np.array([0, 40, 90])
    for number in range(2):
        photo = Image.fromarray((colours[:, :: 1 - 2 * number]).astype(np.uint8))
        photo.save(folder / "photos" / f"{number}.png")
    model = onnx.load(folder / "model.onnx")
    outputs = zip((o.name for o in model.graph.output), run_model(model, inputs), strict=True)
    np.savez(folder / "golden.npz", **dict(outputs))
    gate = next(b for b in blocks_of(ROOT / "docs" / "ci.md") if b.title == "bisect.toml")
    (folder / "bisect.toml").write_text(gate.text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        first = "bisect-trt run model.onnx --input real.npz --requirement 'max_abs<=2e-3'"
        ran(first, "", FEWEST)
        # So that the pages that speak of it are answered by caches.
        ran("bisect-trt gate", "", FEWEST)
        for kept in ("plan.json", "model.repaired.onnx"):
            shutil.copy(f"reports/model-fp16/{kept}", kept)
    return folder
