"""Real emulated evaluations on one worker and on two, each a process with one thread; and in this
process with all threads.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from benchmarks.common import SHARED, load
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.graph import list_layers
from bisect_trt.model.load import load_model
from bisect_trt.runners.base import Runner
from bisect_trt.runners.emulator import EmulatedRunner
from bisect_trt.runners.emulator_workers import SERVER, EmulatorPool, server_arguments
from bisect_trt.runners.process import IsolatedWorker, WorkerPool
from tests import models

PROBES = 40


def report() -> list[str]:
    """Seconds for the same evaluations, and the speed-up of two workers over one (at least 1.6)."""
    model = load_model(models.DETECTOR).proto
    sample = Sample("page", load(SHARED / "ocr_det.npz"))
    layers = [layer.name for layer in list_layers(model)]
    random = np.random.default_rng(0)
    plans = [
        PrecisionPlan(Precision.FP16).with_pins(random.choice(layers, 40, replace=False).tolist())
        for _ in range(PROBES)
    ]
    local = EmulatedRunner(model)
    seconds = {}
    for workers in (1, 2):
        arguments = server_arguments(model, Precision.FP16, 1)
        emulator_pool = EmulatorPool(
            WorkerPool([IsolatedWorker(SERVER, arguments) for _ in range(workers)])
        )
        try:
            # The first starts the processes and makes their sessions.
            _timed(emulator_pool, plans[:workers], sample, workers)
            seconds[workers] = _timed(emulator_pool, plans, sample, workers)
        finally:
            emulator_pool.close()
    _timed(local, plans[:1], sample, 1)
    here = _timed(local, plans, sample, 1)
    return [
        f"## {PROBES} emulated evaluations of PP-OCRv4 det",
        "",
        "| workers | seconds | speed-up |",
        "| --- | --- | --- |",
        f"| one process, one thread | {seconds[1]:.1f} | 1 |",
        f"| two processes, one thread each | {seconds[2]:.1f} | {seconds[1] / seconds[2]:.2f} (at "
        "least 1.6) |",
        f"| this process, all threads | {here:.1f} | {seconds[1] / here:.2f} |",
    ]


def _timed(runner: Runner, plans: list[PrecisionPlan], sample: Sample, threads: int) -> float:
    began = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda plan: list(runner.outputs(plan, [sample])), plans))
    return time.perf_counter() - began
