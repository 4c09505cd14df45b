"""Where in the user's code a node comes from, as far as its exporter says.

PyTorch's dynamo exporter writes scopes, classes and a stack trace into each node's
``metadata_props``, its TorchScript exporter the trace into ``doc_string`` (``verbose=True``) and
the scope into the name. What it does not say stays blank: nothing is taken over from neighbours.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

import onnx

from bisect_trt.graph.model.graph import Graph, as_graph

_PREFIX = "pkg.torch.onnx."
_FRAME = re.compile(r'^\s*File "(?P<file>.*)", line (?P<line>\d+), in .*$')
_SHORT_FRAME = re.compile(r"^(?P<file>.+)\((?P<line>\d+)\): \S+$")
_INSTALLED = re.compile(r"[/\\](?:site-packages|dist-packages|lib[/\\]python3[.\d]*)[/\\]")


@dataclass(frozen=True)
class Origin:
    """``file`` and ``line`` (0 where unknown) of the innermost call in code that is not installed,
    its text (``code``), the path of the ``module`` in the model, and that module's class
    (``module_class``). Blank where the exporter did not say.
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
    """The innermost of ``frames`` (outermost first) that is no installed library's; where all are,
    none: a line of PyTorch's own says nothing of the user's code.
    """
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
