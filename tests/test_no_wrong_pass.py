"""What public reports and random networks showed, where no other file is about it: near ties, what
`compare` shows first, what the forms of older versions cannot say, renaming, bodies without shapes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pandas as pd
import pytest
from onnx import TensorProto, helper, numpy_helper

import bisect_trt
from bisect_trt.base.errors import BadInputError
from bisect_trt.base.plan import Precision
from bisect_trt.base.sample import Sample
from bisect_trt.inputs.samples import suspicious_inputs
from bisect_trt.metrics.parser import parse_requirements
from bisect_trt.model.inspection import inspect_model
from bisect_trt.model.load import load_model
from bisect_trt.model.outputs import Decision, list_decisions
from bisect_trt.report.tables import suspect_layers
from bisect_trt.report.text import plan_line
from fixtures.fixture import waves
from fixtures.models import residual
from fixtures.reports import sdxl_vae
from tests.command import call
from tests.conftest import Finished, run_model
from tests.networks import parsed

F = TensorProto.FLOAT


def run(model: onnx.ModelProto, inputs: object, out: Path, **options: object) -> bisect_trt.Result:
    chosen = {"runner": "emulated", "robust": 0, "weights": "nearest", **options}
    return bisect_trt.bisect(model, inputs, out=out, **chosen)


def decider() -> onnx.ModelProto:
    """Two candidates of each row are the same numbers, computed in another order."""
    random = np.random.default_rng(1)
    w = random.normal(0, 0.3, (16, 16)).astype(np.float32)
    v = random.normal(0, 0.3, (16, 6)).astype(np.float32)
    v[:, 5] = v[:, 4]  # a tie wherever they win
    return parsed(
        """[first] a = MatMul(x, w) [second] b = MatMul(a, v) [place] p = ArgMax<axis = 1>(b)
        [flat] y = Squeeze(p, axes)""",
        "float[8, 16] x",
        "int64[8] y",
        w=w,
        v=v,
        axes=np.array([1]),
    )


def test_decisions_are_found_behind_what_keeps_their_order() -> None:
    assert list_decisions(decider()) == {"y": Decision("b", 1, False)}
    other = parsed(
        "p = ArgMin<axis = 1>(x) c = Cast<to = 1>(p) y = Add(c, c)", outputs="float[1,1] y"
    )
    assert list_decisions(other) == {}


def test_a_circle_is_refused(tmp_path: Path) -> None:
    model = parsed("a = Identity(y) y = Identity(a)")
    with pytest.raises(BadInputError):
        run(model, {"x": waves(0, 1, 16)}, tmp_path)


def test_ties_within_the_noise_of_fp32_are_counted_apart(tmp_path: Path) -> None:
    """0.4.0 kept everything in FP32 for them."""
    inputs = [{"x": waves(n, 8, 16)} for n in range(4)]
    model = decider()
    chosen = np.concatenate([run_model(model, x)[0] for x in inputs])
    assert (chosen == 4).any(), "there is a tie among them"
    result = run(model, inputs, tmp_path)
    assert result.passed and len(result.pinned) < 2
    noted = [f.message for f in result.findings if f.kind == "ties"]
    if noted:
        assert "ties within FP32's own noise: they are not counted" in noted[0]


def test_near_ties_are_named(tmp_path: Path) -> None:
    """Of four inputs one is decided by a hair; the answer says which, and that fewer layers do."""
    model = parsed(
        "[one] a = Mul(x, c) [two] b = Add(a, d) [three] s = Softmax(b) y = Identity(s)",
        "float[1, 4] x",
        "float[1, 4] y",
        c=np.float32([[1.001, 0.999, 1.003, 0.997]]),
        d=np.float32([[0, 0, 0, 0]]),
    )
    clear = [{"x": np.float32([[3, 1, 2, 0]])}, {"x": np.float32([[0, 5, 1, 2]])}]
    near = {"x": np.float32([[1.9971, 2.001, 0.5, 0.1]])}
    reference = run_model(model, near)[0]
    assert abs(reference[0, 0] - reference[0, 1]) < 1e-3
    result = run(model, [*clear, near], tmp_path, require="top1>=1")
    assert result.base_score > 1.0
    (told,) = (f.message for f in result.findings if f.kind == "near-tie")
    assert "differ by less than 1 % of the output's RMS on sample 2" in told


def test_compare_shows_what_makes_infinities_first(tmp_path: Path) -> None:
    report = sdxl_vae()
    onnx.save(report.model, tmp_path / "m.onnx")
    np.savez(tmp_path / "x.npz", **report.inputs[0])
    told = call(
        *("compare", str(tmp_path / "m.onnx"), "--input", str(tmp_path / "x.npz")),
        *("--runner", "emulated", "--out", str(tmp_path / "out")),
    )
    rows = [line for line in told.output.splitlines() if line.startswith("/decoder")]
    assert "not finite: made here" in rows[0] and "up_blocks.3/conv2" in rows[0]
    assert len(rows) == 40


def test_what_passes_infinities_on_stands_behind_what_makes_them() -> None:
    table = pd.DataFrame(
        {
            "layer": ["fine", "passes", "makes", "worse", "makes too"],
            "op": "Mul",
            "introduced_finite": [True, True, False, True, False],
            "finite": [True, False, False, True, False],
            "introduced_snr_db": [70.0, 60.0, 80.0, 50.0, 40.0],
            "ref_max": 1.0,
        }
    )
    assert list(suspect_layers(table)["layer"]) == [
        *("makes", "makes too", "passes", "worse", "fine")
    ]


def test_half_a_clip_is_no_argument_of_trtexec(tmp_path: Path) -> None:
    bounds = {"low": np.float32(-0.5), "high": np.float32(0.5)}
    model = parsed("[bound] b = Clip(x, low, high) [out] y = Tanh(b)", **bounds)
    onnx.save(model, tmp_path / "m.onnx")
    plan = tmp_path / "plan.json"
    plan.write_text('{"base": "fp16", "pinned": ["bound"]}')
    common = ["export", str(tmp_path / "m.onnx"), "--plan", str(plan), "--format"]
    refused = call(*common, "trtexec")
    assert refused.exit_code == 2 and len(refused.output.strip().splitlines()) == 1
    assert "--format onnx" in refused.output and "--format polygraphy" in refused.output
    assert call(*common, "polygraphy").exit_code == 0


@pytest.mark.parametrize(
    ("body", "opset", "kind"),
    [
        ("y = GridSample(x, grid)", 20, "grid-sample"),
        ("y = GridSample(x, grid)", 16, ""),
        ("y = GroupNormalization<num_groups = 1>(x, s, s)", 21, "one-group"),
        ("y = GroupNormalization<num_groups = 2>(x, s, s)", 21, ""),
    ],
)
def test_what_engines_get_wrong_in_fp32_is_told(body: str, opset: int, kind: str) -> None:
    inputs = "float[1, 2, 4, 4] x, float[1, 4, 4, 2] grid, float[2] s"
    model = parsed(body, inputs, "float[1, 2, 4, 4] y", opset=opset)
    kinds = {f.kind for f in inspect_model(load_model(model), Precision.FP16).findings}
    assert (kind in kinds) if kind else not kinds & {"grid-sample", "one-group"}


def test_a_plan_with_statistics_of_a_normalisation_is_verified(tmp_path: Path) -> None:
    """Mean and deviation stay FP32 by rule, and were held against the plan's type."""
    model = parsed(
        "[norm] n, m, d = LayerNormalization<axis = -1>(x, s, b) [out] y = Tanh(n)",
        "float[2, 16] x",
        "float[2, 16] y, float[2, 1] m",
        s=np.ones(16, np.float32),
        b=np.zeros(16, np.float32),
    )
    x = {"x": waves(0, 2, 16)}
    run(model, x, tmp_path / "run")
    checked = bisect_trt.verify(
        model, x, tmp_path / "run" / "plan.json", runner="emulated", out=tmp_path / "verify"
    )
    assert checked.passed, checked.checks


def scanned(repeats: int) -> onnx.ModelProto:
    """A Scan whose body's values have no shapes, between products enough to be cut."""
    unshaped = [
        onnx.ValueInfoProto(name=n, type=helper.make_tensor_type_proto(F, None))
        for n in ("s", "x_t", "s2", "y_t")
    ]
    body = helper.make_graph(
        [
            helper.make_node("Add", ["s", "x_t"], ["s2"], "sum"),
            helper.make_node("Identity", ["s2"], ["y_t"], "give"),
        ],
        "body",
        unshaped[:2],
        unshaped[2:],
    )
    nodes, last = [], "x"
    for place in range(repeats):
        nodes.append(helper.make_node("Mul", [last, "c"], [f"a{place}"], f"before{place}"))
        last = f"a{place}"
    scan = helper.make_node("Scan", ["init", last], ["end", "all"], "scan", body=body)
    scan.attribute.append(helper.make_attribute("num_scan_inputs", 1))
    nodes.append(scan)
    last = "all"
    for place in range(repeats):
        nodes.append(helper.make_node("Mul", [last, "c"], [f"b{place}"], f"after{place}"))
        last = f"b{place}"
    nodes.append(helper.make_node("Tanh", [last], ["y"], "tanh"))
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", F, [5, 4])],
        [helper.make_tensor_value_info("y", F, None)],
        [
            numpy_helper.from_array(np.float32(1.01), "c"),
            numpy_helper.from_array(np.zeros(4, np.float32), "init"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("repeats", [5, 60])
def test_a_scan_without_shapes_is_emulated(repeats: int, tmp_path: Path) -> None:
    """From 46 nodes on its segments did not know how many dimensions it scans."""
    x = {"x": waves(1, 5, 4)}
    result = run(scanned(repeats), x, tmp_path, require="max_abs<=1e-6")
    assert result.passed and "scan" in set(result.layers["layer"])


def test_the_mark_of_a_loop_without_shapes_is_a_model(tmp_path: Path) -> None:
    def unshaped(name: str, kind: int, shape: list[int] | None = None) -> onnx.ValueInfoProto:
        return onnx.ValueInfoProto(name=name, type=helper.make_tensor_type_proto(kind, shape))

    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["on"]),
            helper.make_node("Mul", ["v", "v"], ["w"]),
            helper.make_node("Neg", ["w"], ["n"]),
        ],
        "body",
        [
            unshaped("i", TensorProto.INT64, []),
            unshaped("go", TensorProto.BOOL, []),
            unshaped("v", F),
        ],
        [unshaped("on", TensorProto.BOOL, []), unshaped("w", F), unshaped("n", F)],
    )
    nodes = [
        helper.make_node("Relu", ["x"], ["r"], "relu"),
        helper.make_node("Loop", ["count", "yes", "r"], ["l", "every"], "loop", body=body),
        helper.make_node("Tanh", ["l"], ["y"], "tanh"),
    ]
    infos = [helper.make_tensor_value_info(n, F, [2, 3]) for n in "xy"]
    weights = [
        numpy_helper.from_array(np.int64(2), "count"),
        numpy_helper.from_array(np.bool_(True), "yes"),
    ]
    graph = helper.make_graph(nodes, "g", infos[:1], infos[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, tmp_path / "m.onnx")
    target = tmp_path / "marked.onnx"
    marks = ["--mark", "Loop", "--mark", "relu"]
    told = call("mark", str(tmp_path / "m.onnx"), *marks, "-o", str(target))
    assert told.exit_code == 0 and "1 more output" in told.output, told.output
    assert "left out: 'every'" in told.output, "what a Loop gives has no known rank"
    marked = onnx.load(target)
    onnx.checker.check_model(marked, full_check=True)
    assert [o.name for o in marked.graph.output] == ["y", "r"]


def test_names_do_not_decide(finished: Finished, tmp_path: Path) -> None:
    """Equal trials of a growing set were told apart by the layers' names."""
    fixture = residual()
    other = onnx.ModelProto()
    other.CopyFrom(fixture.model)
    count = len(other.graph.node)
    renamed = {}
    for place, node in enumerate(other.graph.node):
        renamed[node.name] = f"n{count - place:04}"
        node.name = renamed[node.name]
    result = run(other, fixture.inputs, tmp_path, require=fixture.require)
    assert [renamed[n] for n in finished(residual).pinned] == result.pinned


def test_a_requirement_that_the_shell_cut_is_explained() -> None:
    with pytest.raises(BadInputError, match=r"quote it.*--requirement 'cosine>=0.99'"):
        parse_requirements(["cosine"], ["y"])
    with pytest.raises(BadInputError, match="not understood"):
        parse_requirements(["nonsense"], ["y"])


def test_a_plan_without_pins_is_all_reduced(tmp_path: Path) -> None:
    model, x = parsed("y = Tanh(x)"), {"x": waves(0, 1, 16)}
    run(model, x, tmp_path / "run")
    checked = bisect_trt.verify(
        model, x, tmp_path / "run" / "plan.json", runner="emulated", out=tmp_path / "verify"
    )
    assert plan_line(checked) == "all in FP16; requirement: snr_db>=40"


def test_embeddings_of_tokens_are_no_noise() -> None:
    random = np.random.default_rng(0)
    table = random.normal(size=(50, 64)) * random.uniform(0.3, 2.0, (50, 1))
    words = table[random.integers(0, 50, 40)].astype(np.float32)[None]
    assert suspicious_inputs([Sample("words", {"x": words})]) == []
    noise = random.normal(size=(1, 40, 64)).astype(np.float32)
    assert len(suspicious_inputs([Sample("noise", {"x": noise})])) == 1


def test_infinities_that_lose_values_are_no_harmless_ones(tmp_path: Path) -> None:
    """Beside a large channel nobody sees that a normalisation gives zeros."""
    model = parsed(
        """[square] q = Mul(x, x) [mean] m = ReduceMean<axes = [1]>(q) [root] r = Sqrt(m)
        [norm] n = Div(x, r) [beside] y = Concat<axis = 1>(n, x)""",
        outputs="float[1, 32] y",
    )
    x = np.linspace(-800, 800, 16, dtype=np.float32).reshape(1, 16)
    result = run(model, {"x": x}, tmp_path, require="max_abs<=5")
    assert result.passed and not result.pinned
    (told,) = (f.message for f in result.findings if f.kind == "overflow-lost")
    assert "square" in told and "what norm" in told and "is lost there" in told
    assert "is lost there" in result._repr_markdown_()


def test_a_mask_of_which_few_pixels_turn_says_what_to_ask(tmp_path: Path) -> None:
    body = "[scale] x = Mul(z, k) [cut] y = Greater(x, half)"
    values = {"half": np.float32(0.5), "k": np.float32(0.7)}
    model = parsed(body, "float[1, 65536] z", "bool[1, 65536] y", **values)
    z = np.random.default_rng(0).uniform(0, 1.4, (1, 65536)).astype(np.float32)
    result = run(model, {"z": z}, tmp_path)
    (told,) = (f.message for f in result.findings if f.kind == "few-differ")
    assert "ask for --requirement 'y:equal>=0.99" in told
    asked = told.rpartition("--requirement '")[2].rstrip("'")
    again = run(model, {"z": z}, tmp_path / "asked", require=asked)
    assert again.passed and not again.pinned
