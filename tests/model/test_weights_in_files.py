"""Large weights stay in the files that they came in, and say there what they said inside."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from bisect_trt.base.errors import BadInputError
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.base.sample import Sample
from bisect_trt.model import tensor_values
from bisect_trt.model.graph import Graph
from bisect_trt.model.load import load_model
from bisect_trt.model.outputs import mark_outputs
from bisect_trt.model.save import file_form, save_model, weights_size, write_model
from bisect_trt.model.tensor_values import array_of, place_of
from bisect_trt.model.typed import to_typed
from bisect_trt.runners.emulator import EmulatedRunner
from bisect_trt.runners.reference import Reference
from bisect_trt.runners.second_emulator import WholeModelRunner

SIZE = 160
"""A matrix of so many rows and columns is large enough to stay in its file."""

IN_BODY = 4 * SIZE * SIZE + 10_000
"""Bytes of the model without the weights that ONNX puts beside it: those of bodies stay inside."""

PINNED = PrecisionPlan(Precision.FP16, ["second"])


def info(name: str, shape: list[int]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def network() -> onnx.ModelProto:
    """Weights in every form: raw, as a list of floats, in a Constant node, in a body."""
    random = np.random.default_rng(0)
    raw, listed, node, body = random.standard_normal((4, SIZE, SIZE)).astype(np.float32) / 16
    inner = [helper.make_node("MatMul", ["b", "in_body"], ["e"], "inner")]
    then = helper.make_graph(
        inner, "then", [], [info("e", [2, SIZE])], [numpy_helper.from_array(body, "in_body")]
    )
    other = [helper.make_node("Identity", ["b"], ["f"], "same")]
    orelse = helper.make_graph(other, "else", [], [info("f", [2, SIZE])])
    nodes = [
        helper.make_node("Constant", [], ["in_node"], "node", value=numpy_helper.from_array(node)),
        helper.make_node("MatMul", ["x", "raw"], ["a"], "first"),
        helper.make_node("MatMul", ["a", "listed"], ["b"], "second"),
        helper.make_node("If", ["yes"], ["c"], "if", then_branch=then, else_branch=orelse),
        helper.make_node("MatMul", ["c", "in_node"], ["y"], "third"),
    ]
    weights = [
        numpy_helper.from_array(raw, "raw"),
        helper.make_tensor("listed", TensorProto.FLOAT, listed.shape, listed.ravel().tolist()),
        numpy_helper.from_array(np.asarray(True), "yes"),
    ]
    graph = helper.make_graph(nodes, "g", [info("x", [2, SIZE])], [info("y", [2, SIZE])], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


X = {"x": np.random.default_rng(1).standard_normal((2, SIZE)).astype(np.float32)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The network's file, its weights in a file beside it."""
    target = tmp_path / "m.onnx"
    onnx.save_model(
        network(),
        target,
        save_as_external_data=True,
        location="m.data",
        convert_attribute=True,
    )
    return target


def same(one: onnx.ModelProto, other: onnx.ModelProto) -> bool:
    """Whether two models give the same bits."""
    answers = [
        ort.InferenceSession(m.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, X)
        for m in (one, other)
    ]
    return all(np.array_equal(a, b) for a, b in zip(*answers, strict=True))


def test_values_stay_in_the_file_and_are_the_same(path: Path) -> None:
    model, whole = load_model(path).proto, onnx.load(path)
    assert len(model.SerializeToString()) < IN_BODY < 2 * SIZE * SIZE * 4
    assert weights_size(model) == weights_size(whole)
    constants, exact = Graph(model).constants, Graph(whole).constants
    assert list(constants) == list(exact)
    for name in exact:
        assert np.array_equal(constants[name], exact[name])
    assert not constants["raw"].flags.owndata
    tensor_values.let_go(constants["raw"])  # and is read again
    assert np.array_equal(constants["raw"], exact["raw"])


@pytest.mark.parametrize("plan", [PINNED, PrecisionPlan(Precision.TF32)])
def test_a_plan_is_written_as_from_memory(path: Path, plan: PrecisionPlan, tmp_path: Path) -> None:
    typed = to_typed(load_model(path).proto, plan)
    save_model(typed, tmp_path / "typed.onnx")
    written, expected = onnx.load(tmp_path / "typed.onnx"), to_typed(onnx.load(path), plan)
    assert len(typed.SerializeToString()) < 2 * IN_BODY
    assert [t.name for t in written.graph.initializer] == [
        t.name for t in expected.graph.initializer
    ]
    assert same(written, expected)
    assert {p.name for p in tmp_path.iterdir()} <= {"m.onnx", "m.data", "typed.onnx"}


def test_over_the_limit_the_values_go_beside(path: Path, tmp_path: Path) -> None:
    both = PrecisionPlan(Precision.FP16, ["first", "second"])
    save_model(to_typed(load_model(path).proto, both), tmp_path / "typed.onnx", limit_bytes=1000)
    assert (tmp_path / "typed.onnx").stat().st_size < 2 * IN_BODY
    assert same(onnx.load(tmp_path / "typed.onnx"), to_typed(onnx.load(path), both))


def test_every_emulator_gives_what_it_gives_from_memory(path: Path) -> None:
    sample = Sample("s", X)
    graphs = [Graph(load_model(path).proto), Graph(onnx.load(path))]
    for plan in (PINNED, PrecisionPlan(Precision.FP32), PrecisionPlan(Precision.TF32)):
        runners = [EmulatedRunner(graph) for graph in graphs]
        wholes = [
            WholeModelRunner(g, r.constants.owner) for g, r in zip(graphs, runners, strict=True)
        ]
        for pair in (runners, wholes, [WholeModelRunner(graphs[0]), wholes[1]]):
            one, other = (next(iter(r.outputs(plan, [sample])))["y"] for r in pair)
            assert np.array_equal(one, other)
        traces = [[v.accumulated for v in r.trace(sample, plan)] for r in runners]
        assert all(map(np.array_equal, *traces))


@pytest.mark.parametrize("large", [0, 1 << 40])
def test_the_reference_is_the_model_itself(path: Path, large: int) -> None:
    reference = Reference(Graph(load_model(path).proto), large_bytes=large)
    found = [reference.outputs(Sample("s", X))["y"]]
    reference.release()
    found.append(reference.outputs(Sample("s", X))["y"])
    assert np.array_equal(*found)
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert np.allclose(found[0], session.run(None, X)[0], rtol=1e-5, atol=1e-6)


def test_an_engine_s_parser_is_given_links_and_only_what_is_new(path: Path) -> None:
    model = load_model(path).proto
    for plan in (PINNED, PrecisionPlan(Precision.FP16)):
        typed = to_typed(model, plan)
        with file_form(typed, whole_bytes=0) as source:
            assert isinstance(source, str)
            folder = Path(source).parent
            links = [p for p in folder.iterdir() if p.is_symlink()]
            assert [os.path.realpath(p) for p in links] == [
                os.path.realpath(path.parent / "m.data")
            ] * len(links)
            written = sum(p.stat().st_size for p in folder.iterdir() if not p.is_symlink())
            assert written < SIZE * SIZE * 2 * 4 + 130_000  # halves of those that are rounded
            for link in links:  # TensorRT follows them, ONNX's own reader does not
                content = link.read_bytes()
                link.unlink()
                link.write_bytes(content)
            assert same(onnx.load(source), to_typed(onnx.load(path), plan))
        assert not folder.exists()


def test_marks_need_no_copy(path: Path) -> None:
    model = load_model(path).proto
    marked = mark_outputs(model, ["a"])
    assert [o.name for o in marked.graph.output] == ["y", "a"]
    assert len(marked.SerializeToString()) < IN_BODY


def test_a_link_to_a_model_has_the_weights_beside_the_model(path: Path, tmp_path: Path) -> None:
    """As in caches that keep files by their content: only the model's link was made."""
    link = tmp_path / "elsewhere" / "link.onnx"
    link.parent.mkdir()
    link.symlink_to(path)
    whole, linked = load_model(path).proto, load_model(link).proto
    for one, other in zip(whole.graph.initializer, linked.graph.initializer, strict=True):
        assert np.array_equal(array_of(one), array_of(other))


def test_what_lies_beside_a_link_comes_first(path: Path, tmp_path: Path) -> None:
    places = [p for t in load_model(path).proto.graph.initializer if (p := place_of(t))]
    apart = {Path(p.path) for p in places} - {path}
    link = tmp_path / "elsewhere" / "link.onnx"
    link.parent.mkdir()
    link.symlink_to(path)
    for file in apart:
        (link.parent / file.name).write_bytes(file.read_bytes())
    found = [p for t in load_model(link).proto.graph.initializer if (p := place_of(t))]
    assert {Path(p.path) for p in found} - {path} == {link.parent / file.name for file in apart}


def test_a_file_that_changes_is_told(path: Path) -> None:
    model = load_model(path).proto
    tensor = next(t for t in model.graph.initializer if t.name == "raw")
    place = place_of(tensor)
    assert place is not None
    os.utime(place.path, (1, 1))
    with pytest.raises(BadInputError, match="was changed while it was in use"):
        array_of(tensor)
    os.remove(place.path)
    with pytest.raises(BadInputError, match="cannot be read"):
        array_of(tensor)


def test_a_tensor_of_another_size_than_its_values_is_refused(tmp_path: Path) -> None:
    model = network()
    model.graph.initializer[0].dims[0] += 1
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(BadInputError, match=r"constant 'raw' holds 102400 bytes, .* needs 103040"):
        load_model(tmp_path / "m.onnx")


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(network().SerializeToString()[:-1000])
    with pytest.raises(BadInputError, match="not an ONNX file, or a truncated one"):
        load_model(tmp_path / "m.onnx")


def test_what_is_written_is_one_message_in_the_same_order(path: Path) -> None:
    stream = io.BytesIO()
    write_model(load_model(path).proto, stream)
    found, expected = onnx.load_from_string(stream.getvalue()), onnx.load(path)
    pairs = zip(found.graph.initializer, expected.graph.initializer, strict=True)
    for one, other in pairs:
        assert (one.name, list(one.dims)) == (other.name, list(other.dims))
        assert np.array_equal(numpy_helper.to_array(one), numpy_helper.to_array(other))
    assert found.graph.node[0].attribute[0].t.raw_data
    assert same(found, expected)


def test_a_model_and_its_weights_may_be_links_into_one_folder(tmp_path: Path) -> None:
    """As in a cache that keeps files by their content; a link of the weights alone is refused."""
    store, shown = tmp_path / "blobs", tmp_path / "snapshot"
    store.mkdir()
    shown.mkdir()
    onnx.save_model(network(), store / "m.onnx", save_as_external_data=True, location="m.data")
    (store / "m.onnx").rename(store / "0a1b")
    (store / "m.data").rename(store / "2c3d")
    (shown / "m.onnx").symlink_to(store / "0a1b")
    (shown / "m.data").symlink_to(store / "2c3d")
    constants = Graph(load_model(shown / "m.onnx").proto).constants
    assert np.array_equal(constants["raw"], Graph(network()).constants["raw"])
    (tmp_path / "2c3d").write_bytes((store / "2c3d").read_bytes())
    (shown / "m.data").unlink()
    (shown / "m.data").symlink_to(tmp_path / "2c3d")
    with pytest.raises(BadInputError, match=r"outside the model's folder \(m.data, a link to"):
        load_model(shown / "m.onnx")
