"""Maps TensorRT's names of layers to the ONNX nodes that they were made from.

A name is looked up in the network that TensorRT's parser made, where that is known. Otherwise the
parser's rule for names is applied. Names of fused layers are taken apart by TensorRT's rules.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import onnx

from bisect_trt.model.graph import Graph
from bisect_trt.model.walk import every_node, subgraphs

IN_A_BODY = "it is inside a body, which is kept as a whole"
"""Said where a name stands for a node inside an If, Loop or Scan."""

_JOINTS = (" + ", " || ", " -> ")
"""What TensorRT puts between the names of layers that it fused."""

_OPENING, _CLOSING = "([{", ")]}"
_POINTWISE = re.compile(r"(?:PWN|PWN_\w+|fusedPointwiseNode)\((.*)\)$", re.DOTALL)
_FOREIGN = re.compile(r"\{ForeignNode\[(.*)\]\}$", re.DOTALL)
_UNNAMED = re.compile(r"\(Unnamed Layer\* (\d+)\) \[([^\]]*)\](?:_output)?$")
METADATA = re.compile(r"\[ONNX Layer: (.*?)\](?=[\x1e\x1f]|\[ONNX Layer|$|\s*\+)", re.DOTALL)
"""The ONNX nodes that a layer's metadata names."""

_BRANCH = re.compile(r" \| (.*?) \((?:If|Loop|Scan)\)")

_HELPERS = re.compile(
    r"Reformatting CopyNode|CopyNode|ONNXTRT_|\[\w*(?:Copy|trainStation)\w*[ \d]*\]$"
    r"|(?:un)?squeeze(?:_node)?_(?:after|before|between)_|reshape_(?:after|before)_"
    r"|(?:shuffle|transpose)_(?:after|before|between)_"
)
_KERNEL = re.compile(r"__my[ln]\d*_|_myl\d+_\d+$|_gemm_mha|^_gemm")


@dataclass(frozen=True, slots=True)
class NetworkLayer:
    """A layer of the network that TensorRT's parser made.

    ``kind`` is the member of ``LayerType``, such as SHUFFLE. ``metadata`` is the parser's text,
    which holds ``[ONNX Layer: NODE]``. ``outputs`` are its tensors' names, ``types`` theirs, such
    as FLOAT. ``is_shape`` says whether its first output is a shape.
    """

    name: str
    kind: str
    metadata: str = ""
    outputs: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    is_shape: bool = False


@dataclass(frozen=True, slots=True)
class Network:
    """The layers in TensorRT's order, and the version of TensorRT whose parser made them."""

    layers: tuple[NetworkLayer, ...]
    version: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """The ids of the nodes that a name stands for, in the file's order.

    ``said`` is why these are more than the name says, or why there is none. It is empty where the
    name stands for exactly these nodes.
    """

    nodes: tuple[str, ...]
    said: str = ""


@dataclass(eq=False)
class _Place:
    """The nodes with one name: those of the main graph, and those around a body that holds one."""

    nodes: list[str] = field(default_factory=list)
    around: list[str] = field(default_factory=list)


class TrtNames:
    """TensorRT's names for the nodes of ``graph``; ``network`` is what its parser made of it."""

    def __init__(self, graph: Graph, network: Network | None = None) -> None:
        self._graph = graph
        self._order = {name: index for index, name in enumerate(graph.names)}
        self._places: dict[str, _Place] = {}
        self._makers: dict[str, str] = {}
        for node, name in graph.named_nodes():
            self._place(parsers_name(node)).nodes.append(name)
            self._makers |= {tensor: name for tensor in node.output if tensor}
            for _, body in subgraphs(node):
                for inner in every_node(body.node):
                    self._place(parsers_name(inner)).around.append(name)
                    self._makers |= {tensor: name for tensor in inner.output if tensor}
        self._network = network
        self._layers: dict[str, tuple[NetworkLayer, ...]] = {}
        self._parts: dict[str, int] = {}
        for layer in network.layers if network is not None else ():
            self._layers[layer.name] = (*self._layers.get(layer.name, ()), layer)
            # Layers without metadata move values around a node's own.
            for name in self.nodes_of_layer(layer) if layer.metadata else ():
                self._parts[name] = self._parts.get(name, 0) + 1

    def _place(self, name: str) -> _Place:
        return self._places.setdefault(name, _Place())

    @property
    def network(self) -> Network | None:
        """What TensorRT's parser made of the graph; None where that is not known."""
        return self._network

    def names(self) -> Iterator[str]:
        """Every name that stands for a layer: the network's, or those by the parser's rule."""
        if self._network is not None:
            yield from dict.fromkeys(layer.name for layer in self._network.layers)
        else:
            yield from (name for name in self._places if name)

    def nodes_of_layer(self, layer: NetworkLayer) -> tuple[str, ...]:
        """The ids of the nodes that a layer of the network computes.

        Empty for weights, and for layers that the parser adds only to move values.
        """
        if layer.kind == "CONSTANT":
            return ()
        made = {self._makers[tensor] for tensor in layer.outputs if tensor in self._makers}
        entries = METADATA.findall(layer.metadata)
        # The layers of a Loop have no metadata, and the parser's own helpers have none.
        found = set(made) if not entries and not _HELPERS.match(layer.name) else set[str]()
        for entry in entries:
            nodes = set(self._of_entry(entry))
            # Its output says which of several nodes with one name it is.
            found |= nodes & made if len(nodes) > 1 and nodes & made else nodes
        return self._sorted(found)

    def _of_entry(self, entry: str) -> Sequence[str]:
        """The nodes that an entry of a layer's metadata names; inside an If, what is around it."""
        place = self._places.get(entry)
        if place is None:
            branches = _BRANCH.findall(entry)
            place = self._places.get(branches[-1] if branches else entry.partition(" | ")[0])
        return () if place is None else (*place.nodes, *place.around)

    def _sorted(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(sorted(set(names), key=self._order.__getitem__))

    def resolve(self, name: str) -> Resolved:
        """The nodes that ``name`` stands for: a layer's, a node's or a fused layer's name."""
        found = self._exact(name)
        return found if found is not None else self._taken_apart(name, 0)

    def _exact(self, name: str) -> Resolved | None:
        """The nodes of a layer or node that is called ``name``; None if none is."""
        layers = self._layers.get(name, ())
        nodes = self._sorted(n for layer in layers for n in self.nodes_of_layer(layer))
        if nodes:
            return Resolved(nodes, self._said_of(name, nodes, layers))
        place = self._places.get(name) if name else None
        if place is not None:
            nodes = self._sorted((*place.nodes, *place.around))
            return Resolved(nodes, self._said_of(name, nodes, ()))
        if name in self._order:
            return Resolved((name,))
        if layers:
            return Resolved((), _nothing_computed(layers[0].kind))
        return None

    def _said_of(self, name: str, nodes: Sequence[str], layers: Sequence[NetworkLayer]) -> str:
        """Why ``nodes`` are more than ``name`` says; empty if they are not."""
        place = self._places.get(name)
        if place is not None and place.around and not place.nodes:
            return IN_A_BODY
        if len(nodes) > 1:
            return f"{len(nodes)} nodes have this name"
        others = self._parts.get(nodes[0], 0) - len(layers)
        # The layers of a body are many, and kept as a whole.
        if layers and others > 0 and place is not None:
            return f"TensorRT makes {others + len(layers)} layers of this node, which is kept whole"
        return ""

    def _taken_apart(self, name: str, depth: int) -> Resolved:
        """The nodes of a fused layer, or why ``name`` stands for none."""
        if depth > 20 or not name:
            return Resolved((), "no layer has this name")
        text = name.strip()
        if entries := METADATA.findall(text):
            return self._union(entries, depth)
        if (found := _FOREIGN.match(text)) is not None:
            return self._region(found.group(1), depth)
        if (found := _POINTWISE.match(text)) is not None:
            return self._union(_split(found.group(1), (", ", ",")), depth)
        for joint in _JOINTS:
            texts = _split(text, (joint,))
            if len(texts) > 1:
                return self._union(texts, depth)
        if (found := _UNNAMED.match(text)) is not None:
            return self._numbered(int(found.group(1)), found.group(2))
        if _HELPERS.match(text) or text.endswith(" copy"):
            return Resolved((), "TensorRT adds this layer to move values; it computes nothing")
        if _KERNEL.search(text):
            return Resolved((), "a kernel inside a fused region names no node")
        return Resolved((), "no layer has this name")

    def _inner(self, name: str, depth: int) -> Resolved:
        """The nodes of a part of a name, or of an entry of metadata."""
        found = self._exact(name)
        if found is not None:
            return found
        if " | " in name and (nodes := self._sorted(self._of_entry(name))):
            return Resolved(nodes, IN_A_BODY)
        return self._taken_apart(name, depth + 1)

    def _union(self, texts: Sequence[str], depth: int) -> Resolved:
        """The nodes of all ``texts`` of a fused layer's name."""
        parts = {text: self._inner(text, depth) for text in dict.fromkeys(texts)}
        nodes = self._sorted(name for part in parts.values() for name in part.nodes)
        lost = [text for text, part in parts.items() if not part.nodes]
        wider = [part.said for part in parts.values() if part.nodes and part.said]
        if not nodes:
            return Resolved((), next(iter(parts.values())).said)
        if lost:
            return Resolved(nodes, f"without its part {lost[0]!r}: {parts[lost[0]].said}")
        return Resolved(nodes, wider[0] if wider else "")

    def _region(self, text: str, depth: int) -> Resolved:
        """The nodes of a region that TensorRT gave to another compiler, named by its two ends."""
        first, dots, last = text.partition("...")
        ends = [self._inner(end, depth) for end in ((first, last) if dots else (first,))]
        for name, end in zip((first, last), ends, strict=False):
            if not end.nodes:
                return Resolved((), f"one end of it is {name!r}: {end.said}")
        if not dots:
            return ends[0]
        places = [self._order[name] for end in ends for name in end.nodes]
        nodes = self._graph.names[min(places) : max(places) + 1]
        return Resolved(nodes, "a region is named by its ends; all nodes between them are kept")

    def _numbered(self, number: int, kind: str) -> Resolved:
        """The nodes of a layer without a name, by its number in TensorRT's network."""
        if self._network is None:
            return Resolved((), "only TensorRT's parser knows it; install tensorrt-rtx-cu13")
        version = self._network.version
        if number >= len(self._network.layers):
            return Resolved((), f"the network of {version} has no layer {number}")
        layer = self._network.layers[number]
        if _plain(layer.kind) != _plain(kind):
            reason = f"layer {number} of {version} is {layer.kind}; versions number differently"
            return Resolved((), reason)
        nodes = self.nodes_of_layer(layer)
        if not nodes:
            return Resolved((), _nothing_computed(layer.kind))
        return Resolved(nodes, f"by its number in the network of {version}")


def parsers_name(node: onnx.NodeProto) -> str:
    """The name that TensorRT's parser gives to a node; empty for one without name and output."""
    # As getNodeName in onnx-tensorrt's importerUtils.cpp.
    return node.name or (f"node_of_{node.output[0]}" if node.output else "")


def _nothing_computed(kind: str) -> str:
    if kind == "CONSTANT":
        return "it holds weights, which have the type of the layer that reads them"
    return "TensorRT adds this layer to move values; it computes nothing"


def _plain(kind: str) -> str:
    return re.sub(r"[^a-z]", "", kind.casefold())


def _split(text: str, joints: Sequence[str]) -> list[str]:
    """``text`` split at the first of ``joints`` that is outside of brackets."""
    for joint in joints:
        if joint not in text:
            continue
        texts, depth, began, index = [], 0, 0, 0
        while index < len(text):
            depth += (text[index] in _OPENING) - (text[index] in _CLOSING)
            if depth == 0 and text.startswith(joint, index):
                texts.append(text[began:index])
                began = index = index + len(joint)
            else:
                index += 1
        if texts:
            return [*texts, text[began:]]
    return [text]


class Wildcards:
    """Finds the names that a pattern with one ``*`` matches, fast for many patterns."""

    def __init__(self, names: Iterable[str]) -> None:
        self._forward = sorted(set(names))
        self._backward = sorted(name[::-1] for name in self._forward)
        self._found: dict[str, tuple[str, ...]] = {}

    def matches(self, pattern: str) -> tuple[str, ...]:
        """The names that ``pattern`` matches, as trtexec does: of its ``*`` the first counts."""
        if pattern not in self._found and "*" not in pattern:
            place = bisect_left(self._forward, pattern)
            self._found[pattern] = tuple(
                n for n in self._forward[place : place + 1] if n == pattern
            )
        elif pattern not in self._found:
            prefix, _, suffix = pattern.partition("*")
            ahead = _starting_with(self._forward, prefix)
            behind = _starting_with(self._backward, suffix[::-1])
            fewer = ahead if len(ahead) <= len(behind) else [name[::-1] for name in behind]
            least = len(prefix) + len(suffix)
            self._found[pattern] = tuple(
                name
                for name in fewer
                if len(name) >= least and name.startswith(prefix) and name.endswith(suffix)
            )
        return self._found[pattern]


def _starting_with(names: list[str], prefix: str) -> list[str]:
    begin = bisect_left(names, prefix)
    end = bisect_left(names, prefix + "\U0010ffff", begin)
    return names[begin:end]
