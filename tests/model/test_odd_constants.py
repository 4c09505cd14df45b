"""Constants in other files that few exporters write: sparse ones, and several values to a byte."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

from bisect_trt.base.atomic_files import written_whole
from bisect_trt.base.errors import BadInputError
from bisect_trt.cli import main
from bisect_trt.model.layers import node_names
from bisect_trt.model.load import load_model
from bisect_trt.model.save import save_model
from bisect_trt.model.tensor_values import Place, array_of, chunks_of, put_at, size_of

FLOAT = TensorProto.FLOAT


def apart(tensor: TensorProto, location: str, *, length: bool = True) -> bytes:
    """Take the values of ``tensor`` out of it."""
    values = tensor.raw_data
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    said = {"location": location, **({"length": str(len(values))} if length else {})}
    for key, value in said.items():
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value
    return values


def saved(path: Path, nodes: list[onnx.NodeProto], opset: int, *weights: TensorProto) -> Path:
    """A model from ``x`` to ``y``, sixteen values each."""
    info = [helper.make_tensor_value_info(name, FLOAT, [1, 16]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "g", info[:1], info[1:], weights)
    opsets = [helper.make_opsetid("", opset)]
    made = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    path.write_bytes(made.SerializeToString())
    return path


def sparse(folder: Path, location: str = "values.bin") -> Path:
    """A product with a sparse matrix whose values lie in a file."""
    values = numpy_helper.from_array(np.arange(1, 65, dtype=np.float32), "w")
    (folder / location).write_bytes(apart(values, location))
    indices = numpy_helper.from_array(np.arange(0, 64, dtype=np.int64) * 3, "indices")
    weight = helper.make_sparse_tensor(values, indices, [16, 16])
    node = helper.make_node("MatMul", ["x", "w"], ["y"], "product")
    path = saved(folder / "sparse.onnx", [node], 17)
    made = onnx.load(path)
    made.graph.sparse_initializer.append(weight)
    path.write_bytes(made.SerializeToString())
    return path


def test_a_sparse_constants_file_is_found_hashed_and_taken_along(tmp_path: Path) -> None:
    path = sparse(tmp_path)
    before = load_model(path)
    out = tmp_path / "elsewhere"
    out.mkdir()
    save_model(before.proto, out / "copy.onnx")
    x = np.arange(16, dtype=np.float32)[None]
    answers = [
        onnxruntime.InferenceSession(str(p)).run(None, {"x": x})[0]
        for p in (path, out / "copy.onnx")
    ]
    np.testing.assert_array_equal(*answers)
    (tmp_path / "values.bin").write_bytes(bytes(4 * 64))
    assert load_model(path).digest != before.digest


def test_a_sparse_constants_file_outside_the_folder_is_refused(tmp_path: Path) -> None:
    inside = tmp_path / "model"
    inside.mkdir()
    with pytest.raises(BadInputError, match="outside the model's folder"):
        load_model(sparse(inside, "../values.bin"))


def packed(folder: Path, missing: int = 0) -> Path:
    """A weight of INT4 in a file, without the length that ONNX does not ask for."""
    values = np.zeros(16 * 16 // 2 - missing, np.uint8).tobytes()
    weight = TensorProto(name="q", data_type=TensorProto.INT4, dims=[16, 16], raw_data=values)
    (folder / "q.bin").write_bytes(apart(weight, "q.bin", length=False))
    scale = numpy_helper.from_array(np.float32(0.5), "scale")
    nodes = [
        helper.make_node("DequantizeLinear", ["q", "scale"], ["w"], "dequantise"),
        helper.make_node("MatMul", ["x", "w"], ["y"], "product"),
    ]
    return saved(folder / "packed.onnx", nodes, 21, weight, scale)


def test_two_values_to_a_byte_need_half_the_bytes(tmp_path: Path) -> None:
    path = packed(tmp_path)
    onnxruntime.InferenceSession(str(path))
    assert load_model(path).proto.graph.initializer[0].name == "q"
    found = CliRunner().invoke(main, ["inspect", str(path)])
    assert found.exit_code == 0, found.output
    with pytest.raises(BadInputError, match="truncated"):
        load_model(packed(tmp_path, missing=1))


def test_nodes_of_one_name_are_numbered_in_turn() -> None:
    nodes = [helper.make_node("Relu", ["x"], [f"y{i}"], name) for i, name in enumerate("aaba")]
    nodes.append(helper.make_node("Relu", ["x"], ["y"], "a_2"))
    assert node_names(nodes) == ["a", "a_1", "b", "a_3", "a_2"]
    many = [helper.make_node("Relu", ["x"], [f"y{i}"], "same") for i in range(20_000)]
    assert node_names(many)[-1] == "same_19999" and len(set(node_names(many))) == 20_000


def test_what_a_killed_export_left_is_swept(tmp_path: Path) -> None:
    """Its folder bears the number of a process that is gone."""
    with written_whole(tmp_path / "m.onnx") as draft:
        name = draft.parent.name
        draft.write_bytes(b"")
    head, _, rest = name.rpartition("-")
    place, _, _pid = head.rpartition("-")
    dead = tmp_path / f"{place}-4194305-{rest}"
    dead.mkdir()
    (dead / "draft").write_bytes(b"half")
    save_model(load_model(packed(tmp_path)).proto, tmp_path / "n.onnx")
    assert not dead.exists()


@pytest.mark.parametrize("bits", [4, 2])
def test_what_is_put_into_a_file_has_as_many_bytes_as_it_needs(bits: int, tmp_path: Path) -> None:
    """The file said twice or four times as many, and nothing could read it."""
    if not hasattr(TensorProto, f"UINT{bits}"):
        pytest.skip("this onnx has no such type")
    values = [int(v) for v in np.random.default_rng(0).integers(0, 2**bits, 33)]
    tensor = helper.make_tensor("q", getattr(TensorProto, f"UINT{bits}"), [33], values)
    held = b"".join(chunks_of(tensor))
    assert size_of(tensor) == len(held) == -(-33 * bits // 8)
    (tmp_path / "q").write_bytes(held)
    before = numpy_helper.to_array(tensor)
    put_at(tensor, Place(str(tmp_path / "q"), 0, len(held)))
    assert not tensor.int32_data  # ONNX's checker refuses values in two places
    np.testing.assert_array_equal(array_of(tensor), before)


@pytest.mark.parametrize(
    ("elem_type", "field"),
    [(TensorProto.FLOAT, "float_data"), (TensorProto.INT64, "int64_data")],
)
def test_what_lies_in_a_file_is_nowhere_else(elem_type: int, field: str) -> None:
    tensor = helper.make_tensor("w", elem_type, [3], [1, 2, 3])
    assert getattr(tensor, field)
    put_at(tensor, Place("/somewhere", 0, size_of(tensor)))
    assert not getattr(tensor, field)


def test_a_model_in_memory_whose_values_are_in_a_file_is_refused(tmp_path: Path) -> None:
    made = onnx.load(packed(tmp_path), load_external_data=False)
    with pytest.raises(BadInputError, match=r"'q' are in another file.* give the path"):
        load_model(made)
