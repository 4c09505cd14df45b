"""Every session sleeps where it waits, and takes no more threads than the process may."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import threadpoolctl

from bisect_trt.base.limits import thread_count
from bisect_trt.runners.ort_session import (
    node_session,
    reference_session,
    session_as_written,
)
from bisect_trt.settings import Settings, within_threads
from bisect_trt.steps.open_runners import shared_out

MODEL = onnx.parser.parse_model("""
    <ir_version: 8, opset_import: ["" : 17]>
    g (float[2] x) => (float[2] y) { y = Tanh(x) }
""")


@pytest.mark.parametrize("threads", [0, 1])
def test_sessions(threads: int) -> None:
    for session in (
        node_session(MODEL, threads),
        reference_session(MODEL, threads=threads),
        session_as_written(MODEL, "m", threads),
    ):
        options = session.get_session_options()
        assert options.intra_op_num_threads == (threads or min(8, thread_count()))
        assert options.inter_op_num_threads == 1
        for pool in ("intra_op", "inter_op"):
            entry = f"session.{pool}.allow_spinning"
            assert options.get_session_config_entry(entry) == "0"


def test_a_session_does_not_keep_the_model_it_was_made_of() -> None:
    """ONNX Runtime's wrapper would, to open it again on other providers."""
    x = np.float32([0.5, -1.0])
    for model in (MODEL, lambda: MODEL):
        session = reference_session(model)
        assert session._model_bytes is None
        assert np.allclose(session.run(None, {"x": x})[0], np.tanh(x), atol=1e-6)


def test_no_session_keeps_freed_activations() -> None:
    for session in (node_session(MODEL), reference_session(MODEL), session_as_written(MODEL, "m")):
        options = session.get_session_options()
        assert not options.enable_cpu_mem_arena and not options.enable_mem_pattern


@pytest.mark.parametrize(
    ("workers", "threads", "shares"),
    [(1, 6, (1, 6)), (2, 6, (2, 3)), (4, 6, (4, 1)), (8, 6, (6, 1)), (3, 1, (1, 1))],
)
def test_workers_share_the_threads(workers: int, threads: int, shares: tuple[int, int]) -> None:
    assert shared_out(workers, threads) == shares
    assert shares[0] * shares[1] <= threads


def test_a_job_keeps_to_what_its_settings_ask_for() -> None:
    @within_threads
    def job(settings: Settings, more: int) -> tuple[int, list[int]]:
        pools = threadpoolctl.threadpool_info()
        blas = [pool["num_threads"] for pool in pools if pool["user_api"] == "blas"]
        return more, blas

    before = [p["num_threads"] for p in threadpoolctl.threadpool_info()]
    count, blas = job(Settings("m", [], threads=1), 0)
    assert count == 0 and set(blas) <= {1}
    count, blas = job(Settings("m", []), more=10)
    assert count == 10 and all(n <= thread_count() for n in blas)
    assert [p["num_threads"] for p in threadpoolctl.threadpool_info()] == before


def test_two_quantisations_in_a_row_stay_two() -> None:
    """ONNX Runtime makes one of them, of another zero point, which is up to a step off."""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[256] x) => (float[256] y)
        <float step = {0.04}, uint8 low = {0}, uint8 high = {5}> {
            a = QuantizeLinear(x, step, low)
            b = DequantizeLinear(a, step, low)
            c = QuantizeLinear(b, step, high)
            y = DequantizeLinear(c, step, high)
        }
    """)
    x = {"x": np.linspace(-1.0, 10.0, 256, dtype=np.float32)}
    expected = session_as_written(model, "m").run(None, x)[0]
    assert np.array_equal(reference_session(model).run(None, x)[0], expected)
