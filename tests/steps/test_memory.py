"""What a run needs is told before anything is read, and a run keeps to it."""

from __future__ import annotations

import base64
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from bisect_trt.base.sample import Sample
from bisect_trt.model.graph import Graph
from bisect_trt.model.shapes import live_bytes
from bisect_trt.settings import Settings
from bisect_trt.steps import memory_need
from tests.command import call
from tests.networks import parsed

ROOT = Path(__file__).resolve().parents[2]
KB = 1024


def chain(rows: int | str = 4) -> onnx.ModelProto:
    """x (4 kB) -> a product of 8 kB -> in its place -> a transposition of 8 kB -> 4 bytes a row."""
    body = """[product] a = MatMul(x, w) [relu] b = Relu(a) [transposed] c = Transpose(b)
        [mean] y = ReduceMean<axes = [0], keepdims = 0>(c)"""
    weight = np.ones((256, 512), np.float32)
    return parsed(body, f"float[{rows}, 256] x", f"float[{rows}] y", w=weight)


@pytest.mark.parametrize("rows", [4, "rows"])
def test_activations_are_those_that_live_together(rows: int | str) -> None:
    graph = Graph(chain(rows))
    assert live_bytes(graph, {"x": (4, 256)}) == (4 + 8 + 8) * KB


def test_activations_follow_the_inputs() -> None:
    graph = Graph(chain("rows"))
    assert live_bytes(graph, {"x": (400, 256)}) == 100 * live_bytes(graph, {"x": (4, 256)})


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
    monkeypatch.setattr(memory_need, "thread_count", lambda *_: 3)
    asked = [str(tmp_path / "m.onnx"), "--input", str(tmp_path / "x.npz"), *options]
    for more in (["--out", str(tmp_path / "out")], ["--dry-run"]):
        result = call("run", *asked, *more)
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
    monkeypatch.setattr(memory_need, "room_bytes", lambda _: 205_000_000)
    asked = ["run", str(tmp_path / "m.onnx"), "--input", str(tmp_path / "x.npz")]
    assert "give a smaller --input" in call(*asked).output


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
    result = call("run", "m.onnx", "--input", given, "--out", "out")
    assert result.exit_code == 4 and "give a smaller --input" in result.output
    assert "46.1 MB of activations" in result.output
    assert not (tmp_path / "out").exists()


def test_the_need_follows_what_is_held() -> None:
    alone = memory_need.Need(0, 0, 0, 0).bytes
    assert memory_need.Need(1000, 0, 0, 0).bytes == alone + 3 * 1000
    assert memory_need.Need(1000, 0, 0, 0, inside=1000).bytes == alone + 5 * 1000
    assert memory_need.Need(1000, 500, 2, 0).bytes == 3 * memory_need.Need(1000, 500, 0, 0).bytes
    assert alone + 1e9 < memory_need.Need(0, 0, 0, 20_000).bytes < 2e9
    assert memory_need.Need(int(2.8e9), 0, 0, 1000).bytes < 10e9
    small, large = (memory_need.Need(0, n, 0, 0).bytes - alone for n in (1000, 10**9))
    assert small > 40 * 1000 and large < 4.5e9  # what is kept has a limit


PEAK = """
import atexit, sys
def tell():  # not getrusage: its peak is also that of whoever started this process
    lines = open("/proc/self/status").read().splitlines()
    print("PEAK", *(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")))
atexit.register(tell)
from bisect_trt.base.limits import Limits
from bisect_trt.cli import main
main(sys.argv[1:], obj=Limits(large_bytes=8 << 20))
"""


def peak(folder: Path, *arguments: str) -> int:
    """The most that a process held, bytes; models of 8 MB of weights are large ones."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PEAK, *arguments]
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
    model = helper.make_model(graph, opset_imports=opset, ir_version=8)
    onnx.save_model(model, path, save_as_external_data=True, location=f"{path.stem}.data")
    np.savez(path.with_suffix(".npz"), x=random.random(shape, np.float32))
    return 6 * size * size * 4


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is told by Linux")
def test_weights_are_held_once_and_once_rounded(tmp_path: Path) -> None:
    """Beside what a tiny model takes: next to nothing of them to inspect, three times to compare
    (every baseline, the layers, another emulator).
    """
    seen, asked = {}, ["--requirement", "max_abs<=9"]
    for name, size in (("tiny", 4), ("large", 1600)):
        weights = products(tmp_path / f"{name}.onnx", size)
        given = ["--input", f"{name}.npz", "--out", name, *asked]
        seen[name] = peak(tmp_path, "compare", f"{name}.onnx", *given)
    assert seen["large"] - seen["tiny"] <= 3.0 * weights + 30e6
    assert peak(tmp_path, "inspect", "large.onnx") - seen["tiny"] <= 0.5 * weights


def test_what_shapes_do_not_tell_is_said() -> None:
    """ "0 bytes of activations", and a run took five gigabytes: values decided the sizes."""
    text = """<ir_version: 8, opset_import: ["": 17]> g (float[1,1,4,4] x, int64[4] sizes)
        => (float[a,b,c,d] y) {
        empty = Constant<value = float[0] {}>()
        large = Resize<mode = "nearest">(x, empty, empty, sizes)
        more = Neg(large)
        y = Abs(more)
    }"""
    inputs = {"x": np.zeros((1, 1, 4, 4), np.float32), "sizes": np.int64([1, 1, 8, 8])}
    graph = Graph(onnx.parser.parse_model(text))
    told = memory_need.need_of(graph, Settings(graph.proto, [inputs]), [Sample("s", inputs)])
    assert told.partial and "and more" in told.sentence
