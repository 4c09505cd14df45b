"""The real parser and builder of TensorRT for RTX, which need no GPU: every fixture and the OCR
models parse, type and build.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from bisect_trt.base.errors import BadInputError, RunnerFailedError, RunnerUnavailableError
from bisect_trt.base.outcomes import Verdict
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.graph import list_layers, to_typed
from bisect_trt.model.graph import Graph
from bisect_trt.model.load import load_model
from bisect_trt.model.outputs import mark_outputs
from bisect_trt.model.save import file_form, save_model
from bisect_trt.runners.tensorrt.build import build_engine, make_logger, node_types, parse
from bisect_trt.runners.tensorrt.readback import dishonoured_after_parsing, producers_of
from bisect_trt.runners.tensorrt.records import Built, EngineRequest, Profile, import_tensorrt
from bisect_trt.runners.tensorrt.runner import TensorRTRunner, profile_of
from fixtures.encoders import encoder_decomposed
from fixtures.fixture import Fixture
from fixtures.models import ALL, healthy
from tests import models
from tests.fuzz.zoo import ZOO, Entry, model_of

TRT = import_tensorrt("tensorrt_rtx")
TYPE = {Precision.FP16: "HALF", Precision.BF16: "BF16", Precision.FP32: "FLOAT"}


def build(model: onnx.ModelProto, plan: PrecisionPlan, profile: Profile) -> Built:
    typed = to_typed(model, plan)
    producers, content = producers_of(Graph(model), typed), typed.SerializeToString()
    return build_engine(
        TRT, EngineRequest(content, profile, plan.base is Precision.TF32, producers=producers)
    )


def plans(model: onnx.ModelProto) -> list[PrecisionPlan]:
    """BF16 without transposed convolutions: TensorRT for RTX 1.6 cannot infer their type and fails
    to build.
    """
    layers = list_layers(model)
    transposed = [layer.name for layer in layers if layer.op == "ConvTranspose"]
    mixed = [layer.name for layer in layers[::3]]
    return [
        PrecisionPlan("fp32"),
        PrecisionPlan("fp16"),
        PrecisionPlan("bf16", transposed),
        PrecisionPlan("fp16", mixed),
    ]


def check(model: onnx.ModelProto, inputs: dict[str, Any]) -> None:
    profile = profile_of(model, [Sample("s", inputs)], ())
    for plan in plans(model):
        built = build(model, plan, profile)
        assert len(built.engine) > 1000
        layers = [layer for layer in list_layers(model) if plan.base in layer.precisions]
        assert dishonoured_after_parsing(layers, plan, built.types) == []
        seen = [layer for layer in layers if layer.name in built.types]
        # Parsers fold what is constant and turn a few nodes into nothing; the rest must have been
        # looked at.
        assert len(seen) >= 0.9 * len(layers)
        for layer in seen:
            floats = [t for t in built.types[layer.name] if t in TYPE.values()]
            assert floats and set(floats) == {TYPE[plan.precision_of(layer.name)]}, layer.name


@pytest.mark.parametrize("make", ALL, ids=lambda f: f.__name__)
def test_fixtures_parse_with_the_plan_s_types_and_build(make: Callable[[], Fixture]) -> None:
    fixture = make()
    check(fixture.model, fixture.inputs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [models.DETECTOR, models.RECOGNISER, models.CLASSIFIER], ids=lambda p: p.stem
)
def test_ocr_models(path: Any) -> None:
    """The classifier's dimensions are all called `?`: taken as one they would contradict each
    other.
    """
    if not path.exists():
        pytest.skip("`make demo` fetches the OCR models")
    check(
        onnx.load(path),
        {
            "x": models.page()
            if path == models.DETECTOR
            else models.line(320 if path == models.RECOGNISER else 192)
        },
    )


ENTRIES = [entry for entry in ZOO if entry.op in ("Pow", "ReduceL2", "Shrink", "Dropout", "Max")]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.op)
def test_what_the_parser_computes_in_fp32_has_the_plan_s_type(entry: Entry) -> None:
    """It casts there and back by itself, or makes no layer: `verify` took the plan for broken."""
    graph, plan = Graph(model_of(entry, entry.until)[0]), PrecisionPlan("fp16")
    typed = to_typed(graph, plan)
    request = EngineRequest(typed.SerializeToString(), {}, tf32=False)
    logger = make_logger(TRT)
    builder = TRT.Builder(logger)
    network = parse(TRT, builder, logger, request)
    types = node_types(TRT, network, producers_of(graph, typed))
    assert dishonoured_after_parsing(graph.layers_at(plan.base), plan, types) == []
    assert types["make0"] == ("HALF",)


def test_layers_behind_a_choice_are_seen() -> None:
    """The parser names them with the If before them, and the last one gives the model's output."""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[2, 8] x) => (float[2, 8] y) <bool yes = {1}> {
            a = Tanh(x)
            c = If(yes) <
                then_branch = t () => (float[2, 8] d) { d = Relu(a) },
                else_branch = e () => (float[2, 8] f) { f = Identity(a) }
            >
            b = Mul(c, c)
            y = Exp(b)
        }
    """)
    for number, node in enumerate(model.graph.node):
        node.name = f"n{number}"
    layers = [layer for layer in list_layers(model) if Precision.FP16 in layer.precisions]
    profile = profile_of(model, [Sample("s", {"x": np.ones((2, 8), np.float32)})], ())
    for pinned in ([], ["n3"], ["n2"]):
        plan = PrecisionPlan("fp16", pinned)
        built = build(model, plan, profile)
        assert {"n0", "n2", "n3"} <= set(built.types)
        assert dishonoured_after_parsing(layers, plan, built.types) == []


def test_a_wrong_type_is_named() -> None:
    fixture = healthy()
    layers = list_layers(fixture.model)
    built = build(
        fixture.model,
        PrecisionPlan("fp16"),
        profile_of(fixture.model, [Sample("s", fixture.inputs)], ()),
    )
    plan = PrecisionPlan("fp16", [layers[0].name])
    found = dishonoured_after_parsing(layers, plan, built.types)
    assert [f.where for f in found] == [layers[0].name]
    assert "HALF" in found[0].message and "FLOAT" in found[0].message


def test_marks_build() -> None:
    fixture = encoder_decomposed()
    tensors = [t for layer in list_layers(fixture.model) for t in layer.outputs]
    profile = profile_of(fixture.model, [Sample("s", fixture.inputs)], ())
    for base in ("fp16", "bf16", "fp32"):
        marked = mark_outputs(to_typed(fixture.model, PrecisionPlan(base)), tensors)
        assert {o.name for o in marked.graph.output} >= set(tensors)
        build_engine(TRT, EngineRequest(marked.SerializeToString(), profile, False))


def test_what_cannot_be_parsed_is_a_failed_build() -> None:
    fixture = healthy()
    broken = onnx.ModelProto()
    broken.CopyFrom(fixture.model)
    broken.graph.node[0].op_type = "NoSuchOperator"
    with pytest.raises(RunnerFailedError, match="cannot parse") as caught:
        build_engine(TRT, EngineRequest(broken.SerializeToString(), {}, False))
    assert caught.value.verdict is Verdict.BUILD_FAILED and caught.value.log


def test_profile_from_samples_and_from_text() -> None:
    model = healthy().model
    name = model.graph.input[0].name
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    rank = len(model.graph.input[0].type.tensor_type.shape.dim)
    one, three = (
        Sample(f"s{n}", {name: np.zeros((n, *[2] * (rank - 1)), np.float32)}) for n in (1, 3)
    )
    tail = (2,) * (rank - 1)
    assert profile_of(model, [three, one], ()) == {name: ((1, *tail), (3, *tail), (3, *tail))}
    text = "/".join("x".join(map(str, (n, *tail))) for n in (1, 2, 8))
    assert profile_of(model, [one], [f"{name}:{text}"])[name][2] == (8, *tail)
    with pytest.raises(BadInputError, match="outside --profile"):
        profile_of(
            model, [Sample("big", {name: np.zeros((9, *tail), np.float32)})], [f"{name}:{text}"]
        )
    with pytest.raises(BadInputError, match="no input 'other'"):
        profile_of(model, [one], [f"other:{text}"])
    with pytest.raises(BadInputError, match="write INPUT:MIN/OPT/MAX"):
        profile_of(model, [one], [f"{name}:1x2"])


def test_without_a_gpu_the_runner_says_so() -> None:
    """On a machine with a GPU there is nothing to refuse."""
    fixture = healthy()
    try:
        runner = TensorRTRunner(fixture.model, [Sample("s", fixture.inputs)], "tensorrt_rtx")
    except RunnerUnavailableError as error:
        assert "GPU" in str(error) or "cuda-python" in str(error)
    else:
        runner.close()


def test_float64_constants_parse_however_the_model_is_stored(tmp_path: Path) -> None:
    """The parser reads none from a file; a model of transformers' RT-DETR has them."""
    table = np.linspace(0.0, 1.0, 160 * 64).reshape(160, 64)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "product"),
        helper.make_node("Cast", ["table"], ["small"], "cast", to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["a", "small"], ["y"], "second"),
    ]
    weights = [
        numpy_helper.from_array(np.ones((2048, 160), np.float32), "w"),
        numpy_helper.from_array(table, "table"),
    ]
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (("x", [1, 2048]), ("y", [1, 64]))
    ]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], weights)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(made, str(tmp_path / "m.onnx"))
    loaded = load_model(tmp_path / "m.onnx").proto
    limit = 1_300_000
    for plan in (PrecisionPlan("fp32"), PrecisionPlan("fp16")):
        typed = to_typed(loaded, plan)
        save_model(typed, tmp_path / "typed.onnx", limit_bytes=limit)
        assert (tmp_path / "typed.onnx.data").exists()
        with file_form(typed, whole_bytes=0, limit_bytes=limit) as form:
            for source in (form, str(tmp_path / "typed.onnx")):
                logger = TRT.Logger(TRT.Logger.ERROR)
                builder = TRT.Builder(logger)
                network = builder.create_network(
                    1 << int(TRT.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
                )
                assert TRT.OnnxParser(network, logger).parse_from_file(source), source
