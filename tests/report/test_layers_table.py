"""What layers.csv adds to the errors: sources of failure, channels, places in the code."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pandas as pd
from onnx import parser

from bisect_trt.base.interrupt import Observer
from bisect_trt.model.graph import Graph
from bisect_trt.pipeline import compare
from bisect_trt.report.tables import failure_sources, is_wrong
from bisect_trt.settings import Settings

EXPORTED = Path(__file__).parents[1] / "model" / "exported"
CHAIN = parser.parse_model(
    """
    <ir_version: 8, opset_import: ["" : 17]>
    chain (float[2] x) => (float[2] y, float[2] z)
    { a = Exp (x)  b = Neg (a)  s = Shape (b)  c = Expand (b, s)  y = Abs (c)  z = Relu (x) }
    """
)


def names() -> dict[str, str]:
    graph = Graph(CHAIN)
    return {n.output[0]: name for n, name in zip(CHAIN.graph.node, graph.names, strict=True)}


def test_a_source_is_wrong_while_what_it_reads_is_right() -> None:
    name = names()
    wrong = dict.fromkeys(name.values(), False) | {name["a"]: True, name["b"]: True}
    assert failure_sources(Graph(CHAIN), wrong) == {name["a"]}
    # A layer that is right again ends what came before it: what fails behind it is another source.
    wrong |= {name["b"]: False, name["y"]: True, name["z"]: True}
    assert failure_sources(Graph(CHAIN), wrong) == {name["a"], name["y"], name["z"]}


def test_a_node_that_is_no_layer_passes_on_what_it_reads() -> None:
    name = names()
    wrong = {name["b"]: True, name["y"]: True, name["a"]: False}
    assert failure_sources(Graph(CHAIN), wrong) == {name["b"]}


def test_wrong_is_not_finite_or_far_off() -> None:
    table = pd.DataFrame(
        {
            "finite": [True, False, True, False, False],
            "snr_db": [60.0, np.nan, 19.0, np.nan, np.nan],
            # Nothing of the fourth is finite; the last was never computed.
            "max_abs": [1e-3, np.inf, 1.0, np.nan, np.nan],
            "nonfinite": [0, 3, 0, 8, np.nan],
        }
    )
    assert is_wrong(table).tolist() == [False, True, True, True, False]


def test_layers_csv_says_where_in_the_code(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((1, 4, 8)).astype(np.float32)
    settings = Settings(onnx.load(EXPORTED / "dynamo.onnx"), [{"x": x}], out=tmp_path)
    result = compare(settings, Observer())
    read = pd.read_csv(tmp_path / "layers.csv", keep_default_na=False).set_index("layer")
    pow_ = read.loc["node_pow_1"]
    assert (pow_["module"], pow_["module_class"]) == ("blocks.0", "Block")
    assert pow_["file"].endswith("net.py") and pow_["line"] == "29"
    assert pow_["code"] == "return x + self.attn(self.norm(x)).pow(2)"
    assert read.loc["node_Split_11", "line"] == ""
    assert not result.layers["source"].any()
    norm = read.loc["node_layer_norm"]  # (1, 4, 8): eight channels, the last axis
    assert int(norm["channels"]) == 8
    peaks = [norm[f"channel_peak_{q}"] for q in ("min", "p25", "p50", "p75", "max")]
    assert sorted(map(float, peaks)) == list(map(float, peaks))
    assert float(peaks[-1]) == max(abs(float(norm["ref_min"])), abs(float(norm["ref_max"])))
