"""Models with as many inputs of one kind as a benchmark asks for: the same number is always the
same input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import DETECTOR, MODELS, RECOGNISER, ROOT, load
from bisect_trt.metrics.arrays import Arrays
from examples.text_inputs import line, page
from fixtures.__main__ import model_bytes
from fixtures.cases.nafnet import SIDE as RESTORED
from fixtures.cases.nafnet import nafnet
from fixtures.cases.unimatch import SIDE as MATCHED
from fixtures.cases.unimatch import unimatch
from fixtures.encoders import encoder_decomposed
from fixtures.fixture import waves
from fixtures.models import residual
from fixtures.photo import photo, sampled
from fixtures.tokens import sentence, token_encoder


@dataclass(frozen=True)
class PlanCase:
    """``model`` gives the model's path, made in a folder where it is a fixture; ``make`` the input
    of a number.
    """

    name: str
    model: Callable[[Path], Path]
    require: str
    make: Callable[[int], Arrays]
    metrics: tuple[str, ...] = ()


def _crop(number: int, side: int) -> NDArray[np.float32]:
    """A square of the photo, somewhere, flipped or not."""
    random = np.random.default_rng([number, side])
    pixels = photo(192, 192)
    top, left = random.integers(0, 192 - side, 2)
    found = pixels[:, :, top : top + side, left : left + side]
    return np.ascontiguousarray(found[..., ::-1] if random.random() < 0.5 else found)


def _noisy(number: int) -> Arrays:
    noise = np.random.default_rng([number, 15]).normal(
        0.0, 15.0 / 255.0, (1, 3, RESTORED, RESTORED)
    )
    image = np.clip(_crop(number, RESTORED) + noise, 0.0, 1.0)
    return {"image": np.asarray(image, np.float32)}


def _views(number: int) -> Arrays:
    random = np.random.default_rng([number, 3])
    first = _crop(number, MATCHED)
    places = np.arange(MATCHED, dtype=np.float32)
    rows, columns = np.meshgrid(places, places, indexing="ij")
    across, down = random.uniform(1.0, 5.0), random.uniform(0.5, 3.0)
    second = sampled(first, rows + down * np.sin(columns / 15.0), columns + across)
    return {"first": first, "second": np.asarray(second, np.float32)}


def _part(number: int) -> Arrays:
    """A part of a page, small enough for many searches."""
    top, left = np.random.default_rng([number, 5]).integers(0, (96, 160))
    return {"x": np.ascontiguousarray(page(number)[:, :, top : top + 96, left : left + 160])}


def _saved(fixture: Any, folder: Path) -> Path:
    path = folder / f"{fixture.name}.onnx"
    path.write_bytes(model_bytes(fixture))
    return path


def _saved_tokens(folder: Path) -> Path:
    path = folder / "tokens.onnx"
    path.write_bytes(token_encoder().SerializeToString())
    return path


_TEXT = (f"{ROOT / 'examples' / 'text_metrics.py'}:same_text",)
CASES = {
    problem.name: problem
    for problem in (
        PlanCase("det", lambda _: DETECTOR, "atol=5e-2,rtol=1e-2", lambda n: {"x": page(n)}),
        PlanCase(
            "det, one photo",
            lambda _: DETECTOR,
            "max_abs<=5e-2",
            lambda n: load(MODELS / "page.npz") if n == 0 else {"x": page(n)},
        ),
        PlanCase("det, parts", lambda _: DETECTOR, "atol=5e-2,rtol=1e-2", _part),
        PlanCase("rec", lambda _: RECOGNISER, "atol=1e-2,rtol=1e-2", lambda n: {"x": line(n)}),
        PlanCase(
            "rec, same text", lambda _: RECOGNISER, "same_text>=1", lambda n: {"x": line(n)}, _TEXT
        ),
        PlanCase("NAFNet", lambda folder: _saved(nafnet(), folder), "psnr_db>=50", _noisy),
        PlanCase(
            "UniMatch",
            lambda folder: _saved(unimatch(), folder),
            "epe<=0.3",
            _views,
            ("fixtures.cases.metrics:epe",),
        ),
        PlanCase(
            "encoder",
            lambda folder: _saved(encoder_decomposed(), folder),
            "max_abs<=2e-3",
            lambda n: {"tokens": waves(1000 + n, 1, 12, 32)},
        ),
        PlanCase("tokens", _saved_tokens, "max_abs<=3e-3", sentence),
        PlanCase(
            "residual",
            lambda folder: _saved(residual(), folder),
            "rel_range<=6e-4",
            lambda n: {"x": waves(1000 + n, 4, 48)},
        ),
    )
}
