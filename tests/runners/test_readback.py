"""What engines and builders say, read back: inspector formats of TensorRT 10 and 11, warnings, CPU
fall-backs, weak typing.
"""

from __future__ import annotations

import json
import sys
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import onnxruntime as ort
import pytest

from bisect_trt.base.errors import RunnerFailedError
from bisect_trt.base.outcomes import Verdict
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.runners.ort_engine import cpu_nodes
from bisect_trt.runners.tensorrt.build import apply_weak_types
from bisect_trt.runners.tensorrt.readback import (
    dishonoured_in_engine,
    engine_layers,
    warnings_as_findings,
)
from bisect_trt.runners.tensorrt.records import WeakTyping
from fixtures.models import healthy

TEN = {
    "Layers": [
        {
            "Name": "/a/Conv + /a/Relu",
            "LayerType": "CaskConvolution",
            "Inputs": [
                {"Name": "x", "Format/Datatype": "Channel major FP16 format where channel % 2 == 0"}
            ],
            "Outputs": [{"Name": "y", "Format/Datatype": "Row major linear FP32"}],
            "Metadata": "[ONNX Layer: /a/Conv]\u001e[ONNX Layer: /a/Relu]",
        },
        "bare name of a layer built without detail",
    ],
    "Bindings": ["x", "y"],
}
ELEVEN = {
    "Layers": [
        {
            "Name": "node[1]",
            "Inputs": [{"Name": "x", "Format": "Linear", "Datatype": "Half"}],
            "Outputs": [{"Name": "y", "Format": "Linear", "Datatype": "Half"}],
            "Metadata": "[ONNX Layer: /b/Pow]\u001f[ONNX Layer: /b/Sqrt]",
        }
    ],
    "I/O Tensors": [],
}


def test_inspector_of_ten() -> None:
    (layer,) = engine_layers(json.loads(json.dumps(TEN)))
    assert (
        layer.nodes == ("/a/Conv", "/a/Relu")
        and layer.inputs == ("HALF",)
        and layer.outputs == ("FLOAT",)
    )


def test_inspector_of_eleven() -> None:
    (layer,) = engine_layers(ELEVEN)
    assert layer.nodes == ("/b/Pow", "/b/Sqrt") and layer.inputs == layer.outputs == ("HALF",)


def test_a_pin_that_was_not_honoured_is_named() -> None:
    layers = engine_layers(ELEVEN)
    found = dishonoured_in_engine(PrecisionPlan("fp16", ["/b/Pow", "/b/Sqrt"]), layers)
    assert [f.where for f in found] == ["/b/Pow"] and "HALF" in found[0].message
    assert dishonoured_in_engine(PrecisionPlan("fp16", ["/b/Pow"]), layers) == [], (
        "a fused layer may hide its inner types"
    )
    assert (
        dishonoured_in_engine(PrecisionPlan("fp16", ["/a/Conv", "/a/Relu"]), engine_layers(TEN))
        == []
    )


def test_warnings_are_mapped_to_the_layer_they_name() -> None:
    messages = [
        ("WARNING", "Detected layernorm nodes in FP16."),
        ("WARNING", "Weights of /a/Conv: 3 values are out of range for FP16"),
        ("WARNING", "Using kFASTER_DYNAMIC_SHAPES"),
        ("ERROR", "something else broke"),
    ]
    found = warnings_as_findings(messages, ["/a/Conv", "/a/Conv_1", "Con"])
    assert [f.where for f in found] == ["", "/a/Conv", ""]
    assert "layernorm" in found[0].message and "broke" in found[2].message


def test_cpu_nodes_are_read_from_onnx_runtime_s_own_profile(tmp_path: Path) -> None:
    fixture = healthy()
    options = ort.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = str(tmp_path / "p")
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(
        fixture.model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    session.run(None, fixture.inputs)
    found = cpu_nodes(session)
    assert set(found) == {n.name for n in fixture.model.graph.node if n.op_type != "Constant"}
    assert not list(tmp_path.iterdir())


class _Type(Enum):
    FLOAT, HALF, INT32 = range(3)


class _LayerType(Enum):
    CONSTANT, SHAPE, CONVOLUTION = range(3)


class _Layer(SimpleNamespace):
    def get_output(self, index: int) -> Any:
        return self.outputs[index]

    @property
    def num_outputs(self) -> int:
        return len(self.outputs)

    def set_output_type(self, index: int, dtype: _Type) -> None:
        self.held[index] = dtype


def _layer(
    name: str, metadata: str = "", dtype: _Type = _Type.FLOAT, *, shape: bool = False
) -> _Layer:
    outputs = [SimpleNamespace(is_shape_tensor=shape, dtype=dtype)]
    return _Layer(
        name=name,
        metadata=metadata,
        type=_LayerType.CONVOLUTION,
        outputs=outputs,
        held={},
        precision=None,
    )


@pytest.fixture
def tensorrt_ten(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """TensorRT 10 is no library of this machine: the names that weak typing uses, and nothing
    else.
    """
    module = ModuleType("tensorrt")
    module.__version__ = "10.13"  # type: ignore[attr-defined]
    module.BuilderFlag = SimpleNamespace(FP16="FP16", OBEY_PRECISION_CONSTRAINTS="OBEY")  # type: ignore[attr-defined]
    module.LayerType, module.DataType = _LayerType, _Type  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    return module


def _applied(layers: list[_Layer], typing: WeakTyping) -> list[str]:
    flags: list[str] = []
    network = SimpleNamespace(num_layers=len(layers), get_layer=lambda i: layers[i])
    apply_weak_types(network, SimpleNamespace(set_flag=flags.append), typing)  # type: ignore[arg-type]
    return flags


@pytest.mark.usefixtures("tensorrt_ten")
def test_weak_typing_holds_pinned_float_layers_and_no_others() -> None:
    by_name, by_metadata, other = (
        _layer("/a/Conv"),
        _layer("fused", "[ONNX Layer: /a/Pow]"),
        _layer("/a/Relu"),
    )
    integer, shape = _layer("/a/Shape", dtype=_Type.INT32), _layer("/a/Size", shape=True)
    pinned = frozenset({"/a/Conv", "/a/Pow", "/a/Shape", "/a/Size"})
    assert _applied([by_name, by_metadata, other, integer, shape], WeakTyping("fp16", pinned)) == [
        "FP16",
        "OBEY",
    ]
    assert (
        by_name.precision is _Type.FLOAT
        and by_name.held == {0: _Type.FLOAT}
        and by_metadata.held == {0: _Type.FLOAT}
    )
    assert [x.precision for x in (other, integer, shape)] == [None] * 3


@pytest.mark.usefixtures("tensorrt_ten")
def test_weak_typing_refuses_what_it_cannot_do() -> None:
    with pytest.raises(RunnerFailedError, match="'/gone'") as caught:
        _applied([_layer("/a/Conv")], WeakTyping("fp16", frozenset({"/gone"})))
    assert caught.value.verdict is Verdict.BUILD_FAILED
    with pytest.raises(RunnerFailedError, match="no weak typing at bf16"):
        _applied([_layer("/a/Conv")], WeakTyping("bf16", frozenset()))
    assert _applied([_layer("/a/Conv")], WeakTyping("fp32", frozenset())) == []
