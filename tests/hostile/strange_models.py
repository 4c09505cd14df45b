"""Models that break tools, broken, strange and hostile, as the bytes of a file and an input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from fixtures.encoders import encoder_decomposed
from fixtures.fixture import waves
from fixtures.models import bf16_victim
from fixtures.subgraphs import branch, loop
from tests.model.test_normalised import function_model
from tests.steps.test_limits import masked, quantised_network

F, H, L, D = (
    TensorProto.FLOAT,
    TensorProto.FLOAT16,
    TensorProto.INT64,
    TensorProto.DOUBLE,
)
Strange = tuple[bytes, dict[str, Any]]
X = waves(5, 4, 8)

NAMES = {
    "markup": "<script>alert(1)</script>",
    "attribute": '" onmouseover="alert(1)',
    "image": "![x](http://example.org/x.png) [y](javascript:alert(1))",
    "rich markup": "[bold red]x[/] [link=http://example.org]y[/link] :smile:",
    "formula": '=HYPERLINK("http://example.org","x")',
    "plus": "+1+cmd|' /C calc'!A0",
    "at": "@SUM(1+1)",
    "escape": "\x1b[2J\x1b]0;title\x07x",
    "controls": "a\x00b\x08c\x7fd\x85e",
    "lines": "first\nsecond\r\nthird\ttab",
    "turned": "abc\u202egnp.exe\u2066",
    "long": "n" * 5000,
    "shell": "$(touch /tmp/owned) `id` ; rm -rf x & 'y' \"z\"",
    "path": "../../../../etc/passwd",
    "commas": "a,b:c*d'e\\f",
    "table": "a|b|c",
    "template": "{{ 7 * 7 }} {% raw %} ${x} %s {0}",
    "emoji": "层-ä-\U0001f600",
    "blank": " ",
    "cdata": "]]> <!-- -- > &amp; &#0;",
    "quote": "it's \"quoted\" 'twice'",
    "underscores": "__init__ _x_ *y* ~~z~~ #1 > q",
}


def build(
    nodes: Sequence[onnx.NodeProto],
    inputs: dict[str, tuple[int, Any]] | None = None,
    outputs: dict[str, tuple[int, Any]] | None = None,
    *,
    opset: int = 17,
    domains: Sequence[str] = (),
    ir: int = 8,
    **weights: Any,
) -> onnx.ModelProto:
    """A model from its nodes, by default from FP32 x (4, 8) to FP32 y."""
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info(n, *i) for n, i in (inputs or {"x": (F, [4, 8])}).items()],
        [helper.make_tensor_value_info(n, *o) for n, o in (outputs or {"y": (F, None)}).items()],
        [numpy_helper.from_array(np.asarray(a), n) for n, a in weights.items()],
    )
    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in domains)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=ir)


def node(kind: str, *wires: str, name: str = "", domain: str = "", **more: Any) -> onnx.NodeProto:
    """A node of one output, the last of ``wires``."""
    return helper.make_node(kind, list(wires[:-1]), [wires[-1]], name, domain=domain, **more)


EYE = np.eye(8, dtype=np.float32)


def simple(*nodes: onnx.NodeProto, x: NDArray[Any] = X, **more: Any) -> Strange:
    return build(nodes, **more).SerializeToString(), {"x": x}


def named(name: str) -> Strange:
    """Everything that can bear a name bears ``name``."""
    nodes = [
        node("MatMul", name, f"w{name}", f"a{name}", name=name),
        node("Mul", f"a{name}", f"a{name}", f"b{name}", name=f"scope/{name}/mul"),
        node("Softmax", f"b{name}", f"y{name}", name=f"{name}1"),
    ]
    inputs, outputs = {name: (F, [4, 8])}, {f"y{name}": (F, [4, 8])}
    weights: dict[str, Any] = {f"w{name}": EYE * 300}
    model = build(nodes, inputs, outputs, **weights)
    model.graph.name = name
    model.doc_string = model.producer_name = name
    return model.SerializeToString(), {name: X}


def _typed(kind: int, dtype: Any) -> Strange:
    nodes = [node("MatMul", "x", "w", "a", name="m"), node("Relu", "a", "y", name="r")]
    shape = {"x": (kind, [4, 8])}, {"y": (kind, [4, 8])}
    return build(nodes, *shape, w=EYE.astype(dtype)).SerializeToString(), {"x": X.astype(dtype)}


def _control(kind: str) -> Strange:
    body = helper.make_graph(
        [node("Mul", "x", "k", "s", name="inner"), node("Identity", "s", "out", name="id")],
        "body",
        [],
        [helper.make_tensor_value_info("out", F, None)],
        [numpy_helper.from_array(np.float32(3e4), "k")],
    )
    nodes = [
        node("If", "c", "b", name="choice", then_branch=body, else_branch=body),
        node("Add", "b", "x", "y", name="add"),
    ]
    value = {"true": True, "false": False}[kind]
    return build(nodes, c=np.array(value)).SerializeToString(), {"x": X}


def _sequence() -> Strange:
    nodes = [
        helper.make_node("SplitToSequence", ["x"], ["s"], "split", axis=0),
        helper.make_node("ConcatFromSequence", ["s"], ["a"], "concat", axis=0),
        node("MatMul", "a", "w", "y", name="m"),
    ]
    return simple(*nodes, w=EYE)


def _changed(change: Callable[[onnx.ModelProto], object]) -> Strange:
    fixture = encoder_decomposed()
    model = onnx.ModelProto()
    model.CopyFrom(fixture.model)
    change(model)
    return model.SerializeToString(), dict(fixture.inputs)


def _bytes_changed(change: Callable[[bytearray], object]) -> Strange:
    fixture = encoder_decomposed()
    data = bytearray(fixture.model.SerializeToString())
    change(data)
    return bytes(data), dict(fixture.inputs)


def _flipped(seed: int) -> Strange:
    def change(data: bytearray) -> None:
        random = Random(seed)
        for _ in range(1 + seed % 5):
            # The first part: of the weights' bytes any value is a weight.
            data[random.randrange(min(len(data), 3000))] ^= 1 << random.randrange(8)

    return _bytes_changed(change)


def _deep(count: int) -> Strange:
    nodes = [node("Sin", "x" if i == 0 else f"t{i}", f"t{i + 1}") for i in range(count)]
    return simple(*nodes, node("Relu", f"t{count}", "y"))


def _wide(count: int) -> Strange:
    nodes = [node("Mul", "x", "k", f"t{i}", name="same name") for i in range(count)]
    nodes.append(helper.make_node("Sum", [f"t{i}" for i in range(count)], ["y"], "same name"))
    return simple(*nodes, k=np.float32(1.5))


def _fixture(make: Callable[[], Any]) -> Strange:
    fixture = make()
    return fixture.model.SerializeToString(), dict(fixture.inputs)


def _inputs_missing() -> Strange:
    return simple(node("Add", "x", "nowhere", "y", name="add"))


def _outputs(**outputs: Any) -> Strange:
    nodes = [
        node("MatMul", "x", "w", "y", name="m"),
        node("ArgMax", "y", "best", name="best", axis=1),
        node("Greater", "y", "zero", "mask", name="mask"),
        helper.make_node("TopK", ["y", "k"], ["values", "indices"], "top"),
    ]
    weights: dict[str, Any] = {"w": EYE, "zero": np.float32(0), "k": np.array([2])}
    return build(nodes, None, outputs, **weights).SerializeToString(), {"x": X}


def _lstm() -> Strange:
    random = np.random.default_rng(0)
    lstm = helper.make_node("LSTM", ["x3", "W", "R"], ["", "h"], "lstm", hidden_size=8)
    nodes = [
        node("Reshape", "x", "shape", "x3", name="in"),
        lstm,
        node("Squeeze", "h", "y", name="out"),
    ]
    weights = {
        "W": random.normal(size=(1, 32, 8)).astype(np.float32),
        "R": random.normal(size=(1, 32, 8)).astype(np.float32),
        "shape": np.array([4, 1, 8]),
    }
    return simple(*nodes, **weights)


def _quantised() -> Strange:
    model, inputs = quantised_network()
    return model.SerializeToString(), dict(inputs)


def _masked() -> Strange:
    mask = np.triu(np.full((8, 8), -np.inf, np.float32), 1)
    return masked().SerializeToString(), {"x": waves(0, 8, 8), "mask": mask}


def _functions() -> Strange:
    x = np.sin(np.arange(16, dtype=np.float32)).reshape(4, 4)
    return function_model().SerializeToString(), {"x": x}


def _old_style() -> Strange:
    """IR 3: the initialiser is among the inputs."""
    model = build([node("MatMul", "x", "w", "y", name="m")], opset=7, ir=3, w=EYE)
    model.graph.input.append(helper.make_tensor_value_info("w", F, [8, 8]))
    return model.SerializeToString(), {"x": X}


def _recursive() -> Strange:
    model = function_model()
    inner = next(f for f in model.functions if f.name == "Squash")
    inner.node[1].op_type, inner.node[1].domain = "Squash", "my"
    inner.opset_import.append(helper.make_opsetid("my", 1))
    return model.SerializeToString(), {"x": np.ones((4, 4), np.float32)}


def _declared(shape: Any, kind: int = F) -> Strange:
    nodes = [node("MatMul", "x", "w", "y", name="m"), node("Relu", "y", "z", name="r")]
    outputs = {"z": (kind, shape)}
    return build(nodes, None, outputs, w=EYE * 100).SerializeToString(), {"x": X}


MODELS: dict[str, Callable[[], Strange]] = {
    **{f"named {key}": (lambda n=name: named(n)) for key, name in NAMES.items()},
    **{f"{n} bits flipped": (lambda s=n: _flipped(s)) for n in range(8)},
    "empty file": lambda: (b"", {"x": X}),
    "text": lambda: (b"this is not a model", {"x": X}),
    "zeros": lambda: (b"\0" * 5000, {"x": X}),
    "cut in half": lambda: _bytes_changed(lambda d: d.__delitem__(slice(len(d) // 2, None))),
    "cut by a byte": lambda: _bytes_changed(lambda d: d.pop()),
    "no nodes": lambda: simple(),
    "no outputs": lambda: _changed(lambda m: m.graph.ClearField("output")),
    "no opset": lambda: _changed(lambda m: m.ClearField("opset_import")),
    "no inputs declared": lambda: _changed(lambda m: m.graph.ClearField("input")),
    "future opset": lambda: simple(node("Relu", "x", "y"), opset=999),
    "opset 0": lambda: simple(node("Relu", "x", "y"), opset=0),
    "future ir": lambda: simple(node("Relu", "x", "y"), ir=999),
    "opset 7": lambda: simple(node("MatMul", "x", "w", "y"), opset=7, ir=4, w=EYE),
    "opset 9": lambda: simple(node("MatMul", "x", "w", "y"), opset=9, ir=4, w=EYE),
    "old style": _old_style,
    "double": lambda: _typed(D, np.float64),
    "half": lambda: _typed(H, np.float16),
    "integers": lambda: _typed(TensorProto.INT32, np.int32),
    "unknown operator": lambda: simple(node("Nonsense", "x", "y", name="n")),
    "unknown domain": lambda: simple(
        node("Block", "x", "y", name="n", domain="nobody"), domains=["nobody"]
    ),
    "microsoft": lambda: simple(
        node("Gelu", "x", "a", name="gelu", domain="com.microsoft"),
        node("MatMul", "a", "w", "y", name="m"),
        domains=["com.microsoft"],
        w=EYE * 9,
    ),
    "functions": _functions,
    "function that calls itself": _recursive,
    "cycle": lambda: simple(
        node("Add", "x", "b", "a"), node("Relu", "a", "b"), node("Relu", "b", "y")
    ),
    "input from nowhere": _inputs_missing,
    "two makers of one tensor": lambda: simple(node("Relu", "x", "y"), node("Exp", "x", "y")),
    "same names": lambda: _wide(12),
    "deep": lambda: _deep(300),
    "input is output": lambda: (
        build(
            [node("Relu", "x", "y")], None, {"y": (F, None), "x": (F, [4, 8])}
        ).SerializeToString(),
        {"x": X},
    ),
    "constant is output": lambda: (
        build(
            [node("MatMul", "x", "w", "y")], None, {"y": (F, None), "w": (F, [8, 8])}, w=EYE
        ).SerializeToString(),
        {"x": X},
    ),
    "output twice": lambda: _changed(lambda m: m.graph.output.append(m.graph.output[0])),
    "no shape declared": lambda: _declared(None),
    "wrong rank declared": lambda: _declared([4]),
    "wrong size declared": lambda: _declared([4, 9]),
    "wrong type declared": lambda: _declared([4, 8], H),
    "symbolic shape declared": lambda: _declared(["a", "b"]),
    "several outputs": lambda: _outputs(y=(F, None), best=(L, None), mask=(TensorProto.BOOL, None)),
    "indices alone": lambda: _outputs(indices=(L, None)),
    "mask alone": lambda: _outputs(mask=(TensorProto.BOOL, None)),
    "if true": lambda: _control("true"),
    "if false": lambda: _control("false"),
    "branch": lambda: _fixture(branch),
    "loop": lambda: _fixture(loop),
    "bf16": lambda: _fixture(bf16_victim),
    "sequence": _sequence,
    "lstm": _lstm,
    "quantised": _quantised,
    "masked": _masked,
    "empty tensor": lambda: simple(
        node("Relu", "x", "y"), x=np.zeros((0, 8), np.float32), inputs={"x": (F, [0, 8])}
    ),
    "scalar": lambda: simple(
        node("Exp", "x", "y"), x=np.asarray(np.float32(3)), inputs={"x": (F, [])}
    ),
    "NaN everywhere": lambda: simple(
        node("Sub", "x", "k", "a"), node("Log", "a", "y"), k=np.float32(9)
    ),
    "NaN in part": lambda: simple(node("Log", "x", "y", name="log")),
    "infinite weights": lambda: simple(node("Mul", "x", "k", "y"), k=np.float32(np.inf)),
    "NaN weights": lambda: simple(node("Mul", "x", "k", "y"), k=np.float32(np.nan)),
    "huge weights": lambda: simple(node("Mul", "x", "k", "y"), k=np.float32(1e30)),
    "tiny weights": lambda: simple(
        node("Mul", "x", "k", "a"), node("Div", "a", "a", "y"), k=np.float32(1e-30)
    ),
    "constant output": lambda: simple(node("Sub", "x", "x", "y", name="zero")),
    "random": lambda: simple(
        helper.make_node("RandomNormalLike", ["x"], ["r"], "random"), node("Add", "x", "r", "y")
    ),
    "shape of values": lambda: simple(
        node("Greater", "x", "zero", "c"),
        node("Compress", "x", "c1", "y"),
        node("Reshape", "c", "flat", "c1"),
        zero=np.float32(0),
        flat=np.array([-1]),
    ),
    "refuses rounded": lambda: simple(
        node("Mul", "x", "k", "a"),
        node("Cast", "a", "i", to=L),
        node("Gather", "table", "i", "y"),
        x=np.full((4, 8), 4095, np.float32),
        k=np.float32(1),
        table=np.arange(4096, dtype=np.float32),
    ),
    "strings": lambda: (
        build(
            [node("Identity", "x", "y")],
            {"x": (TensorProto.STRING, [2])},
            {"y": (TensorProto.STRING, [2])},
        ).SerializeToString(),
        {"x": np.array(["a", "b"])},
    ),
    "bad bytes": lambda: _changed(lambda m: setattr(m.graph.initializer[0], "raw_data", b"\0")),
    "unknown type": lambda: _changed(lambda m: setattr(m.graph.initializer[0], "data_type", 99)),
    "bad attribute": lambda: simple(node("Softmax", "x", "y", axis=77)),
    "missing attribute": lambda: simple(node("Cast", "x", "y")),
    "too many inputs": lambda: simple(node("Relu", "x", "x", "y")),
    "no inputs at a node": lambda: simple(helper.make_node("Relu", [], ["y"])),
    "sizes do not fit": lambda: simple(
        node("MatMul", "x", "w", "y"), w=np.eye(3, dtype=np.float32)
    ),
    "external data nowhere": lambda: _changed(_outside("gone.bin")),
    "external data outside": lambda: _changed(_outside("../../etc/passwd")),
}


def _outside(location: str) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        tensor = next(t for t in model.graph.initializer if t.raw_data)
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=location)

    return change
