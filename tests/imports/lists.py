"""One list of layers in twelve forms, and what TensorRT's own network says each of them sets.

The forms' oracles share no code with what reads them. Scripts are run, on the layers of the parsed
network. trtexec's rules and polygraphy's are written again, as simply as can be.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx

from bisect_trt.base.errors import BadInputError
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.graph import to_typed
from bisect_trt.model.graph import Graph
from bisect_trt.model.weak_typing import polygraphy_script, trtexec_arguments
from bisect_trt.runners.tensorrt.records import import_tensorrt

_ENTRY = re.compile(r"\[ONNX Layer: ([^\]|]*?)(?: \|[^\]]*)?\]")


@dataclass(frozen=True)
class GivenList:
    """A list in one form: the ``file`` that it is in, and the layers that it keeps in FP32."""

    name: str
    file: str
    text: str | bytes
    kept: frozenset[str]

    def write(self, folder: Path) -> Path:
        """The list in a file of ``folder``."""
        path = folder / self.file
        path.write_bytes(self.text if isinstance(self.text, bytes) else self.text.encode())
        return path


class SeenLayer:
    """A layer of the parsed network as weak typing has it: it takes a precision."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self.precision: Any = None
        self.types: dict[int, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def set_output_type(self, index: int, kind: Any) -> None:
        self.types[index] = kind


class SeenNetwork:
    """A network of such layers."""

    def __init__(self, network: Any) -> None:
        self._layers = [SeenLayer(network.get_layer(i)) for i in range(network.num_layers)]
        self.num_layers = len(self._layers)

    def get_layer(self, index: int) -> SeenLayer:
        return self._layers[index]

    def __iter__(self) -> Iterator[SeenLayer]:
        return iter(self._layers)

    __getitem__ = get_layer

    def __len__(self) -> int:
        return self.num_layers


class Parsed:
    """A model in TensorRT's own hands."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.trt = import_tensorrt("tensorrt_rtx")
        logger = self.trt.Logger(self.trt.Logger.ERROR)
        self._builder = self.trt.Builder(logger)
        self._network = self._builder.create_network(0)
        self._parser = self.trt.OnnxParser(self._network, logger)
        assert self._parser.parse(model.SerializeToString())
        self.layers = frozenset(layer.name for layer in Graph(model).layers)

    def network(self) -> SeenNetwork:
        return SeenNetwork(self._network)

    def nodes(self, layers: Sequence[SeenLayer]) -> frozenset[str]:
        """The model's layers that TensorRT made these of, by its metadata."""
        kinds = (layer for layer in layers if layer.type != self.trt.LayerType.CONSTANT)
        found = {name for layer in kinds for name in _ENTRY.findall(layer.metadata)}
        return frozenset(found & self.layers)

    def run(self, script: str) -> frozenset[str]:
        """The model's layers that a script sets to FP32, by running it."""
        network = self.network()
        module = ModuleType("script")
        names: dict[str, Any] = vars(module)
        names |= {"trt": self.trt, "network": network}
        exec(compile(script.replace("import tensorrt as trt", ""), "script", "exec"), names)
        if "build" in names:
            names["build"](network)
        return self.nodes([one for one in network if one.precision == self.trt.float32])

    def trtexec(self, value: str) -> frozenset[str]:
        """The layers that ``--layerPrecisions=value`` sets to FP32, by trtexec's rules."""
        said = dict(entry.rsplit(":", 1) for entry in value.split(","))
        kept = []
        for layer in self.network():
            kind = said.get(layer.name)
            for pattern, its in said.items() if kind is None else ():
                before, star, after = pattern.partition("*")
                fits = len(layer.name) >= len(before) + len(after)
                if star and fits and layer.name.startswith(before) and layer.name.endswith(after):
                    kind = its
            if kind == "fp32":
                kept.append(layer)
        return self.nodes(kept)


_BY_TYPE = """import tensorrt as trt

def keep(layer):
    layer.precision = trt.float32
    for i in range(layer.num_outputs):
        layer.set_output_type(i, trt.float32)

def build(network):
    for i in range(network.num_layers):
        layer = network.get_layer(i)
        name = (layer.name or "").lower()
        if layer.type in (trt.LayerType.SHAPE, trt.LayerType.CONSTANT):
            continue
        if layer.type == trt.LayerType.{kind} or any(word in name for word in {words!r}):
            keep(layer)
"""

_BY_NAME = """import re
import tensorrt as trt

KEPT = {names!r}
FIRST = re.compile({expression!r})

def build(network):
    for layer in network:
        if layer.get_output(0).dtype != trt.float32:
            continue
        if layer.name in KEPT or layer.name.endswith({end!r}) or FIRST.match(layer.name):
            layer.precision = trt.float32
            layer.set_output_type(0, trt.float32)
"""

_BY_NUMBER = """import tensorrt as trt

def postprocess(builder, network, config):
    for i, layer in enumerate(network):
        if {first} <= i < {last} and layer.type != trt.LayerType.CONSTANT:
            layer.precision = trt.DataType.FLOAT

def build(network):
    postprocess(None, network, None)
"""


def lists_of(model: onnx.ModelProto, seed: int = 0) -> list[GivenList]:
    """Lists for ``model`` in twelve forms, each with what TensorRT's own network says of it."""
    graph, parsed = Graph(model), Parsed(model)
    names = [layer.name for layer in graph.layers]
    plan = PrecisionPlan("fp16", [n for n in names[seed % 3 :: 3] if _can_be_written(graph, n)])
    some = sorted(plan.pinned)[:8]
    kinds = {layer.type.name for layer in parsed.network()}
    kind = next(k for k in ("SOFTMAX", "REDUCE", "ACTIVATION", "ELEMENTWISE") if k in kinds)
    word = names[len(names) // 2].strip("/").split("/")[0].lower()
    ops = {layer.name: layer.op for layer in graph.layers}
    operator = ops[names[-1]]
    of_operator = frozenset(name for name in names if ops[name] == operator)
    prefix = names[len(names) // 3][:12]
    wild = f"*:fp32,{prefix}*:fp32,{some[0]}:fp16,*{names[-1][-4:]}:fp32"
    text = ",".join(f"{name}:fp32" for name in some)
    by_type = _BY_TYPE.format(kind=kind, words=(word,))
    start = re.escape(prefix)
    by_name = _BY_NAME.format(names=some, expression=start + ".*", end=names[-1][-5:])
    by_number = _BY_NUMBER.format(first=3, last=len(parsed.network()) // 2)
    matched = {name for name in names if re.match(start + ".*[a-z]", name)}
    lists = f"op_block_list={[operator]!r}, node_block_list={some!r}"
    return [
        GivenList(
            "trtexec, a command", "a.sh", _command(trtexec_arguments(graph, plan)), plan.pinned
        ),
        GivenList(
            "trtexec, wildcards",
            "b.txt",
            f"--fp16 '--layerPrecisions={wild}'",
            parsed.trtexec(wild),
        ),
        GivenList(
            "trtexec, in Python",
            "c.py",
            f"import os\nos.system('trtexec --fp16 ' + '--layerPrecisions=' + {text!r})\n",
            parsed.trtexec(text),
        ),
        GivenList("polygraphy, by export", "d.py", polygraphy_script(graph, plan), plan.pinned),
        GivenList("script, types and words", "e.py", by_type, parsed.run(by_type)),
        GivenList("script, names", "f.py", by_name, parsed.run(by_name)),
        GivenList("script, numbers", "g.py", by_number, parsed.run(by_number)),
        GivenList("polygraphy, replay", "h.json", *_replay(parsed)),
        GivenList(
            "AutoCast, options",
            "i.sh",
            f"python -m modelopt.onnx.autocast --onnx_path m.onnx \\\n"
            f"  --nodes_to_exclude '{start}.*[a-z]' --op_types_to_exclude {operator}\n",
            frozenset(matched) | of_operator,
        ),
        GivenList(
            "onnxconverter-common, a call",
            "j.py",
            f"model = convert_float_to_float16(model, keep_io_types=True, {lists})\n",
            of_operator.union(some),
        ),
        GivenList(
            "ONNX Runtime, JSON",
            "k.json",
            json.dumps({"op_block_list": [operator], "node_block_list": some}),
            of_operator.union(some),
        ),
        GivenList("mixed model", "l.onnx", to_typed(model, plan).SerializeToString(), plan.pinned),
    ]


def _can_be_written(graph: Graph, name: str) -> bool:
    """Whether trtexec's options can name this layer."""
    try:
        trtexec_arguments(graph, PrecisionPlan("fp16", [name]))
    except BadInputError:
        return False
    return True


def _command(arguments: str) -> str:
    return f"#!/bin/sh\ntrtexec --onnx=m.onnx \\\n  {arguments} \\\n  --saveEngine=m.plan\n"


def _replay(parsed: Parsed) -> tuple[str, frozenset[str]]:
    """A bisection that passed with a quarter of the network in FP32, and its layers."""
    network = parsed.network()
    number, good, bad = len(network), len(network) + 1, 0
    marked, kept, data = number, number, {}
    for index in range(3):
        passes = marked >= number // 4
        data[f"_N{index}"] = [passes, []]
        good, bad, kept = (marked, bad, marked) if passes else (good, marked, kept)
        marked = (good + bad) // 2 if passes else -(-(good + bad) // 2)
    floats = ("FLOAT", "HALF", "INT8")
    layers = [
        one
        for one in list(network)[:kept]
        if one.type != parsed.trt.LayerType.CONSTANT
        and all(one.get_output(i).dtype.name in floats for i in range(one.num_outputs))
        and not any(one.get_output(i).is_shape_tensor for i in range(one.num_outputs))
    ]
    return json.dumps(data), parsed.nodes(layers)
