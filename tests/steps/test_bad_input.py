"""Bad input through the real command: the right exit code, one clear line, no half-written
folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from fixtures.__main__ import model_bytes
from fixtures.encoders import encoder_layernorm
from fixtures.models import healthy
from tests.command import call

F = TensorProto.FLOAT


class Desk:
    """A folder with a good model and a good input, and the command's arguments, for a case to
    spoil.
    """

    def __init__(self, folder: Path) -> None:
        fixture = healthy()
        self.folder, self.model, self.input, self.out = (
            folder,
            folder / "m.onnx",
            folder / "x.npz",
            folder / "out",
        )
        self.model.write_bytes(model_bytes(fixture))
        self.array = fixture.inputs["x"]
        self.save(x=self.array)
        self.extra: list[str] = []

    def save(self, **arrays: object) -> None:
        np.savez(self.input, **arrays)  # type: ignore[arg-type]

    def graph(
        self,
        nodes: list[onnx.NodeProto],
        inputs: dict[str, int],
        weights: Sequence[onnx.TensorProto] = (),
    ) -> None:
        infos = [helper.make_tensor_value_info(n, t, [4, 16]) for n, t in inputs.items()]
        out = helper.make_tensor_value_info("y", next(iter(inputs.values()), F), None)
        graph = helper.make_graph(nodes, "g", infos, [out], weights)
        self.model.write_bytes(
            helper.make_model(
                graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8
            ).SerializeToString()
        )

    def wire(self, *nodes: tuple[str, str, str]) -> None:
        self.graph(
            [helper.make_node(op, [source], [result]) for op, source, result in nodes], {"x": F}
        )

    def external(self, location: str, length: int, keep: bool) -> None:
        weight = numpy_helper.from_array(np.ones((16, 16), np.float32), "w")
        weight.ClearField("raw_data")
        weight.data_location = TensorProto.EXTERNAL
        for key, value in (("location", location), ("offset", "0"), ("length", "1024")):
            weight.external_data.add(key=key, value=value)
        if keep:
            (self.folder / location).write_bytes(b"\0" * length)
        self.graph([helper.make_node("MatMul", ["x", "w"], ["y"], "m")], {"x": F}, [weight])


def _integers(desk: Desk) -> None:
    desk.graph([helper.make_node("Abs", ["x"], ["y"])], {"x": TensorProto.INT64})
    desk.save(x=np.ones((4, 16), np.int64))


def _unwritable(desk: Desk) -> None:
    (desk.folder / "file").write_text("not a folder")
    desk.out = desk.folder / "file" / "out"


def _foreign_cache(desk: Desk) -> None:
    desk.out.mkdir()
    (desk.out / "cache.sqlite").write_text(
        "this is not a database, but it is long enough to be read as one" * 50
    )


def _nan(desk: Desk, value: float) -> None:
    spoiled = desk.array.copy()
    spoiled[1, 2] = value
    desk.save(x=spoiled)


def _metric(desk: Desk) -> None:
    (desk.folder / "broken_metric.py").write_text("def f(a, b):\n    raise KeyError('boom')\n")
    desk.extra = ["--metric", "broken_metric:f", "--requirement", "f<=1"]


def _with(*options: str) -> Callable[[Desk], object]:
    return lambda desk: desk.extra.extend(options)


CASES: dict[str, tuple[Callable[[Desk], object], str]] = {
    "model missing": (lambda d: d.model.unlink(), "no such file"),
    "model is a folder": (lambda d: (d.model.unlink(), d.model.mkdir()), "a folder"),
    "model is empty": (lambda d: d.model.write_bytes(b""), "graph is empty"),
    "model truncated": (lambda d: d.model.write_bytes(d.model.read_bytes()[:1000]), "m.onnx"),
    "model is text": (
        lambda d: d.model.write_text("hello, this is not a protobuf"),
        "not an ONNX file",
    ),
    "graph without nodes": (lambda d: d.graph([], {"x": F}), "graph is empty"),
    "no float layers": (_integers, "no layer"),
    "unknown operator": (
        lambda d: d.wire(("Nonsense", "x", "a"), ("Relu", "x", "y")),
        "ONNX Runtime cannot load",
    ),
    "cycle": (
        lambda d: d.wire(("Relu", "b", "a"), ("Relu", "a", "b"), ("Relu", "b", "y")),
        "is computed from itself",
    ),
    "external data missing": (
        lambda d: d.external("w.bin", 0, False),
        "external data of 'w' is missing",
    ),
    "external data outside": (
        lambda d: d.external("../w.bin", 1024, False),
        "outside the model's folder",
    ),
    "external data absolute": (
        lambda d: d.external("/etc/passwd", 1024, False),
        "outside the model's folder",
    ),
    "external data truncated": (lambda d: d.external("w.bin", 100, True), "truncated"),
    "input missing": (lambda d: d.input.unlink(), "no such file"),
    "input truncated": (
        lambda d: d.input.write_bytes(d.input.read_bytes()[:200]),
        "not a readable .npz",
    ),
    "input is text": (lambda d: d.input.write_text("1 2 3"), "not a readable .npz"),
    "input is pickled": (lambda d: d.save(x=np.array([{"a": 1}], dtype=object)), "Python objects"),
    "input is a single array": (lambda d: np.save(d.input.open("wb"), d.array), "a single array"),
    "input folder is empty": (lambda d: (d.input.unlink(), d.input.mkdir()), "holds no .npz"),
    "wrong input name": (lambda d: d.save(image=d.array), "input 'x' is missing"),
    "extra input": (lambda d: d.save(x=d.array, z=d.array), "'z' is no input of the model"),
    "wrong dtype": (lambda d: d.save(x=d.array.astype(np.float64)), "float64"),
    "wrong rank": (lambda d: d.save(x=d.array[None]), "3 dimensions"),
    "wrong size": (lambda d: d.save(x=d.array[:, :8]), "size 8 on axis 1"),
    "NaN": (lambda d: _nan(d, np.nan), "NaN or infinite values, the first at (1, 2)"),
    "infinity": (lambda d: _nan(d, np.inf), "NaN or infinite"),
    "unknown requirement": (_with("--requirement", "speed<=1"), "unknown metric 'speed'"),
    "malformed requirement": (_with("--requirement", "max_abs is 1"), "not understood"),
    "wrong sign": (
        _with("--requirement", "max_abs<1e-2"),
        "written with <= or >=: --requirement 'max_abs<=1e-2'",
    ),
    "equals": (_with("--requirement", "y:cosine=0.9"), "--requirement 'y:cosine>=0.9'"),
    "bound that the shell took": (
        _with("--requirement", "snr_db@mean"),
        "writes to a file such as '=40': --requirement 'snr_db@mean>=40'",
    ),
    "upper bound that the shell took": (
        _with("--requirement", "max_abs"),
        "--requirement 'max_abs<=1e-2'",
    ),
    "misspelt metric": (_with("--requirement", "cosin>=0.9"), "did you mean cosine?"),
    "tolerance as a metric": (_with("--requirement", "atol<=1e-3"), "such as atol=0.001"),
    "requirement on no output": (_with("--requirement", "logits:max_abs<=1"), "no output 'logits'"),
    "golden missing": (
        lambda d: d.extra.extend(["--golden", str(d.folder / "no.npz")]),
        "no such file",
    ),
    "golden of other outputs": (
        lambda d: d.extra.extend(["--golden", str(d.input)]),
        "no output of the model",
    ),
    "metric not importable": (_with("--metric", "no_such_module:f"), "--metric"),
    "metric that raises": (_metric, "KeyError"),
    "folder not writable": (_unwritable, "cannot be written"),
    "foreign cache": (_foreign_cache, "not a usable cache"),
    "runner not here": (_with("--runner", "tensorrt"), "tensorrt"),
    "unknown precision": (_with("--precision", "int8"), "int8"),
    "precision in capitals": (_with("--precision", "FP16"), "did you mean fp16?"),
    "reference as precision": (_with("--precision", "fp32"), "fp32 is the reference"),
    "unknown runner": (_with("--runner", "abacus"), "abacus"),
    "workers not positive": (_with("--workers", "0"), "workers"),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil, words = CASES[name]
    monkeypatch.chdir(tmp_path)
    desk = Desk(tmp_path)
    spoil(desk)
    before = sorted(os.listdir(desk.out)) if desk.out.is_dir() else None
    where = ("--out", desk.out, "--quiet")
    result = call("run", desk.model, "--input", desk.input, *where, *desk.extra)
    assert result.exit_code == (3 if name == "runner not here" else 2), result.output
    assert isinstance(result.exception, SystemExit)
    assert words in result.output and "Traceback" not in result.output
    complaint = [
        line
        for line in result.output.splitlines()
        if line and not line.startswith(("Usage:", "Try "))
    ]
    assert len(complaint) == 1, result.output
    after = sorted(os.listdir(desk.out)) if desk.out.is_dir() else None
    assert after == before or after == ["cache.sqlite"], "nothing half-written is left"


def test_symbolic_dimensions_must_agree(tmp_path: Path) -> None:
    info = [helper.make_tensor_value_info(n, F, ["n"]) for n in "ab"]
    graph = helper.make_graph(
        [helper.make_node("Add", ["a", "b"], ["y"])],
        "g",
        info,
        [helper.make_tensor_value_info("y", F, ["n"])],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8),
        tmp_path / "m.onnx",
    )
    np.savez(tmp_path / "x.npz", a=np.ones(3, np.float32), b=np.ones(4, np.float32))
    given = (tmp_path / "m.onnx", "--input", tmp_path / "x.npz", "--out", tmp_path / "o")
    result = call("run", *given)
    assert result.exit_code == 2 and "'n' is 3 elsewhere" in result.output


@pytest.mark.parametrize(
    "content",
    ["", "{}", "[1]", '{"base": "int8", "pinned": []}', '{"base": "fp16", "pinned": [1]}', "\x00"],
)
def test_bad_plans(content: str, tmp_path: Path) -> None:
    model = tmp_path / "m.onnx"
    model.write_bytes(model_bytes(encoder_layernorm()))
    (tmp_path / "plan.json").write_text(content)
    for form in ("trtexec", "polygraphy"):
        result = call("export", model, "--plan", tmp_path / "plan.json", "--format", form)
        assert (
            result.exit_code == 2
            and len(result.output.splitlines()) == 1
            and "plan" in result.output
        )
