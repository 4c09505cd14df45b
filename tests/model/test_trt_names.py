"""TensorRT's names find the nodes that its parser made the layers from."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from bisect_trt.model.graph import Graph
from bisect_trt.model.trt_names import IN_A_BODY, Network, NetworkLayer, TrtNames, Wildcards
from bisect_trt.runners.tensorrt.network import parsed_network
from fixtures.fixture import Fixture
from fixtures.models import ALL, branch, residual


def chain(*names: str) -> onnx.ModelProto:
    """Relus one after the other, with these names; an empty one is left out."""
    tensors = ["x", *(f"t{i}" for i in range(1, len(names))), "y"]
    nodes = [
        helper.make_node("Relu", [tensors[i]], [tensors[i + 1]], name=name)
        for i, name in enumerate(names)
    ]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in ("x", "y"))
    graph = helper.make_graph(nodes, "chain", [x], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def parsed(model: onnx.ModelProto) -> TrtNames:
    network, said = parsed_network(model, "tensorrt_rtx")
    assert network is not None, said
    return TrtNames(Graph(model), network)


@pytest.mark.parametrize("make", ALL, ids=lambda f: f.__name__)
def test_every_layer_is_found_by_what_the_parser_calls_it(make: Callable[[], Fixture]) -> None:
    model = make().model
    names, layers = parsed(model), Graph(model).layers
    found = {node for name in names.names() for node in names.resolve(name).nodes}
    assert {layer.name for layer in layers} <= found
    for layer in layers:
        assert names.resolve(layer.name).nodes == (layer.name,)


@pytest.mark.parametrize("make", [chain, parsed], ids=["without TensorRT", "with its parser"])
def test_an_unnamed_node_has_its_output_s_name(make: Callable[..., object]) -> None:
    model = chain("a", "", "b")
    names = parsed(model) if make is parsed else TrtNames(Graph(model))
    assert names.resolve("node_of_t2").nodes == ("Relu_t2",)
    assert names.resolve("Relu_t2").nodes == ("Relu_t2",)


def test_the_parser_s_numbers_find_the_one_of_several_nodes_with_a_name() -> None:
    model = chain("a", "a", "b")
    names = parsed(model)
    found = [names.resolve(name).nodes for name in names.names()]
    assert found == [("a",), ("a_1",), ("b",)]
    without = TrtNames(Graph(model)).resolve("a")
    assert without.nodes == ("a", "a_1")
    assert without.said == "2 nodes have this name"


def test_names_of_fused_layers_are_taken_apart() -> None:
    names = TrtNames(Graph(chain("a", "b", "c", "d")))
    for name, nodes in {
        "a + b": ("a", "b"),
        "b || d": ("b", "d"),
        "PWN(PWN(a, b), d)": ("a", "b", "d"),
        "a + PWN(PWN(b), c)": ("a", "b", "c"),
        "{ForeignNode[a]}": ("a",),
        "[ONNX Layer: a]\x1e[ONNX Layer: c]": ("a", "c"),
    }.items():
        assert names.resolve(name).nodes == nodes
        assert names.resolve(name).said == ""


def test_a_region_holds_all_between_its_ends() -> None:
    found = TrtNames(Graph(chain("a", "b", "c", "d"))).resolve("{ForeignNode[b...d]}")
    assert found.nodes == ("b", "c", "d")
    assert "all nodes between them" in found.said


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nowhere", "no layer has this name"),
        ("", "no layer has this name"),
        ("(" * 5000, "no layer has this name"),
        ("{ForeignNode[" * 5000, "no layer has this name"),
        ("{ForeignNode[a...nowhere]}", "one end of it is 'nowhere'"),
        ("Reformatting CopyNode for Input Tensor 0 to a", "computes nothing"),
        ("unsqueeze_node_after_a", "computes nothing"),
        ("__myl_MulAdd_myl0_3", "names no node"),
        ("(Unnamed Layer* 1) [Shuffle]", "install tensorrt-rtx-cu13"),
    ],
)
def test_a_name_without_a_node_says_why(name: str, reason: str) -> None:
    found = TrtNames(Graph(chain("a", "b"))).resolve(name)
    assert found.nodes == ()
    assert reason in found.said


def test_a_part_that_is_no_node_is_said() -> None:
    found = TrtNames(Graph(chain("a", "b"))).resolve("a + nowhere")
    assert found.nodes == ("a",)
    assert found.said == "without its part 'nowhere': no layer has this name"


def test_numbers_of_another_version_are_refused() -> None:
    names = parsed(chain("a", "b"))
    assert names.resolve("(Unnamed Layer* 1) [Activation]").nodes == ("b",)
    assert "versions number differently" in names.resolve("(Unnamed Layer* 1) [Shuffle]").said
    assert "has no layer 7" in names.resolve("(Unnamed Layer* 7) [Shuffle]").said


def test_weights_are_no_layers() -> None:
    model = residual().model
    found = parsed(model).resolve(model.graph.initializer[0].name)
    assert found.nodes == ()
    assert "weights" in found.said


def test_a_name_in_a_body_is_the_node_around_it() -> None:
    for names in (parsed(branch().model), TrtNames(Graph(branch().model))):
        found = names.resolve("then_up")
        assert (found.nodes, found.said) == (("/head/If",), IN_A_BODY)


def test_a_node_of_several_layers_is_kept_whole() -> None:
    w = numpy_helper.from_array(np.ones((2, 2), np.float32), "w")
    b = numpy_helper.from_array(np.ones(2, np.float32), "b")
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, 2]) for n in ("x", "y"))
    node = helper.make_node("Gemm", ["x", "w", "b"], ["y"], name="fc")
    graph = helper.make_graph([node], "g", [x], [y], [w, b])
    opsets = [helper.make_opsetid("", 17)]
    found = parsed(helper.make_model(graph, opset_imports=opsets, ir_version=8)).resolve("fc")
    assert found.nodes == ("fc",)
    assert "layers of this node" in found.said


def test_a_layer_of_several_nodes_is_all_of_them() -> None:
    layer = NetworkLayer("fused", "CONVOLUTION", "[ONNX Layer: a]\x1f[ONNX Layer: b]", ("t2",))
    names = TrtNames(Graph(chain("a", "b", "c")), Network((layer,), "9"))
    assert names.resolve("fused").nodes == ("a", "b")


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*", ("/a/Conv", "/a/Relu", "/b/Conv")),
        ("/a/*", ("/a/Conv", "/a/Relu")),
        ("*/Conv", ("/a/Conv", "/b/Conv")),
        ("/a*Conv", ("/a/Conv",)),
        ("/a/Conv*Conv", ()),
        ("/*/*", ()),
        ("", ()),
        ("/a", ()),
        ("/a/Relu", ("/a/Relu",)),
    ],
)
def test_one_wildcard_is_matched_as_trtexec_does(pattern: str, found: tuple[str, ...]) -> None:
    wildcards = Wildcards(["/b/Conv", "/a/Conv", "/a/Relu"])
    assert tuple(sorted(wildcards.matches(pattern))) == found
