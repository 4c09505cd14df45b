"""Finds known patterns of layers, and where nodes come from."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

import onnx
import onnx_graphsurgeon as gs

from bisect_trt.model.graph import Graph, as_graph
from bisect_trt.model.walk import subgraphs


@dataclass(frozen=True)
class Pattern:
    """A known group of nodes: its ``kind`` ("LayerNorm") and the ids of its nodes in file order.

    ``decomposed`` says that it is written out in primitive operators.
    """

    kind: str
    layers: tuple[str, ...]
    decomposed: bool


_SINGLE = {
    "LayerNormalization": "LayerNorm",
    "RMSNormalization": "RMSNorm",
    "Softmax": "Softmax",
    "Gelu": "GELU",
}


def find_patterns(model: onnx.ModelProto | Graph) -> list[Pattern]:
    """The normalisations, softmaxes and GELUs of the main graph, in the file's order."""
    source = as_graph(model)
    ids = {o: n for node, n in source.named_nodes() for o in node.output}
    order = {name: position for position, name in enumerate(dict.fromkeys(ids.values()))}
    # Without weights, which graphsurgeon would copy into arrays.
    graph = gs.import_onnx(_light(source.proto))
    found = []
    for node in graph.nodes:
        if node.op in _SINGLE:
            members, kind, decomposed = [node], _SINGLE[node.op], False
        elif node.op == "Sqrt":
            members, decomposed = _normalisation(node), True
            kind = _kind_of(members)
        elif node.op == "Erf":
            members, kind, decomposed = _gelu(node), "GELU", True
        else:
            continue
        names = sorted({ids[m.outputs[0].name] for m in members}, key=order.__getitem__)
        if names:
            found.append(Pattern(kind, tuple(names), decomposed))
    return sorted(found, key=lambda p: order[p.layers[0]])


def _light(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of the main graph without its weights and its bodies."""
    light = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    light.graph.name = model.graph.name
    light.graph.input.extend(model.graph.input)
    light.graph.output.extend(model.graph.output)
    light.graph.node.extend(n for n in model.graph.node if n.op_type != "Constant")
    for node in light.graph.node:
        # graphsurgeon counts a body's nodes among the readers of a tensor outside.
        for name, _ in list(subgraphs(node)):
            node.attribute.remove(next(a for a in node.attribute if a.name == name))
    return light


def _producer(node: gs.Node, *ops: str) -> gs.Node | None:
    """The first producer of an input of ``node`` whose operator is one of ``ops``."""
    for tensor in node.inputs:
        for producer in tensor.inputs:
            if producer.op in ops:
                return producer
    return None


def _consumer(node: gs.Node, *ops: str) -> gs.Node | None:
    """The first reader of ``node``'s first output whose operator is one of ``ops``."""
    for consumer in node.outputs[0].outputs:
        if consumer.op in ops:
            return consumer
    return None


def _normalisation(sqrt: gs.Node) -> list[gs.Node]:
    """The nodes around the square root ``sqrt`` if they are a normalisation, else none."""
    # Inwards: add epsilon, mean, square. Outwards: divide, and perhaps scale and shift.
    add = _producer(sqrt, "Add")
    mean = _producer(add, "ReduceMean") if add is not None else None
    square = _producer(mean, "Pow", "Mul") if mean is not None else None
    divide = _consumer(sqrt, "Div", "Reciprocal")
    if add is None or mean is None or square is None or divide is None:
        return []
    members = [square, mean, add, sqrt, divide]
    centre = _producer(square, "Sub")
    if centre is not None:
        members.append(centre)
        first_mean = _producer(centre, "ReduceMean")
        if first_mean is not None:
            members.append(first_mean)
    scale = _consumer(divide, "Mul")
    if scale is not None:
        members.append(scale)
        shift = _consumer(scale, "Add")  # but no residual Add, which reads a computed tensor
        if shift is not None and centre is not None and not _reads_other(shift, scale):
            members.append(shift)
    return members


def _kind_of(members: list[gs.Node]) -> str:
    """Which normalisation ``members`` are."""
    centre = next((m for m in members if m.op == "Sub"), None)
    if centre is None:
        return "RMSNorm"  # it subtracts no mean
    # A GroupNorm has a Reshape before and after, which splits the channels into groups.
    divide = next((m for m in members if m.op == "Div"), None)
    grouped = _producer(centre, "Reshape") is not None
    back = divide is not None and _consumer(divide, "Reshape") is not None
    return "GroupNorm" if grouped and back else "LayerNorm"


def _reads_other(node: gs.Node, known: gs.Node) -> bool:
    """Whether ``node`` reads a computed tensor that is not ``known``'s, as a residual Add does."""
    return any(producer is not known for tensor in node.inputs for producer in tensor.inputs)


def _gelu(erf: gs.Node) -> list[gs.Node]:
    """The nodes around ``erf`` if they are x * 0.5 * (1 + erf(x / sqrt(2))), else none."""
    divide, add = _producer(erf, "Div", "Mul"), _consumer(erf, "Add")
    product = _consumer(add, "Mul") if add is not None else None
    if divide is None or add is None or product is None:
        return []
    last = _consumer(product, "Mul")
    return [divide, erf, add, product, *([last] if last is not None else [])]


_PREFIX = "pkg.torch.onnx."
_FRAME = re.compile(r'^\s*File "(?P<file>.*)", line (?P<line>\d+), in .*$')
_SHORT_FRAME = re.compile(r"^(?P<file>.+)\((?P<line>\d+)\): \S+$")
_INSTALLED = re.compile(r"[/\\](?:site-packages|dist-packages|lib[/\\]python3[.\d]*)[/\\]")


@dataclass(frozen=True)
class Origin:
    """Where a node comes from in the source code; fields that the exporter left out are empty.

    ``file``, ``line`` and ``code`` are the innermost call outside installed packages; ``module`` is
    the module's path in the model.
    """

    file: str = ""
    line: int = 0
    code: str = ""
    module: str = ""
    module_class: str = ""


def list_origins(model: onnx.ModelProto | Graph) -> dict[str, Origin]:
    """The origin of every layer, by layer id."""
    graph = as_graph(model)
    nodes = graph.proto.graph.node
    return {layer.name: origin_of(nodes[layer.index]) for layer in graph.layers}


def origin_of(node: onnx.NodeProto) -> Origin:
    """The origin that the metadata or the name of ``node`` gives."""
    try:
        metadata, documented = {p.key: p.value for p in node.metadata_props}, node.doc_string
    except UnicodeDecodeError:  # damaged, but no computation depends on it
        metadata, documented = {}, ""
    file, line, code = _users_frame(_frames(metadata.get(f"{_PREFIX}stack_trace", "")))
    if not file:
        file, line, code = _users_frame(_short_frames(documented))
    scopes = _texts(metadata.get(f"{_PREFIX}name_scopes", ""))
    classes = _texts(metadata.get(f"{_PREFIX}class_hierarchy", ""))
    if scopes:
        # The last scope is the operator, the one before it the module that calls it.
        module, kinds = "".join(scopes[-2:-1]), classes[-2:-1]
        return Origin(file, line, code, module, "".join(kinds).rpartition(".")[2])
    # TorchScript's names are paths: /blocks.0/attn/qkv/MatMul.
    path = node.name[1:].rpartition("/")[0] if node.name.startswith("/") else ""
    return Origin(file, line, code, path.replace("/", "."))


_Frame = tuple[str, int, str]


def _users_frame(frames: list[_Frame]) -> _Frame:
    """The last of ``frames`` (outermost first) outside installed packages."""
    own = [frame for frame in frames if not _INSTALLED.search(frame[0])]
    return own[-1] if own else ("", 0, "")


def _frames(trace: str) -> list[_Frame]:
    """The frames of a trace in Python's form: outermost first, each with a line of code."""
    lines = trace.splitlines()
    found = []
    for number, text in enumerate(lines):
        frame = _FRAME.match(text)
        if frame is None:
            continue
        code = lines[number + 1].strip() if number + 1 < len(lines) else ""
        shown = "" if _FRAME.match(code) else code
        found.append((frame["file"], int(frame["line"]), shown))
    return found


def _short_frames(trace: str) -> list[_Frame]:
    """The frames, outermost first, of a trace in TorchScript's form: ``path(line): function``."""
    found = [_SHORT_FRAME.match(text) for text in trace.splitlines()]
    return [(f["file"], int(f["line"]), "") for f in reversed(found) if f is not None]


def _texts(literal: str) -> list[str]:
    """A list of texts parsed from a Python literal; empty if it is no such list."""
    try:
        found = ast.literal_eval(literal)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return []
    return [str(part) for part in found] if isinstance(found, list) else []
