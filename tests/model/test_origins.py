"""Where layers come from, told from files that PyTorch's two exporters wrote."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import helper

from bisect_trt.model.graph import Graph
from bisect_trt.model.patterns import Origin, list_origins, origin_of

EXPORTED = Path(__file__).parent / "exported"
SOURCE = (EXPORTED / "net.py").read_text(encoding="utf-8").splitlines()


def line_of(code: str) -> int:
    return next(n for n, text in enumerate(SOURCE, start=1) if code in text)


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_pytorch_s_exporters_leave_file_line_and_module(exporter: str) -> None:
    graph = Graph(onnx.load(EXPORTED / f"{exporter}.onnx"))
    found = list_origins(graph)
    by_op = {(layer.op, found[layer.name].module): found[layer.name] for layer in graph.layers}
    for op, module, code in (
        ("LayerNormalization", "blocks.0.norm", "self.attn(self.norm(x))"),
        ("MatMul", "blocks.1.attn.qkv", "self.qkv(x).chunk"),
        ("Softmax", "blocks.1.attn", "torch.softmax("),
        ("Pow", "blocks.0", "self.attn(self.norm(x))"),
        ("Conv", "head", "return self.head(x)"),
    ):
        origin = by_op[(op, module)]
        # The innermost line of the user's own, not PyTorch's F.layer_norm or F.linear.
        assert origin.file.endswith("/net.py") and origin.line == line_of(code)
        if exporter == "dynamo":
            assert origin.code == SOURCE[origin.line - 1].strip()


def test_dynamo_names_the_module_s_class() -> None:
    found = list_origins(onnx.load(EXPORTED / "dynamo.onnx"))
    kinds = {(o.module, o.module_class) for o in found.values()}
    assert {("head", "Conv1d"), ("blocks.0.attn", "Attention"), ("blocks.1", "Block")} <= kinds


def test_nothing_said_stays_blank() -> None:
    node = helper.make_node("Relu", ["x"], ["y"], name="p2o.Relu.0")
    assert origin_of(node) == Origin()
    assert origin_of(helper.make_node("Relu", ["x"], ["y"], name="/head/Relu")).module == "head"


def with_said(key: str, value: str) -> onnx.NodeProto:
    node = helper.make_node("Relu", ["x"], ["y"])
    node.metadata_props.add(key=key, value=value)
    return node


def test_a_trace_through_installed_code_alone_names_no_line() -> None:
    trace = '  File "/v/lib/python3.11/site-packages/torch/nn/f.py", line 3, in forward\n    x()'
    assert origin_of(with_said("pkg.torch.onnx.stack_trace", trace)) == Origin()


@pytest.mark.parametrize("text", ["__import__('os')", "[", "[" * 9999, "{}", "'text'", ""])
def test_what_cannot_be_read_counts_as_not_said(text: str) -> None:
    for key in ("stack_trace", "name_scopes", "class_hierarchy"):
        assert origin_of(with_said(f"pkg.torch.onnx.{key}", text)) == Origin()
