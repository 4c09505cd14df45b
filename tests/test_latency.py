"""The estimated time of pins, by hand on a small network, and what ``--minimise latency`` makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from onnx import helper

import bisect_trt
from bisect_trt.errors import BadInputError
from bisect_trt.graph import list_layers
from bisect_trt.graph.layers import Layer
from bisect_trt.latency import BYTES_PER_S, _products, latency_model
from fixtures.build import GraphBuilder
from fixtures.cases.unimatch import unimatch


def test_slower_layers_and_casts_by_hand() -> None:
    """x (100) -> MatMul by 10 x 20 (200) -> Relu (200) -> Neg (200), the output; memory bounds all of them."""
    b = GraphBuilder(0)
    product = b.op("MatMul", "x", b.normal(10, 20))
    b.rename_output(b.op("Neg", b.op("Relu", product)), "y")
    model = b.model({"x": [10, 10]}, {"y": [10, 20]})
    elements = {"/MatMul": 200, "/Relu": 200, "/Neg": 200}
    found = latency_model(model, list_layers(model), elements, {"x": 100})
    assert found.slower["/MatMul"] == pytest.approx(2 * (100 + 200 + 200) / BYTES_PER_S)
    assert found.slower["/Relu"] == pytest.approx(2 * 400 / BYTES_PER_S)
    assert found.neighbours["/Relu"] == {"/MatMul", "/Neg"}
    cast = 6 / BYTES_PER_S
    assert found.seconds(frozenset()) == pytest.approx((100 + 200) * cast)  # the input goes down, the output up
    assert found.seconds(frozenset({"/Relu"})) == pytest.approx(2 * 400 / BYTES_PER_S + (100 + 200 + 200 + 200) * cast)
    assert found.seconds(frozenset(elements)) == pytest.approx(sum(found.slower.values()))


def test_minimising_latency_never_ends_dearer_and_says_why_a_pin_is_there(tmp_path: Path) -> None:
    fixture = unimatch()
    options = {"precision": fixture.precision, "require": fixture.require.split(";"), "metrics": fixture.metrics, "runner": "emulated"}
    few = bisect_trt.bisect(fixture.model, fixture.inputs, out=tmp_path / "few", **options)
    quick = bisect_trt.bisect(fixture.model, fixture.inputs, out=tmp_path / "quick", minimise="latency", **options)
    assert few.passed and quick.passed and quick.complete
    assert quick.search_facts["estimated_pin_seconds"] < few.search_facts["estimated_pin_seconds"]
    assert set(few.pins["role"]) == {"needed"} and len(few.pinned) <= len(quick.pinned)
    for row in quick.pins.itertuples():
        assert (row.verdict_without == "pass") == (row.role == "spares casts") and row.proved == (row.role == "needed")


@pytest.mark.parametrize(
    ("op", "weight", "attributes", "products"),
    [
        ("MatMul", (30, 20), {}, 200 * 30),
        ("Gemm", (30, 20), {}, 200 * 30),
        ("Gemm", (20, 30), {"transB": 1}, 200 * 30),
        ("Conv", (20, 30, 3, 3), {}, 200 * 30 * 9),
        ("ConvTranspose", (30, 20, 2, 2), {}, 300 * 20 * 4),
    ],
)
def test_products_of_a_layer_with_a_weight(op: str, weight: tuple[int, ...], attributes: dict[str, int], products: int) -> None:
    node = helper.make_node(op, ["x", "w"], ["y"], **attributes)
    layer = Layer("l", op, 0, ("y",), ("x", "w"), frozenset())
    assert _products(node, layer, 200, {"x": 300}, {"w": weight}) == products


def test_latency_and_engine_certificates_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="choose one"):
        bisect_trt.bisect(unimatch().model, unimatch().inputs, minimise="latency", certify="engine", out=tmp_path)


def test_an_unknown_aim_is_said(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="--minimise bytes: unknown"):
        bisect_trt.bisect(unimatch().model, unimatch().inputs, minimise="bytes", out=tmp_path)
