"""Patterns of layers, equal layers, and the modules that exporters name."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import onnx
import onnx_graphsurgeon as gs

from bisect_trt.model.graph import Graph, as_graph


@dataclass(frozen=True)
class Pattern:
    """``kind`` names the idea ("LayerNorm"), ``layers`` the ids of its nodes in network order,
    ``decomposed`` how it is written.
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
    """The normalisations, softmaxes and GELUs of ``model``'s main graph, in network order."""
    source = as_graph(model)
    nodes = source.proto.graph.node
    ids = {o: n for node, n in zip(nodes, source.names, strict=True) for o in node.output}
    order = {name: position for position, name in enumerate(dict.fromkeys(ids.values()))}
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
    """The graph without its weights: patterns are about wiring."""
    light = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    light.graph.name = model.graph.name
    light.graph.input.extend(model.graph.input)
    light.graph.output.extend(model.graph.output)
    light.graph.node.extend(n for n in model.graph.node if n.op_type != "Constant")
    return light


def _producer(node: gs.Node, *ops: str) -> gs.Node | None:
    """The node that feeds ``node`` and is one of ``ops``."""
    for tensor in node.inputs:
        for producer in tensor.inputs:
            if producer.op in ops:
                return producer
    return None


def _consumer(node: gs.Node, *ops: str) -> gs.Node | None:
    """The node that reads ``node``'s first output and is one of ``ops``."""
    for consumer in node.outputs[0].outputs:
        if consumer.op in ops:
            return consumer
    return None


def _normalisation(sqrt: gs.Node) -> list[gs.Node]:
    """From the square root outwards: mean, (Sub), square, mean, add epsilon, root, divide, scale
    and shift.
    """
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
        shift = _consumer(scale, "Add")
        if shift is not None and centre is not None and not _reads_layer(shift, scale):
            members.append(shift)
    return members


def _kind_of(members: list[gs.Node]) -> str:
    """Which normalisation ``members`` are: an RMSNorm where no mean is subtracted, and between two
    reshapes one of groups of channels.
    """
    centre = next((m for m in members if m.op == "Sub"), None)
    if centre is None:
        return "RMSNorm"
    divide = next((m for m in members if m.op == "Div"), None)
    grouped = _producer(centre, "Reshape") is not None
    back = divide is not None and _consumer(divide, "Reshape") is not None
    return "GroupNorm" if grouped and back else "LayerNorm"


def _reads_layer(node: gs.Node, known: gs.Node) -> bool:
    """True if ``node`` reads another computed tensor than ``known``'s: a residual addition, not the
    shift.
    """
    return any(producer is not known for tensor in node.inputs for producer in tensor.inputs)


def _gelu(erf: gs.Node) -> list[gs.Node]:
    """x * 0.5 * (1 + erf(x / sqrt(2))), in either order of the products."""
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
    """Where a node comes from: blank, or line 0, where the exporter did not say.

    ``file``, ``line`` and ``code`` are of the innermost call in code that is not installed;
    ``module`` is the path of the module in the model.
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
    """What ``node`` says of where it comes from; what cannot be read counts as not said."""
    try:
        said, documented = {p.key: p.value for p in node.metadata_props}, node.doc_string
    except UnicodeDecodeError:  # damaged, but nothing that is computed depends on it
        said, documented = {}, ""
    file, line, code = _users_frame(_frames(said.get(f"{_PREFIX}stack_trace", "")))
    if not file:
        file, line, code = _users_frame(_short_frames(documented))
    scopes = _texts(said.get(f"{_PREFIX}name_scopes", ""))
    classes = _texts(said.get(f"{_PREFIX}class_hierarchy", ""))
    if not scopes and "namespace" in said:
        parts = [part.partition(": ") for part in said["namespace"].split("/")]
        scopes, classes = [p[0] for p in parts], [p[2] for p in parts]
    if scopes:
        # The last scope is the operator itself, the one before it the module that calls it.
        module, kinds = "".join(scopes[-2:-1]), classes[-2:-1]
        return Origin(file, line, code, module, "".join(kinds).rpartition(".")[2])
    # TorchScript's names are paths: /blocks.0/attn/qkv/MatMul.
    path = node.name[1:].rpartition("/")[0] if node.name.startswith("/") else ""
    return Origin(file, line, code, path.replace("/", "."))


_Frame = tuple[str, int, str]


def _users_frame(frames: list[_Frame]) -> _Frame:
    """The innermost of ``frames`` (outermost first) that is no installed library's, if any."""
    own = [frame for frame in frames if not _INSTALLED.search(frame[0])]
    return own[-1] if own else ("", 0, "")


def _frames(trace: str) -> list[_Frame]:
    """Python's form, outermost first, each line followed by its code."""
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
    """TorchScript's form, ``path(line): function``, innermost first."""
    found = [_SHORT_FRAME.match(text) for text in trace.splitlines()]
    return [(f["file"], int(f["line"]), "") for f in reversed(found) if f is not None]


def _texts(literal: str) -> list[str]:
    """A list of texts written as Python writes it; empty where it is none."""
    try:
        found = ast.literal_eval(literal)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return []
    return [str(part) for part in found] if isinstance(found, list) else []


Neighbours = Mapping[str, Sequence[str]]


def nodes_alike(graph: Graph, names: Collection[str]) -> tuple[str, ...]:
    """The nodes that are connected to each other as ``names`` are, in the file's order.

    A node is like one of ``names`` if its operator is the same, and for each neighbour that the one
    has among ``names`` it has a neighbour that is like that. What fails this is struck off until
    nothing more does (arc consistency: Mackworth, Artificial Intelligence 8, 1977).
    """
    operators = {
        n: node.op_type for n, node in zip(graph.names, graph.proto.graph.node, strict=True)
    }
    before, after = _neighbours(graph)
    like = {one: {n for n, op in operators.items() if op == operators[one]} for one in names}
    sides = [
        (side, {one: [n for n in side[one] if n in names] for one in names})
        for side in (before, after)
    ]
    changed = True
    while changed:
        changed = False
        for one, places in like.items():
            kept = {
                n
                for n in places
                if all(_has(side[n], inside[one], like, operators) for side, inside in sides)
            }
            changed = changed or kept != places
            like[one] = kept
    found = set[str]().union(*like.values())
    return tuple(n for n in graph.names if n in found)


def _has(
    neighbours: Sequence[str],
    wanted: Sequence[str],
    like: Mapping[str, Collection[str]],
    operators: Mapping[str, str],
) -> bool:
    """Whether there are as many neighbours like those ``wanted`` of each operator."""
    for operator, count in Counter(operators[w] for w in wanted).items():
        fitting = set[str]().union(*(like[w] for w in wanted if operators[w] == operator))
        if sum(n in fitting for n in neighbours) < count:
            return False
    return True


def _neighbours(graph: Graph) -> tuple[Neighbours, Neighbours]:
    """The nodes that give each node its inputs, and those that read its outputs."""
    nodes = list(zip(graph.names, graph.proto.graph.node, strict=True))
    source = {tensor: name for name, node in nodes for tensor in node.output if tensor}
    before = {name: [source[t] for t in node.input if t in source] for name, node in nodes}
    after: dict[str, list[str]] = {name: [] for name, _ in nodes}
    for name, givers in before.items():
        for giver in dict.fromkeys(givers):
            after[giver].append(name)
    return before, after
