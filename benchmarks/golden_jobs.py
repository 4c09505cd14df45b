"""The runs whose answers ``benchmarks.goldens`` keeps: what is run, on which inputs, and how.

Every run is emulated. A name is for good: an answer is compared with the one of the same name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx.backend.test.loader import DATA_DIR

from benchmarks.common import DETECTOR, MODELS, RECOGNISER, ROOT, SHARED
from benchmarks.models.zoo import FOLDER as ZOO
from benchmarks.models.zoo import NETWORKS
from fixtures import cases
from fixtures.blocks import BLOCKS
from fixtures.fixture import Fixture
from fixtures.models import ALL
from fixtures.reports import REPORTS
from tests.fuzz.graphs import Recipe, generate

DEFAULTS = ", defaults"
"""What the name of a run ends with that repairs and fits weights, as ``run`` does unasked."""
_SEARCH = ("--repair", "none", "--weights", "nearest")
_EXPORTED = ROOT / "tests" / "model" / "exported"
_LIGHT = Path(DATA_DIR) / "light"
_REQUIREMENT_OF_ZOO = ("--requirement", "snr_db>=65")
"""Seeded weights pass at 40 dB as they are: this makes the search choose."""

_NETWORKS = """
    0:overflow 1:squares 2:epsilon 3:underflow 4:offset 5:heavy 6:masked 7:mask-1e9 8:dead
    9:swallowed 10:chain 11:overflow+underflow 12:squares+offset 13:heavy+epsilon
    100: 101: 102: 103: 104: 105:
"""
"""Seeds and planted faults of the random networks: one of each kind, and six without."""

Inputs = Path | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Job:
    """A run of ``model`` with ``inputs``: paths, or what is to be written.

    ``is_slow`` means minutes: it is made where it is named, or where slow ones are asked for.
    """

    name: str
    model: Path | onnx.ModelProto
    inputs: Inputs
    arguments: tuple[str, ...] = ()
    is_slow: bool = False

    @property
    def is_here(self) -> bool:
        """Whether its files are on this machine."""
        files = [given for given in (self.model, self.inputs) if isinstance(given, Path)]
        return all(file.exists() for file in files)

    def command(self, folder: Path) -> list[str]:
        """What follows ``bisect-trt``; ``folder`` gets the files that are not there yet."""
        model, inputs = self.model, self.inputs
        if isinstance(model, onnx.ModelProto):
            proto, model = model, folder / "model.onnx"
            model.write_bytes(proto.SerializeToString(deterministic=True))
        if not isinstance(inputs, Path):
            arrays, inputs = inputs, folder / "inputs"
            inputs.mkdir()
            for number, sample in enumerate(arrays):
                np.savez(inputs / f"{number}.npz", allow_pickle=False, **sample)
        return ["run", str(model), "--input", str(inputs), *self.arguments]


def every_job() -> Iterator[Job]:
    """All runs, in the order of the file."""
    yield from _fixtures()
    yield from _pages()
    for make in REPORTS:
        report = make()
        job = partial(Job, model=report.model, inputs=report.inputs)
        precision = ("--precision", report.precision)
        yield job(f"report {report.name}", arguments=(*precision, *_SEARCH))
        if report.precision == "fp16":
            yield job(f"report {report.name}{DEFAULTS}", arguments=precision)
    for block in BLOCKS:
        yield Job(f"block {block.name}", block.model(), block.given())
    yield from _networks()
    yield from _zoo()


def _fixtures() -> Iterator[Job]:
    """Fixtures and cases: the search alone, and all of FP16 with the defaults."""
    made = [(fixture.name, fixture) for fixture in (make() for make in ALL)]
    made += [(name, make()) for name, make in cases.AUGMENTED.items()]
    for name, fixture in made:
        arguments = _arguments(fixture)
        yield Job(name, fixture.model, [fixture.inputs], (*arguments, *_SEARCH))
        if fixture.precision == "fp16":
            yield Job(f"{name}{DEFAULTS}", fixture.model, [fixture.inputs], arguments)


def _arguments(fixture: Fixture) -> tuple[str, ...]:
    metrics = [part for metric in fixture.metrics for part in ("--metric", metric)]
    return ("--precision", fixture.precision, "--requirement", fixture.require, *metrics)


def _pages() -> Iterator[Job]:
    """OCR models on a page; those with the shared inputs take minutes each."""
    for name, model, inputs, requirement in (
        ("det, demo's page, max_abs 5e-2", DETECTOR, MODELS / "page.npz", "max_abs<=5e-2"),
        ("ocr_det, atol=5e-2,rtol=1e-2", DETECTOR, SHARED / "ocr_det.npz", "atol=5e-2,rtol=1e-2"),
        ("ocr_rec, atol=1e-2,rtol=1e-2", RECOGNISER, SHARED / "ocr_rec.npz", "atol=1e-2,rtol=1e-2"),
        ("ocr_det, atol=1e-2,rtol=1e-2", DETECTOR, SHARED / "ocr_det.npz", "atol=1e-2,rtol=1e-2"),
    ):
        arguments = ("--requirement", requirement, *_SEARCH)
        yield Job(name, model, inputs, arguments, is_slow=name.startswith("ocr_"))
    yield Job(f"det, demo's page{DEFAULTS}", DETECTOR, MODELS / "page.npz")


def _networks() -> Iterator[Job]:
    """Random networks of fixed seeds."""
    for text in _NETWORKS.split():
        seed, fault = text.split(":")
        network = generate(Recipe(int(seed), fault))
        yield Job(f"network {seed} {fault or 'as it is'}", network.model, network.feeds)


def _zoo() -> Iterator[Job]:
    """What PyTorch exports: two files of this repository, and ``.cache/zoo`` where it is there."""
    for exporter, name in (("dynamo", "x"), ("torchscript", "input.1")):
        inputs = [{name: _noise(number, 1, 4, 8)} for number in range(3)]
        yield Job(f"zoo {exporter}", _EXPORTED / f"{exporter}.onnx", inputs, _REQUIREMENT_OF_ZOO)
    image = {"gpu_0/data_0": _noise(0, 1, 3, 224, 224)}
    yield Job("zoo onnx's shufflenet", _LIGHT / "light_shufflenet.onnx", [image])
    for name in NETWORKS:
        yield Job(f"zoo {name}", ZOO / f"{name}.onnx", ZOO / name, _REQUIREMENT_OF_ZOO)


def _noise(seed: int, *shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
