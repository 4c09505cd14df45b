"""What copies of a few inputs say of others: ``python -m benchmarks.unseen.few_inputs [--repeats
10] [--first 0]``.

Small models whose inputs differ as real ones do, each searched with 1 to 16 inputs; every plan is
judged on 200 others. A row counts the plans of which as many copies held as were asked for, and
those of them that were called validated because the copies reach no farther than the tolerance
(bisect_trt/numerics/prediction.py); of either, how many hold on less than 93 % of the others: that
is seen in 8 % of samples of 200 where 95 % of all hold.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray

import bisect_trt
from benchmarks.common import machine
from bisect_trt.base.outcomes import ValidationVerdict
from bisect_trt.metrics.arrays import Arrays
from fixtures.build import GraphBuilder
from fixtures.tokens import sentence, token_encoder

COUNTS, UNSEEN, UNSEEN_FROM, FEW = (1, 2, 4, 8, 16), 200, 100_000, 0.93
_SIDE = 32


@dataclass(frozen=True)
class Few:
    """``make`` gives the input of a number: the same is always the same."""

    name: str
    model: Callable[[], onnx.ModelProto]
    require: str
    make: Callable[[int], Arrays]


def classifier() -> onnx.ModelProto:
    """Four convolutions and a linear layer: ten logits of a small image."""
    b = GraphBuilder(1)
    x, channels = "image", 3
    for wide in (8, 16, 16, 16):
        weight = b.normal(wide, channels, 3, 3, scale=(2.0 / (9 * channels)) ** 0.5)
        x = b.op("Relu", b.op("Conv", x, weight, b.normal(wide, scale=0.1), pads=[1, 1, 1, 1]))
        channels = wide
    x = b.op("Flatten", b.op("GlobalAveragePool", x))
    b.rename_output(b.op("Gemm", x, b.normal(channels, 10), b.normal(10)), "logits")
    return b.model({"image": [1, 3, _SIDE, _SIDE]}, {"logits": [1, 10]})


def image(number: int) -> Arrays:
    """Four waves a channel, of any direction."""
    random = np.random.default_rng([number, 7])
    down, across = np.mgrid[0:_SIDE, 0:_SIDE] / _SIDE

    def wave() -> NDArray[np.float64]:
        turns = random.uniform(0.0, 4.0) * across + random.uniform(0.0, 4.0) * down
        found = random.normal() * np.sin(2.0 * np.pi * turns + random.uniform(0.0, 6.0))
        return np.asarray(found, np.float64)

    pixels = np.stack([sum((wave() for _ in range(4)), start=0.0 * down) for _ in range(3)])
    return {"image": pixels[None].astype(np.float32)}


def loud(number: int) -> Arrays:
    """The same, some twice and some half as strong."""
    strength = np.exp(0.7 * np.random.default_rng([number, 8]).normal())
    return {name: np.float32(array * strength) for name, array in image(number).items()}


CASES = (
    Few("images", classifier, "max_abs<=1e-3", image),
    Few("images of any strength", classifier, "max_abs<=2e-3", loud),
    Few("images, the same class", classifier, "top1>=1", image),
    Few("token ids", token_encoder, "max_abs<=3e-3", sentence),
)


def row(problem: Few, count: int, repeats: range, folder: Path) -> str:
    """A row of the table: a plan a repeat, each searched with ``count`` inputs of its own."""
    model = problem.model()
    others = [problem.make(UNSEEN_FROM + i) for i in range(UNSEEN)]
    kept: dict[frozenset[str], float] = {}
    asked, robust, pins = [], [], []
    for repeat in repeats:
        given = [problem.make(1000 * repeat + i) for i in range(count)]
        found = bisect_trt.bisect(
            model, given, require=problem.require, runner="emulated", out=folder / "run"
        )
        validation = found.validation
        if not found.passed or validation is None:
            continue
        if (chosen := frozenset(found.pinned)) not in kept:
            kept[chosen] = _share(problem, model, chosen, others, folder)
        pins.append(len(chosen))
        if (
            min(validation.perturbed.lower_bound, validation.augmented.lower_bound)
            >= validation.wanted
        ):
            asked.append(kept[chosen])
            robust += [kept[chosen]] if validation.word is ValidationVerdict.VALIDATED else []
    counted = " | ".join(f"{len(some)} | {told_few(some)}" for some in (asked, robust))
    sizes = f"{min(pins)} to {max(pins)}" if pins else "none passes"
    return f"| {problem.name} | {count} | {sizes} | {counted} |"


def told_few(shares: list[float]) -> str:
    """How many of ``shares`` are less than :data:`FEW`, and the least of them."""
    few = sorted(share for share in shares if share < FEW)
    return f"{len(few)} ({100 * few[0]:.1f} % the least)" if few else "0" if shares else ""


def _share(
    problem: Few,
    model: onnx.ModelProto,
    pins: frozenset[str],
    others: list[Arrays],
    folder: Path,
) -> float:
    plan = {
        "base": "fp16",
        "pin_precision": "fp32",
        "pinned": sorted(pins),
        "requirements": [problem.require],
    }
    path = folder / "plan.json"
    path.write_text(json.dumps(plan), encoding="utf-8")
    found = bisect_trt.verify(
        model,
        others,
        path,
        holdout="none",
        runner="emulated",
        out=folder / f"verify-{len(pins)}-{hash(pins)}",
    )
    if found.validation is None:
        raise RuntimeError("nothing was judged")
    return found.validation.given.passed / found.validation.given.tested


def begun(what: str | None, usual: int, counted: str) -> range:
    """The repeats asked for on the command line, after the head of their table was printed."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--repeats", type=int, default=usual)
    parser.add_argument("--first", type=int, default=0, help="the number of the first repeat")
    given = parser.parse_args()
    repeats = range(given.first, given.first + given.repeats)
    print(f"{machine()}, repeats {repeats.start} to {repeats.stop - 1}\n")
    print(
        f"| model | {counted} | pins | copies hold | of these few others | validated | of these |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    return repeats


def main() -> None:
    """Print the table."""
    repeats = begun(__doc__, 10, "inputs")
    for problem in CASES:
        for count in COUNTS:
            with tempfile.TemporaryDirectory() as folder:
                print(row(problem, count, repeats, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
