"""Whether several inputs in one call of ONNX Runtime cost less than one after the other, on one
thread, as inferences side by side have it: ``python -m benchmarks.sizes.batches``.

Paired: both sides in turn, the quickest of five.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime as ort

from benchmarks.common import DETECTOR, RECOGNISER, machine

COUNT, ROUNDS = 8, 5
CASES = (
    ("detector", DETECTOR, (3, 320, 320)),
    ("detector", DETECTOR, (3, 640, 640)),
    ("recogniser", RECOGNISER, (3, 48, 320)),
)


def _timed(job: Callable[[], np.ndarray]) -> tuple[float, np.ndarray]:
    began = time.perf_counter()
    made = job()
    return time.perf_counter() - began, made


def _row(name: str, path: Path, shape: tuple[int, ...]) -> str:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    wanted = session.get_inputs()[0].name
    batch = np.random.default_rng(0).random((COUNT, *shape), dtype=np.float32)

    def run(some: np.ndarray) -> np.ndarray:
        return np.asarray(session.run(None, {wanted: some})[0])

    def alone() -> np.ndarray:
        return np.concatenate([run(batch[k : k + 1]) for k in range(COUNT)])

    rounds = [(_timed(alone), _timed(lambda: run(batch))) for _ in range(ROUNDS)]
    one, many = (
        1e3 * min(seconds for seconds, _ in side) / COUNT for side in zip(*rounds, strict=True)
    )
    same = "yes" if np.array_equal(rounds[0][0][1], rounds[0][1][1]) else "no"
    return f"| {name} | {'x'.join(map(str, shape))} | {one:.1f} | {many:.1f} | {same} |"


def main() -> None:
    """Print a row a case."""
    print(
        f"{machine()}\n\n| model | input | one by one, ms | {COUNT} at once, ms each | same bits |"
    )
    print("| --- | --- | --- | --- | --- |")
    for problem in CASES:
        print(_row(*problem))


if __name__ == "__main__":
    main()
