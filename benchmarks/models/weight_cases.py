"""The models whose weights are rounded to fit, each with seeded inputs of its kind.

Those of :data:`EXPORTED` are made where torch is installed: ``python -m benchmarks.models.exported
.cache/exported ViT-S-batches NAFNet RAFT-S RT-DETR-R101-small BERT``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray

from benchmarks.common import DETECTOR, RECOGNISER, ROOT
from benchmarks.models.exported import MATCHED, PHOTO, RESTORED, SMALL_DETECTED
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.metrics.arrays import Arrays
from bisect_trt.model.graph import Graph
from bisect_trt.pipeline import repair
from bisect_trt.repair.edits import Range, Ranges, Rule, beginning
from bisect_trt.repair.rules import edited
from bisect_trt.runners.emulator import EmulatedRunner
from bisect_trt.settings import Settings
from examples.text_inputs import line, page
from fixtures.encoders import encoder_decomposed
from fixtures.fixture import waves
from fixtures.photo import photo, resized, sampled

MADE = ROOT / ".cache" / "exported"
"""The folder of the exported models."""

RTOL = 1e-2
FROM_MEDIAN = range(2_000, 2_020)
"""The inputs by whose median score the tolerance of a model is set, once and without fitting."""

Make = Callable[[int], Arrays]


@dataclass(frozen=True)
class Model:
    """A model, the graph on which weights are fitted, and an input for each number.

    ``graph`` has its BatchNormalization folded, or is repaired. ``atol`` is 0 where
    :func:`median_tolerance` sets it. ``unseen`` bounds the inputs that it is judged on.
    """

    name: str
    original: onnx.ModelProto = field(repr=False)
    graph: Graph = field(repr=False)
    make: Make
    atol: float = 0.0
    rtol: float = RTOL
    unseen: int = 200

    def samples(self, numbers: range) -> list[Sample]:
        """The inputs ``numbers``."""
        return [Sample(str(number), self.make(number)) for number in numbers]


def scores(
    exact: Sequence[Arrays], found: Sequence[Arrays], atol: float, rtol: float
) -> list[float]:
    """The score of each input: its largest error / tolerance over all outputs."""
    return [
        max(
            float(np.max(np.abs(r - f[n]) / (atol + rtol * np.abs(r)))) if _finite(f[n]) else np.inf
            for n, r in e.items()
        )
        for e, f in zip(exact, found, strict=True)
    ]


def tolerance(model: Model, threads: int) -> float:
    """The atol of the model: its own, or the median's with all layers in FP16."""
    return model.atol or median_tolerance(model, PrecisionPlan(Precision.FP16), threads)


def median_tolerance(model: Model, plan: PrecisionPlan, threads: int) -> float:
    """The atol of two digits at which the median input has a score of 1 by ``plan``, nearest."""
    samples = model.samples(FROM_MEDIAN)
    runner = EmulatedRunner(model.graph, Precision.FP16, threads=threads)
    exact = list(runner.outputs(PrecisionPlan(Precision.FP32), samples))
    found = list(runner.outputs(plan, samples))
    low, high = 1e-9, 1e3
    while high / low > 1.001:
        middle = float(np.sqrt(low * high))
        above = np.median(scores(exact, found, middle, model.rtol)) > 1.0
        low, high = (middle, high) if above else (low, middle)
    return float(f"{high:.1e}")


def everything_at_stake(graph: Graph) -> Ranges:
    """Ranges by which every BatchNormalization is folded."""
    large = Range(largest=1.0, median=1.0, smallest=1.0, reach=1e9, positive=True)
    return {name: large for node in graph.proto.graph.node for name in node.output}


def _finite(array: NDArray[np.float32]) -> bool:
    return bool(np.isfinite(array).all())


def _folded(name: str, path: Path, make: Make, atol: float = 0.0, unseen: int = 200) -> Model:
    """The model of a file, its BatchNormalization folded."""
    if not path.exists():
        made_by = f"python -m benchmarks.models.exported {path.parent} {name}"
        raise SystemExit(f"{path} is missing: `{made_by}`, or `make demo` for det and rec")
    proto = onnx.load(path)
    found = edited(beginning(Graph(proto)), [Rule.FOLD_BN], everything_at_stake)
    return Model(name, proto, found.graph, make, atol, unseen=unseen)


def _encoder() -> Model:
    """The fixture with its LayerNorms repaired: else FP16 overflows."""
    fixture = encoder_decomposed()
    with tempfile.TemporaryDirectory() as name:
        settings = Settings(
            model=fixture.model, inputs=[fixture.inputs], out=Path(name), repair="layernorm"
        )
        found = repair(settings)
    assert found.model is not None, "the fixture is repaired"
    make = partial(_waves, "tokens", (1, 12, 32))
    return Model("encoder", fixture.model, Graph(found.model), make, rtol=1e-3)


def _waves(name: str, shape: tuple[int, ...], number: int) -> Arrays:
    return {name: waves(number, *shape)}


def _crop(random: np.random.Generator, side: int) -> NDArray[np.float32]:
    """A square of the photo, anywhere and of any size, turned, its colours weighted."""
    size = int(random.integers(64, 193))
    top, left = random.integers(0, 193 - size, 2)
    part = photo(192, 192)[:, :, top : top + size, left : left + size]
    part = np.rot90(part, int(random.integers(4)), (2, 3))
    image = resized(np.ascontiguousarray(part), side, side)
    return np.clip(image * random.uniform(0.6, 1.2, (1, 3, 1, 1)), 0.0, 1.0).astype(np.float32)


def photos(shape: tuple[int, ...], number: int) -> Arrays:
    """A batch of seeded photos as ``x``; batch ``number`` has those from ``number * shape[0]``."""
    count = shape[0]
    seeds = range(number * count, (number + 1) * count)
    images = [_crop(np.random.default_rng([seed, 1]), shape[-1]) for seed in seeds]
    return {"x": ((np.concatenate(images) - 0.45) / 0.225).astype(np.float32)}


def _noisy(number: int) -> Arrays:
    """A photo with the noise of a small sensor."""
    random = np.random.default_rng([number, 2])
    image = _crop(random, RESTORED[-1])
    noise = random.normal(0.0, 15.0 / 255.0, image.shape)
    return {"x": np.clip(image + noise, 0.0, 1.0).astype(np.float32)}


def _views(number: int) -> Arrays:
    """A photo, and the same photo moved by pixels and warped."""
    random, side = np.random.default_rng([number, 3]), MATCHED[-1]
    first, places = _crop(random, side), np.arange(side, dtype=np.float32)
    rows, columns = np.meshgrid(places, places, indexing="ij")
    across, down = random.uniform(1.0, 5.0), random.uniform(0.5, 3.0)
    second = sampled(first, rows + down * np.sin(columns / 15.0), columns + across)
    return {"first": 2.0 * first - 1.0, "second": (2.0 * second - 1.0).astype(np.float32)}


def words(shape: tuple[int, ...], number: int) -> Arrays:
    """Seeded numbers of words as ``ids``."""
    return {"ids": np.random.default_rng([number, 4]).integers(0, 30_000, shape)}


def _page(number: int) -> Arrays:
    return {"x": page(number)}


def _line(number: int) -> Arrays:
    return {"x": line(number)}


EXPORTED: dict[str, tuple[Make, int]] = {
    "ViT-S-batches": (partial(photos, PHOTO), 200),
    "NAFNet": (_noisy, 200),
    "RAFT-S": (_views, 200),
    "RT-DETR-R101-small": (partial(photos, SMALL_DETECTED), 50),
    "BERT": (partial(words, (1, 128)), 200),
}
"""Inputs of the exported models, and how many unseen ones there are time for."""


def _exported(name: str) -> Model:
    make, unseen = EXPORTED[name]
    return _folded(name, MADE / f"{name}.onnx", make, unseen=unseen)


MODELS: dict[str, Callable[[], Model]] = {
    "det": lambda: _folded("det", DETECTOR, _page, 5e-2),
    "rec": lambda: _folded("rec", RECOGNISER, _line, 1e-2),
    "encoder": _encoder,
    **{name: partial(_exported, name) for name in EXPORTED},
}
"""What makes each model, by name."""
