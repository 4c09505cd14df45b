"""What a run needs is told before anything is read, and a run keeps to it."""

from __future__ import annotations

import base64
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from bisect_trt.base.limits import SessionHabits, habits
from bisect_trt.base.sample import Sample
from bisect_trt.cli import main
from bisect_trt.inputs.arrays import headers_of
from bisect_trt.model.graph import Graph
from bisect_trt.model.inputs import input_specs
from bisect_trt.model.shapes import live_bytes
from bisect_trt.runners import concurrency
from bisect_trt.runners.concurrency import ROOM_BYTES
from bisect_trt.runners.switched_session import room_beside
from bisect_trt.settings import Settings
from bisect_trt.steps import memory_need
from fixtures.subgraphs import branch

ROOT = Path(__file__).resolve().parents[3]
KB = 1024


def chain(rows: int | str = 4) -> onnx.ModelProto:
    """x (4 kB) -> a product of 8 kB -> in its place -> a transposition of 8 kB -> 4 bytes a row."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "product"),
        helper.make_node("Relu", ["a"], ["b"], "relu"),
        helper.make_node("Transpose", ["b"], ["c"], "transposed"),
        helper.make_node("ReduceMean", ["c"], ["y"], "mean", axes=[0], keepdims=0),
    ]
    values = [("x", [rows, 256]), ("y", [rows])]
    made = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in values]
    weight = numpy_helper.from_array(np.ones((256, 512), np.float32), "w")
    graph = helper.make_graph(nodes, "g", made[:1], made[1:], [weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("rows", [4, "rows"])
def test_activations_are_those_that_live_together(rows: int | str) -> None:
    graph = Graph(chain(rows))
    assert live_bytes(graph, {"x": (4, 256)}) == (4 + 8 + 8) * KB


def test_activations_follow_the_inputs() -> None:
    graph = Graph(chain("rows"))
    assert live_bytes(graph, {"x": (400, 256)}) == 100 * live_bytes(graph, {"x": (4, 256)})


def test_headers_are_read_without_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 5), np.float32), n=np.zeros(2, np.int64))
    np.savez_compressed(tmp_path / "b.npz", x=np.zeros((3, 5), np.float32))
    np.save(tmp_path / "c.npy", np.zeros((7, 2), np.float32))
    monkeypatch.delattr(np.lib.format, "read_array")
    monkeypatch.delattr(np, "load")
    assert headers_of(tmp_path / "a.npz", ["x", "n"]) == {"x": (3, 5), "n": (2,)}
    assert headers_of(tmp_path / "b.npz", ["x"]) == {"x": (3, 5)}
    assert headers_of(tmp_path / "c.npy", ["x"]) == {"x": (7, 2)}
    os.truncate(tmp_path / "c.npy", 130)  # what it promises is no longer there
    assert headers_of(tmp_path / "c.npy", ["x"]) == {}
    (tmp_path / "d.npy").write_bytes(b"nothing")
    assert headers_of(tmp_path / "d.npy", ["x"]) == {}


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ([], "use a machine with more memory"),
        (["--workers", "3"], "use --workers 1"),
        (["--workers", "1000"], "use --workers 1"),  # of which three are hired
    ],
)
def test_what_cannot_fit_is_refused_before_it_is_read(
    options: list[str], hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnx.save(chain(), tmp_path / "m.onnx")
    np.savez(tmp_path / "x.npz", x=np.ones((4, 256), np.float32))
    monkeypatch.setattr(memory_need, "room_bytes", lambda _: 1_000_000)
    monkeypatch.setattr(memory_need, "thread_count", lambda: 3)
    asked = [str(tmp_path / "m.onnx"), "--input", str(tmp_path / "x.npz"), *options]
    for more in (["--out", str(tmp_path / "out")], ["--dry-run"]):
        result = CliRunner().invoke(main, ["run", *asked, *more])
        assert result.exit_code == 4
        assert hint in result.output
        assert "about 20" in result.output or "about 8" in result.output
        assert len(result.output.strip().splitlines()) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx", "x.npz"]


def test_a_large_input_is_what_can_be_made_smaller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnx.save(chain("rows"), tmp_path / "m.onnx")
    np.savez(tmp_path / "x.npz", x=np.ones((4000, 256), np.float32))
    monkeypatch.setattr(memory_need, "room_bytes", lambda _: 1_000_000)
    asked = ["run", str(tmp_path / "m.onnx"), "--input", str(tmp_path / "x.npz")]
    assert "give a smaller --input" in CliRunner().invoke(main, asked).output


def loaded() -> Iterator[dict[str, NDArray[np.float32]]]:
    yield {"x": np.ones((9000, 256), np.float32)}


@pytest.mark.parametrize("kind", ["folder", "json", "loader"])
def test_the_largest_input_counts_in_whatever_it_lies(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compressed file beside a larger one is larger inside; of JSON and loaders nothing tells
    the shapes before they are read.
    """
    onnx.save(chain("rows"), tmp_path / "m.onnx")
    (tmp_path / "inputs").mkdir()
    if kind == "folder":
        random = np.random.default_rng(0).random((400, 256), np.float32)
        np.savez(tmp_path / "inputs" / "a.npz", x=random)
        np.savez_compressed(tmp_path / "inputs" / "b.npz", **next(loaded()))
        sizes = [(tmp_path / "inputs" / n).stat().st_size for n in ("a.npz", "b.npz")]
        assert sizes[0] > sizes[1]
    stream = io.BytesIO()
    np.save(stream, next(loaded())["x"])
    feeds = [{"x": {"array": base64.b64encode(stream.getvalue()).decode()}}]
    (tmp_path / "x.json").write_text(json.dumps(feeds))
    given = {"folder": "inputs", "json": "x.json", "loader": f"{__name__}:loaded"}[kind]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(memory_need, "room_bytes", lambda _: 230_000_000)
    result = CliRunner().invoke(main, ["run", "m.onnx", "--input", given, "--out", "out"])
    assert result.exit_code == 4 and "give a smaller --input" in result.output
    assert "46.1 MB of activations" in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("weights", "activations", "copies", "kept"),
    [
        (20e6, 0, 4.5, 0),  # two sessions hold them beside each other
        (113e6, 0, 3, 0),  # in turn
        (1e9, 0, 2, 0),  # none beside the emulator
        (113e6, 5e5, 3, 20e6),
        (113e6, 40e6, 3, room_beside(int(113e6)) + (128 << 20)),  # what is kept has a limit,
        (113e6, 1e9, 3, 0),  # and nothing is where activations are large
    ],
)
def test_the_need_follows_what_is_held(
    weights: float,
    activations: float,
    copies: float,
    kept: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_need, "thread_count", lambda: 2)
    alone = memory_need.Need(0, 0, 0, 0).bytes
    found = memory_need.Need(int(weights), int(activations), 0, 0).bytes
    assert found == int(alone + copies * weights + 3.75 * activations + kept)
    assert memory_need.Need(int(weights), int(activations), 2, 0).bytes > found + 2 * alone
    # Thousands of nodes weigh, and less each where their sessions take turns.
    assert memory_need.Need(0, 0, 0, 4999).bytes > alone + 0.3e9
    assert memory_need.Need(0, 0, 0, 20_000).bytes > alone + 0.7e9
    assert memory_need.Need(0, 0, 0, 20_000).bytes < alone + 0.9e9
    assert memory_need.Need(0, 0, 0, 20_000, shares=True).bytes < alone + 0.5e9
    monkeypatch.setattr(memory_need, "thread_count", lambda: 64)
    # Of many cores each makes an inference, as far as they have room.
    more = max(0, min(62 * int(activations), ROOM_BYTES - 2 * int(activations)))
    assert memory_need.Need(int(weights), int(activations), 0, 0).bytes == found + more
    # Each session has a queue for each of them; those of thousands of nodes are shared.
    of_few, of_many = (memory_need.Need(0, 0, 0, n, shares=True).bytes for n in (400, 4000))
    assert of_few - alone > 62 * 400 * 20_000 > of_many - of_few


PEAK = """
import atexit, sys
from bisect_trt.runners import concurrency
from bisect_trt.steps import memory_need
for module in (concurrency, memory_need):
    assert module.LARGE and module.MANY
    module.LARGE = LARGE << 20
    module.MANY = 8 << 20
def tell():  # not getrusage: its peak is also that of whoever started this process
    lines = open("/proc/self/status").read().splitlines()
    print("PEAK", *(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")))
atexit.register(tell)
from bisect_trt.cli import main
main(sys.argv[1:])
"""


def peak(folder: Path, *arguments: str, large: int = 8) -> int:
    """The most that a process held, bytes; models of ``large`` MB of weights are large ones."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", f"LARGE = {large}{PEAK}", *arguments]
    said = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    return int(said.stdout.split("PEAK")[-1])


def products(path: Path, size: int) -> int:
    """Six products of square matrices; the bytes of their weights."""
    random = np.random.default_rng(0)
    nodes, weights, last = [], [], "x"
    for index in range(6):
        weight = random.random((size, size), np.float32) / np.float32(size)
        weights.append(numpy_helper.from_array(weight, f"w{index}"))
        made = f"m{index}"
        nodes.append(helper.make_node("MatMul", [last, f"w{index}"], [made], made))
        last = made
    shape = [1, size]
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n in ("x", last)]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], weights)
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)
    np.savez(path.with_suffix(".npz"), x=random.random(shape, np.float32))
    return 6 * size * size * 4


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is told by Linux")
def test_weights_are_held_once_and_once_rounded(tmp_path: Path) -> None:
    """Beside what a tiny model takes: next to nothing of them to inspect, two and a half times to
    compare (every baseline, the layers, another emulator), whether the model counts as large or
    as one whose sessions take turns.
    """
    seen, asked = {}, ["--requirement", "max_abs<=9"]
    for name, size in (("tiny", 4), ("large", 1600)):
        weights = products(tmp_path / f"{name}.onnx", size)
        given = ["--input", f"{name}.npz", "--out", name, *asked]
        seen[name] = peak(tmp_path, "compare", f"{name}.onnx", *given)
    given = ["--input", "large.npz", "--out", "in-turn", *asked]
    seen["in turn"] = peak(tmp_path, "compare", "large.onnx", *given, large=1 << 20)
    assert seen["large"] - seen["tiny"] <= 2.5 * weights + 30e6
    assert seen["in turn"] - seen["tiny"] <= 2.5 * weights + 30e6
    assert peak(tmp_path, "inspect", "large.onnx") - seen["tiny"] <= 0.5 * weights


def test_what_a_large_model_needs_is_not_asked_of_the_next_one() -> None:
    """A gate has many models in one process; the small ones keep their speed."""
    memory_need.check_need(memory_need.Need(0, memory_need.LARGE, 0, 1), "large")
    assert habits().frees_activations
    memory_need.check_need(memory_need.Need(0, 1000, 0, 1), "small")
    assert habits() == SessionHabits()


def test_small_tensors_are_taken_singly_and_those_of_the_next_model_not() -> None:
    """By the shapes that the inputs have: those of the model may be open."""
    graph, settings = Graph(chain("rows")), Settings("m.onnx", ("x.npz",))
    for rows, singly in ((4, True), (400, False), (4, True)):
        samples = [Sample("s", {"x": np.zeros((rows, 256), np.float32)})]
        memory_need.check_need(memory_need.need_of_samples(graph, settings, samples), "model")
        assert habits().takes_singly is singly
    memory_need.check_need(memory_need.Need(0, 1000, 0, 1), "of unknown shapes")
    assert habits() == SessionHabits()


@pytest.mark.parametrize(
    ("rows", "room_mb", "threads"),
    [
        (4, 128, 1),  # tiny tensors
        (200, 128, 1),
        (200, 8, 2),  # eight have room, of 1 MB each
        (200, 11, 2),  # eleven have
        (200, 1, 0),  # one has
        (400, 128, 0),  # 0.3 ms a node are worth waking threads for
    ],
)
def test_calls_side_by_side_share_the_threads_unless_their_nodes_are_long(
    monkeypatch: pytest.MonkeyPatch, rows: int, room_mb: int, threads: int
) -> None:
    for module in (memory_need, concurrency):
        monkeypatch.setattr(module, "thread_count", lambda: 16)
    monkeypatch.setattr(concurrency, "ROOM_BYTES", room_mb << 20)
    graph, settings = Graph(chain("rows")), Settings("m.onnx", ("x.npz",))
    samples = [Sample("s", {"x": np.zeros((rows, 256), np.float32)})]
    found = memory_need.need_of_samples(graph, settings, samples)
    assert found.threads == threads
    if threads:
        assert threads * concurrency.Headroom(graph).at_once(samples[0]) >= 16
        assert found.bytes < replace(found, threads=0).bytes
    memory_need.check_need(found, "model")
    assert habits().threads == threads


def test_calls_have_all_threads_where_little_is_known_of_them(tmp_path: Path) -> None:
    """Of unknown shapes, or on a GPU, which makes one call at a time."""
    np.savez(tmp_path / "x.npz", x=np.zeros((4, 256), np.float32))
    source, specs = str(tmp_path / "x.npz"), input_specs(chain("rows"))
    known = Settings("m.onnx", (source,))
    assert memory_need.need_of(Graph(chain("rows")), known, specs).threads == 1
    unknown = Settings("m.onnx", (str(tmp_path / "later.npz"),))
    assert memory_need.need_of(Graph(chain("rows")), unknown, specs).threads == 0
    on_gpu = replace(known, emulate_on="cuda")
    assert memory_need.need_of(Graph(chain("rows")), on_gpu, specs).threads == 0


def test_calls_have_all_threads_where_nodes_have_bodies() -> None:
    """What a body does is not counted."""
    fixture = branch()
    sample = Sample("s", fixture.inputs)
    found = memory_need.need_of_samples(Graph(fixture.model), Settings("m.onnx", ("x",)), [sample])
    assert found.threads == 0


def test_tiny_tensors_of_large_products_have_all_threads() -> None:
    """A batch of one through matrices of 256 MB: 0.7 ms each."""
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[8192, 8192])  # unread
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], "n")]
    value = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 8192]) for n in "xy"]
    graph = Graph(helper.make_model(helper.make_graph(nodes, "g", value[:1], value[1:], [weight])))
    sample = Sample("s", {"x": np.zeros((1, 8192), np.float32)})
    found = memory_need.need_of_samples(graph, Settings("m.onnx", ("x",)), [sample])
    assert found.small and found.threads == 0


def test_what_shapes_do_not_tell_is_said() -> None:
    """ "0 bytes of activations", and a run took five gigabytes: values decided the sizes."""
    text = """<ir_version: 8, opset_import: ["": 17]> g (float[1,1,4,4] x, int64[4] sizes)
        => (float[a,b,c,d] y) {
        empty = Constant<value = float[0] {}>()
        large = Resize<mode = "nearest">(x, empty, empty, sizes)
        more = Neg(large)
        y = Abs(more)
    }"""
    inputs = [{"x": np.zeros((1, 1, 4, 4), np.float32), "sizes": np.int64([1, 1, 8, 8])}]
    graph = Graph(onnx.parser.parse_model(text))
    told = memory_need.need_of(graph, Settings(graph.proto, inputs), input_specs(graph.proto))
    assert told.untold and "and more" in told.sentence
