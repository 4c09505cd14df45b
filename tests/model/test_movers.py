"""Layers that only move values follow their neighbours into FP32, at no cost of search."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from hypothesis import given
from hypothesis import strategies as st

import bisect_trt
from bisect_trt.base.plan import EXACT, Movers, Precision, PrecisionPlan
from bisect_trt.model.graph import Graph
from bisect_trt.model.roundings import list_movers

CHAIN = """<ir_version: 8, opset_import: ["" : 17]>
g (float[4, 4] x) => (float[4, 4] y) <int64[2] s = {4, 4}> {
    [first] a = Exp(x) [same] b = Identity(a) [turn] c = Transpose<perm = [1, 0]>(b)
    [shape] d = Reshape(c, s) [last] e = Log(d) [out] y = Identity(e)
}"""


def plan(*pinned: str) -> PrecisionPlan:
    graph = Graph(onnx.parser.parse_model(CHAIN))
    base = PrecisionPlan("fp16", movers=list_movers(graph, Precision.FP16))
    return base.with_pins(pinned)


def test_between_two_kept_layers_movers_are_kept() -> None:
    both = plan("first", "last")
    assert both.pinned == {"first", "same", "turn", "shape", "last"}
    assert both.inherited == {"same", "turn", "shape"}
    assert plan("first").pinned == {"first"} and plan("last").pinned == {"last"}
    assert plan().pinned == frozenset(), "an input or an output alone brings none"
    assert plan("first", "turn").pinned == {"first", "same", "turn"}
    assert plan("first", "last") == PrecisionPlan("fp16", both.pinned)


def test_of_several_readers_one_is_enough_and_of_several_sources_all_are_needed() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[2] x) => (float[4] y, float[2] z) {
        [a] p = Exp(x) [b] q = Abs(x) [join] j = Concat<axis = 0>(p, q)
        [c] y = Log(j) [move] m = Identity(p) [d] z = Neg(m)
    }"""
    graph = Graph(onnx.parser.parse_model(text))
    base = PrecisionPlan("fp16", movers=list_movers(graph, Precision.FP16))
    assert "join" not in base.with_pins(["a", "c"]).pinned
    assert "join" in base.with_pins(["a", "b", "c"]).pinned
    assert "move" not in base.with_pins(["a", "c"]).pinned
    assert list_movers(graph, Precision.TF32).sources == {}


names = st.sampled_from([EXACT, "p", "q", "m0", "m1", "m2", "m3"])


@given(
    st.lists(st.tuples(st.lists(names, min_size=1), st.lists(names)), min_size=1, max_size=4),
    st.frozensets(st.sampled_from(["p", "q", "m0", "m1"])),
)
def test_closing_is_idempotent_and_grows(
    described: list[tuple[list[str], list[str]]], pinned: frozenset[str]
) -> None:
    # In network order, as they are listed: a mover reads earlier ones, later ones read it.
    movers = Movers(
        {
            f"m{i}": tuple(s for s in sources if not s.startswith("m") or s < f"m{i}")
            for i, (sources, _) in enumerate(described)
        },
        {
            f"m{i}": tuple(r for r in readers if not r.startswith("m") or r > f"m{i}")
            for i, (_, readers) in enumerate(described)
        },
    )
    closed = movers.closed(pinned)
    assert pinned <= closed == movers.closed(closed)
    assert movers.inherited(closed) <= closed.intersection(movers.sources)


def test_the_search_pays_for_none_of_them(tmp_path: Path) -> None:
    """Six movers stood as pins of their own between two layers beyond the range."""
    body = " ".join(f"[m{i}] v{i + 1} = Identity(v{i})" for i in range(6))
    text = f"""<ir_version: 8, opset_import: ["" : 17]>
    g (float[1, 64] x) => (float[1, 64] y) <float large = {{1e6}}> {{
        [up] v0 = Mul(x, large) {body} [down] w = Div(v6, large) [end] y = Tanh(w)
    }}"""
    x = {"x": np.linspace(0.1, 2.0, 64, dtype=np.float32)[None]}
    model = onnx.parser.parse_model(text)
    result = bisect_trt.bisect(
        model, x, runner="emulated", out=tmp_path, robust=0, repair="none", weights="nearest"
    )
    assert set(result.pinned) == {"up", "down", *(f"m{i}" for i in range(6))}
    pins = result.pins.set_index("layer")
    assert list(pins.index[pins["proved"]]) == ["up", "down"]
    assert list(pins.index[pins["inherited"]]) == [f"m{i}" for i in range(6)]
    assert result.complete
