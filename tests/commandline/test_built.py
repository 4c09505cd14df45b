"""What `built` says of engines: shares by precision, times, what of a plan was not honoured.

The layers' JSON is written by hand, in the forms that TensorRT documents for 8, 10 and 11; or from
the network that TensorRT for RTX parses, with its names and types. An engine's own needs a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from click.testing import Result

from bisect_trt.base.errors import BadInputError
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.graph import list_layers, to_typed
from bisect_trt.model.layers import Layer
from bisect_trt.runners.tensorrt.build import make_logger, parse
from bisect_trt.runners.tensorrt.records import EngineRequest, import_tensorrt
from bisect_trt.steps.built import read_profile
from fixtures.encoders import encoder_decomposed
from tests.command import call

MODEL = encoder_decomposed().model
LAYERS = list_layers(MODEL)
PINNED = [layer.name for layer in LAYERS if layer.op == "Softmax"]
Type = Callable[[Layer], str]


def half_but(*names: str) -> Type:
    """TensorRT's type of a layer: FP32 for ``names``."""
    return lambda layer: "Float" if layer.name in names else "Half"


def entry(layer: Layer, kind: str, form: int = 10) -> dict[str, Any]:
    """The entry of one ONNX node, which is an engine layer of its own."""
    types = {"Format": "Linear", "Datatype": kind} if form == 11 else {"Format/Datatype": kind}
    if form == 8:
        types = {"Format/Datatype": f"Row major linear {'FP32' if kind == 'Float' else 'FP16'}"}
    its: dict[str, Any] = {
        "Name": layer.name,
        "Inputs": [{"Name": layer.inputs[0], **types}],
        "Outputs": [{"Name": layer.outputs[0], **types}],
    }
    return its if form == 8 else its | {"Metadata": f"[ONNX Layer: {layer.name}]"}


def parsed(plan: PrecisionPlan) -> dict[str, Any]:
    """The layers that TensorRT's parser makes of a typed model, as an inspector writes layers."""
    trt = import_tensorrt("tensorrt_rtx")
    logger = make_logger(trt)
    request = EngineRequest(to_typed(MODEL, plan).SerializeToString(), {}, tf32=False)
    network = parse(trt, trt.Builder(logger), logger, request)

    def described(tensor: Any) -> dict[str, str]:
        return {"Name": tensor.name, "Format/Datatype": tensor.dtype.name.capitalize()}

    layers = (network.get_layer(index) for index in range(network.num_layers))
    entries = [
        {
            "Name": layer.name,
            "Inputs": [described(layer.get_input(i)) for i in range(layer.num_inputs)],
            "Outputs": [described(layer.get_output(i)) for i in range(layer.num_outputs)],
            "Metadata": layer.metadata,
        }
        for layer in layers
    ]
    return {"Layers": entries}


class Case:
    """A folder with the model, a plan of it that keeps its Softmaxes, and an engine's JSON."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        onnx.save(MODEL, folder / "m.onnx")
        self.write("plan.json", {"base": "fp16", "pinned": PINNED})

    def write(self, name: str, content: Any) -> Path:
        path = self.folder / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    def engine(self, kind: Type, form: int = 10, more: tuple[Any, ...] = ()) -> Path:
        entries = [entry(layer, kind(layer), form) for layer in LAYERS]
        return self.write("layers.json", {"Layers": [*entries, *more], "Bindings": []})

    def against_plan(self, engine: Path, *more: object) -> Result:
        model, plan = self.folder / "m.onnx", self.folder / "plan.json"
        return call("built", engine, "--model", model, "--plan", plan, *more)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def test_the_parser_s_own_names_and_types_are_read(case: Case) -> None:
    plan = PrecisionPlan("fp16", PINNED)
    ended = case.against_plan(case.write("e.json", parsed(plan)), "--json")
    its = json.loads(ended.output)["plan"]
    assert ended.exit_code == 0, its
    assert its["seen"] + len(its["hidden"]) + len(its["absent"]) == len(LAYERS)
    assert its["seen"] > 0.8 * len(LAYERS) and its["found"] > 0.8
    ended = case.against_plan(case.write("e.json", parsed(PrecisionPlan("fp32"))), "--json")
    its = json.loads(ended.output)["plan"]
    assert ended.exit_code == 1 and its["found"] == 0.0
    assert len(its["not_honoured"]) > 0.8 * len(LAYERS)


def test_the_layers_of_a_real_engine(case: Case) -> None:
    """As TensorRT for RTX 1.6.1.120 listed them on an H200: a quarter of the layers in FP32."""
    real = Path(__file__).parent / "engine"
    model, plan = case.folder / "m.onnx", real / "plan.json"
    record = json.loads(
        call("built", real / "layers.json", "--model", model, "--plan", plan, "--json").output
    )
    assert record["exit_code"] == 0 and record["plan"]["not_honoured"] == []
    assert (record["plan"]["seen"], len(record["plan"]["hidden"])) == (62, 11)
    assert record["layers"] == {"FP16": 14, "FP32": 6, "several": 3}
    assert record["plan"]["found"] == record["plan"]["expected"] == pytest.approx(0.73, abs=0.005)
    # The engine's mover: transposed operands are part of the product's kernel.
    absent = [f"/encoder/layers.{i}/attention/Transpose" for i in range(2)]
    assert record["plan"]["absent"] == absent
    other = case.write("other.json", {"base": "fp16", "pinned": []})
    ended = call("built", real / "layers.json", "--model", model, "--plan", other, "--json")
    assert ended.exit_code == 1
    named = {row["layer"] for row in json.loads(ended.output)["plan"]["not_honoured"]}
    assert "/encoder/layers.0/attention/MatMul" in named


@pytest.mark.parametrize("form", [8, 10, 11])
def test_an_engine_that_honours_the_plan(case: Case, form: int) -> None:
    ended = case.against_plan(case.engine(half_but(*PINNED), form), "--json")
    record = json.loads(ended.output)
    assert ended.exit_code == record["exit_code"] == 0
    assert record["plan"]["seen"] == len(LAYERS) and record["plan"]["not_honoured"] == []
    assert record["layers"] == {"FP16": len(LAYERS) - 2, "FP32": 2}
    assert record["plan"]["expected"] == record["plan"]["found"] == 1 - 2 / len(LAYERS)


def test_an_engine_all_in_fp32_is_called_so(case: Case) -> None:
    ended = case.against_plan(case.engine(lambda _: "Float"))
    assert ended.exit_code == 1
    assert f"0 % of {len(LAYERS)} layers in FP16 where 97 % was expected" in ended.output
    assert "TF32 is not visible" in ended.output and "/embed/Add" in ended.output


def test_pins_that_run_reduced_are_named(case: Case) -> None:
    ended = case.against_plan(case.engine(half_but(PINNED[0])), "--json")
    (row,) = json.loads(ended.output)["plan"]["not_honoured"]
    assert ended.exit_code == 1 and row["layer"] == row["engine_layer"] == PINNED[1]
    assert (row["wanted"], row["found"]) == ("FP32", "FP16")


def test_a_layer_that_reads_one_type_and_gives_another_is_hidden(case: Case) -> None:
    layers = [entry(layer, half_but(*PINNED)(layer)) for layer in LAYERS]
    layers[0]["Inputs"][0]["Format/Datatype"] = "Float"
    ended = case.against_plan(case.write("e.json", {"Layers": layers}), "--json")
    its = json.loads(ended.output)["plan"]
    assert ended.exit_code == 0 and its["hidden"] == [LAYERS[0].name]
    assert its["seen"] == len(LAYERS) - 1 and its["expected"] == its["found"]
    layers[0]["Outputs"][0]["Format/Datatype"] = "BF16"
    ended = case.against_plan(case.write("e.json", {"Layers": layers}), "--json")
    (row,) = json.loads(ended.output)["plan"]["not_honoured"]
    assert ended.exit_code == 1 and (row["wanted"], row["found"]) == ("FP16", "several")


def test_types_inside_of_fused_layers_prove_nothing(case: Case) -> None:
    softmax, other = LAYERS[[x.op for x in LAYERS].index("Softmax")], LAYERS[0]
    mixed = entry(other, "Half") | {
        "Name": "fused",
        "Metadata": f"[ONNX Layer: {other.name}]\x1f[ONNX Layer: {softmax.name}]",
    }
    with_cast = entry(LAYERS[1], "Float")
    with_cast["Metadata"] += "\x1e[ONNX Layer: a Cast of the typed model]"
    region = entry(LAYERS[2], "Float") | {
        "Name": f"{{ForeignNode[{LAYERS[2].name}...{LAYERS[3].name}]}}",
        "Metadata": "",
    }
    others = [entry(x, half_but(*PINNED)(x)) for x in LAYERS[4:] if x is not softmax]
    engine = case.write("e.json", {"Layers": [mixed, with_cast, region, *others]})
    ended = case.against_plan(engine, "--json")
    its = json.loads(ended.output)["plan"]
    assert ended.exit_code == 0 and its["seen"] == len(others)
    assert set(its["hidden"]) == {softmax.name, *(x.name for x in LAYERS[:4])}


def test_a_layer_in_another_type_beside_the_right_one_is_no_breach(case: Case) -> None:
    both = entry(LAYERS[0], "Half")
    both["Inputs"] = [{"Name": "x", "Format/Datatype": "Float"}]
    others = [entry(x, half_but(*PINNED)(x)) for x in LAYERS[1:-1]]
    engine = case.write("e.json", {"Layers": [both, *others]})
    ended = case.against_plan(engine, "--json")
    record = json.loads(ended.output)
    assert ended.exit_code == 0 and record["layers"]["several"] == 1
    assert record["plan"]["absent"] == [LAYERS[-1].name]


def test_times_are_added_by_precision(case: Case) -> None:
    engine = case.engine(half_but(*PINNED))
    rows = [{"name": x.name, "averageMs": 2.0 if x.name in PINNED else 0.5} for x in LAYERS]
    profile = case.write("t.json", [{"count": 9}, *rows, {"name": "other", "averageMs": 1}])
    ended = call("built", engine, "--model", case.folder / "m.onnx", "--profile", profile, "--json")
    record = json.loads(ended.output)
    assert record["time_ms"] == {"FP16": 0.5 * (len(LAYERS) - 2), "FP32": 4.0}
    assert record["timed_elsewhere"] == ["other"]
    shown = call("built", engine, "--profile", profile).output
    assert PINNED[0] in shown.partition("Slowest layers")[2].splitlines()[2]


def test_integers_and_unknown_types_are_told_apart(case: Case) -> None:
    shape = entry(LAYERS[0], "Int64") | {"Name": "shape"}
    dynamic = entry(LAYERS[0], "N/A due to dynamic shapes") | {"Name": "dynamic"}
    engine = case.write("e.json", {"Layers": [shape, dynamic, entry(LAYERS[1], "BF16"), "bare"]})
    record = json.loads(call("built", engine, "--json").output)
    assert record["layers"] == {"other": 1, "unknown": 2, "BF16": 1}


REFUSED = {
    "plan": ({"base": "fp16", "pinned": []}, "a plan of bisect-trt; give it as --plan"),
    "profile": ([{"count": 1}], "give it as --profile"),
    "other": ({"format": 3}, "no 'Layers' in it"),
    "names": ({"Layers": ["a", "b"]}, "the names of its layers only; build with"),
    "empty": ({"Layers": []}, "it has no layers"),
    "broken": ("{", "broken JSON"),
    "strange": ({"Layers": [{"Name": "a", "Inputs": 3}]}, "not as TensorRT writes them"),
    "engine": ("ptrt\x00", "loading an engine can run code that is in it"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_engine_is_said_to_be_what_it_is(case: Case, name: str) -> None:
    content, words = REFUSED[name]
    ended = call("built", case.write("given", content))
    assert ended.exit_code == 2 and words in ended.stderr and ended.stderr.count("\n") == 1


def test_another_model_s_engine_is_refused(case: Case) -> None:
    stranger = entry(LAYERS[0], "Half") | {"Name": "conv", "Metadata": "[ONNX Layer: conv]"}
    ended = case.against_plan(case.write("e.json", {"Layers": [stranger]}))
    assert ended.exit_code == 2 and "none of its layers is a node of" in ended.stderr


def test_an_engine_whose_types_are_all_hidden_is_not_called_good(case: Case) -> None:
    whole = entry(LAYERS[0], "Half") | {
        "Name": "all",
        "Metadata": "\x1f".join(f"[ONNX Layer: {x.name}]" for x in LAYERS),
    }
    ended = case.against_plan(case.write("e.json", {"Layers": [whole]}))
    assert ended.exit_code == 2 and "nothing of it can be judged" in ended.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--load"], "leave --load out"),
        (["--run"], "leave --run out"),
        (["--plan", "plan.json"], "--plan needs --model"),
    ],
)
def test_options_that_do_not_go_together(case: Case, options: list[str], words: str) -> None:
    ended = call("built", case.engine(half_but()), *options)
    assert ended.exit_code == 2 and words in ended.stderr


def test_without_a_gpu_the_layers_json_is_asked_for(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    ended = call("built", case.write("my engine", "vtrt\x00"), "--load")
    assert ended.exit_code == 3
    assert "tensorrt_rtx --loadEngine='" in ended.stderr and "--exportLayerInfo" in ended.stderr


def test_a_model_is_no_engine(case: Case) -> None:
    ended = call("built", case.folder / "m.onnx", "--load")
    assert ended.exit_code == 2 and "a model, not an engine" in ended.stderr


@pytest.mark.parametrize(
    "rows",
    [
        "3",
        '[{"name": "a"}]',
        "[]",
        '[{"name":"a","averageMs":-1}]',
        f'[{{"name": "a", "averageMs": 1{"0" * 400}}}]',
    ],
)
def test_a_broken_profile_is_refused(case: Case, rows: str) -> None:
    with pytest.raises(BadInputError, match=r"t\.json: "):
        read_profile(case.write("t.json", rows))
