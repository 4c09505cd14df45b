"""Reads a model: refuses damaged ones, inlines functions, leaves large values in their files."""

from __future__ import annotations

import graphlib
import hashlib
import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError, EncodeError
from onnx import TensorProto, helper, inliner
from onnx.external_data_helper import uses_external_data

from bisect_trt.base.errors import BadInputError, MachineError, is_out_of_memory, one_line
from bisect_trt.model.tensor_values import (
    MAPPED_BYTES,
    PACKED,
    Place,
    all_tensors,
    place_of,
    put_at,
    shape_bytes,
    stamp_of,
    take_in,
)
from bisect_trt.model.walk import every_node, replace_nodes, subgraphs, tensors_read

_NUMBERED = re.compile(r"^(.*)__(\d+)$", re.DOTALL)
"""How ONNX's inliner names nodes: the name in the function and the number of the call."""

_LONG_DOMAIN = "ai.onnx"
"""The other spelling of the standard operators' domain."""

_COMPLEX = (TensorProto.COMPLEX64, TensorProto.COMPLEX128)

Function = tuple[str, str, str]


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory; large values stay in its external files.

    ``digest`` is the SHA-256 of all its content, ``path`` None for a proto, ``side_files`` hold the
    external data, ``written_out`` says that its functions were inlined.
    """

    proto: onnx.ModelProto
    digest: str
    path: Path | None
    side_files: tuple[Path, ...] = ()
    written_out: bool = False

    @property
    def name(self) -> str:
        """The model's name in reports."""
        return str(self.path) if self.path is not None else self.proto.graph.name or "model"


def load_model(source: str | Path | onnx.ModelProto) -> LoadedModel:
    """Reads a model with its external data.

    Raises:
        BadInputError: names the file and the tensor.
    """
    if isinstance(source, onnx.ModelProto):
        return _from_memory(source)
    if not isinstance(source, (str, Path)):
        kind = type(source).__name__
        raise BadInputError(f"model: neither a path nor an onnx.ModelProto but {kind}")
    if not str(source):
        raise BadInputError("model: an empty path")
    path = Path(source)
    if not path.exists():
        raise BadInputError(f"{path}: no such file")
    if path.is_dir():
        raise BadInputError(f"{path}: a folder; give the .onnx file in it")
    model = _parsed(path)
    _check_graph(model, str(path))
    functions = bool(model.functions)
    model = normalised(model, str(path))
    side_files = _resolve_external_data(model, path)
    # Hashed last: gigabytes take seconds, and a damaged model is refused without them.
    digest = digest_of(path, *side_files)
    return LoadedModel(model, digest, path, tuple(side_files), written_out=functions)


def _from_memory(model: onnx.ModelProto) -> LoadedModel:
    _check_graph(model, "model")
    for tensor in all_tensors(model.graph):
        place = place_of(tensor)
        if place is not None and not os.path.isabs(place.path):
            raise BadInputError(
                f"model: the values of {tensor.name!r} are in another file, which a model in "
                "memory does not say where to find; give the path of the .onnx file"
            )
    plain, digest = normalised(model, "model"), proto_digest(model)
    return LoadedModel(plain, digest, None, written_out=bool(model.functions))


def _parsed(path: Path) -> onnx.ModelProto:
    model = onnx.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except OSError as error:
        if is_out_of_memory(error):
            raise MachineError(f"{path}: there is no memory to read it into") from error
        raise BadInputError(f"{path}: cannot be read ({error.strerror})") from error
    except DecodeError as error:
        raise BadInputError(
            f"{path}: not an ONNX file, or a truncated one ({one_line(error, 80)})"
        ) from error
    return model


def digest_of(*files: Path) -> str:
    """The SHA-256 of the files' content.

    Raises:
        BadInputError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for file in files:
        try:
            with file.open("rb") as stream:
                for chunk in iter(lambda: stream.read(1 << 22), b""):
                    digest.update(chunk)
        except OSError as error:
            raise BadInputError(f"{file}: cannot be read ({error.strerror})") from error
    return digest.hexdigest()


def proto_digest(model: onnx.ModelProto) -> str:
    """The SHA-256 of a model in memory; values in other files count by their place."""
    try:
        return hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest()
    except (ValueError, EncodeError):  # over protobuf's 2 GB: hashes the weights one by one
        digest = hashlib.sha256()
        graph = model.graph
        for tensor in graph.initializer:
            digest.update(f"{tensor.name} {tensor.data_type} {list(tensor.dims)}".encode())
            is_raw = tensor.HasField("raw_data")  # one tensor alone may have 2 GB
            digest.update(
                tensor.raw_data if is_raw else tensor.SerializeToString(deterministic=True)
            )
        parts = (
            *(graph.sparse_initializer, graph.node, graph.input, graph.output, graph.value_info),
            *(model.functions, model.opset_import),
        )
        for part in parts:
            for message in part:
                digest.update(message.SerializeToString(deterministic=True))
        return digest.hexdigest()


def _check_graph(model: onnx.ModelProto, where: str) -> None:
    if not model.graph.node:
        raise BadInputError(f"{where}: the graph is empty; is this an ONNX model?")
    if not model.graph.output:
        raise BadInputError(f"{where}: the graph has no outputs, so there is nothing to compare")
    if not model.opset_import:
        raise BadInputError(f"{where}: the model names no opset; export it again")
    _check_names(model.graph, where)
    for tensor in all_tensors(model.graph):
        _check_constant(tensor, where)


def _check_names(graph: onnx.GraphProto, where: str) -> None:
    """Refuses a name that is no text."""
    # Depending on its version, protobuf returns such a field as bytes or raises.
    values = (*graph.input, *graph.output, *graph.value_info, *graph.initializer)
    try:
        names: list[object] = [v.name for v in values]
        for node in graph.node:
            names += [node.name, node.op_type, node.domain, *node.input, *node.output]
            for _, body in subgraphs(node):
                _check_names(body, where)
    except UnicodeDecodeError:
        names = [b""]
    if any(isinstance(name, bytes) for name in names):
        raise BadInputError(f"{where}: holds a name that is no text; the file is damaged")


def _check_constant(tensor: TensorProto, where: str) -> None:
    """Refuses an unknown type, a negative size, or a number of values that the shape denies."""
    named = f"{where}: constant {tensor.name!r}"
    if any(d < 0 for d in tensor.dims):
        raise BadInputError(f"{named} has a negative size; export the model again")
    if tensor.data_type == TensorProto.STRING:
        return
    try:
        helper.tensor_dtype_to_np_dtype(tensor.data_type)
    except (KeyError, TypeError, ValueError):
        raise BadInputError(
            f"{named} is of the unknown type {tensor.data_type}; export the model again"
        ) from None
    # The values of external tensors are checked where their files are.
    if uses_external_data(tensor) or tensor.data_type in PACKED:
        return
    if tensor.HasField("raw_data"):
        wanted, present, unit = shape_bytes(tensor), len(tensor.raw_data), "bytes"
    else:
        field = helper.tensor_dtype_to_field(tensor.data_type)
        wanted = math.prod(tensor.dims) * (2 if tensor.data_type in _COMPLEX else 1)
        present, unit = len(getattr(tensor, field)), "values"
    if present != wanted:
        raise BadInputError(
            f"{named} holds {present} {unit}, its shape {list(tensor.dims)} needs {wanted}; the "
            "file is damaged, export the model again"
        )


def _external_range(tensor: TensorProto, where: Path) -> tuple[str, int, int]:
    """The location, first byte and end of a tensor's values in another file."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    named = f"{where}: external data of {tensor.name!r}"
    if not location or "\0" in location:
        raise BadInputError(f"{named} names no file; export the model again")
    try:
        offset, length = int(entries.get("offset") or 0), int(entries.get("length") or 0)
    except ValueError:
        offset = length = -1
    wanted = shape_bytes(tensor)
    if offset < 0 or length < 0 or (length and length != wanted):
        raise BadInputError(
            f"{named} has the offset {entries.get('offset')} and the length "
            f"{entries.get('length')}, its shape needs {wanted} bytes; export the model again"
        )
    return location, offset, offset + wanted


def _beside(path: Path, location: str) -> Path:
    """The file ``location`` beside the model, or beside the file that the model links to."""
    file, linked = (folder / location for folder in (path.parent.resolve(), path.resolve().parent))
    return linked if linked.exists() and not file.exists() else file


def _resolve_external_data(model: onnx.ModelProto, path: Path) -> list[Path]:
    """Checks the external files and gives tensors their absolute paths; reads small tensors."""
    # A link's target counts too: caches that store files by content keep models as links.
    roots = {path.parent.resolve(), path.resolve().parent}
    files: dict[Path, None] = {}
    for tensor in filter(uses_external_data, all_tensors(model.graph)):
        location, begin, end = _external_range(tensor, path)
        beside = _beside(path, location)
        file = beside.resolve()  # ONNX Runtime follows no link
        if not any(file.is_relative_to(root) for root in roots):
            link = f", a link to {file}" if beside.is_symlink() else ""
            raise BadInputError(
                f"{path}: external data of {tensor.name!r} points outside the model's folder "
                f"({location}{link}); refused"
            )
        if not file.is_file():
            raise BadInputError(
                f"{path}: external data of {tensor.name!r} is missing; expected {location} "
                "beside it"
            )
        if file.stat().st_size < end:
            raise BadInputError(
                f"{path}: external data file {location} is truncated: {tensor.name!r} ends at "
                f"byte {end}, the file has {file.stat().st_size}"
            )
        files[file] = None
        put_at(tensor, Place(str(file), begin, end - begin, stamp=stamp_of(str(file))))
        # The model stores the path as text; a path that is no text cannot be stored.
        if end - begin < MAPPED_BYTES or not str(file).isprintable():
            take_in(tensor)
    return list(files)


def normalised(model: onnx.ModelProto, where: str) -> onnx.ModelProto:
    """``model`` with functions inlined, the domain ai.onnx as '', and nodes in order."""
    plain = _inlined(model, where)
    renames = any(
        x.domain == _LONG_DOMAIN for x in (*every_node(plain.graph.node), *plain.opset_import)
    )
    unsorted = not all(map(_in_order, _graphs(plain.graph)))
    # Most models are as they should be, and a copy would take their size again.
    if not renames and not unsorted:
        return plain
    if plain is model:  # the caller's model stays unchanged
        plain = onnx.ModelProto()
        plain.CopyFrom(model)
    imports = {o.domain: o.version for o in plain.opset_import}
    if _LONG_DOMAIN in imports:
        imports.setdefault("", imports.pop(_LONG_DOMAIN))
    del plain.opset_import[:]
    plain.opset_import.extend(helper.make_opsetid(d, version) for d, version in imports.items())
    for node in every_node(plain.graph.node):
        if node.domain == _LONG_DOMAIN:
            node.domain = ""
    for graph in _graphs(plain.graph):
        if not _in_order(graph):
            _sort(graph, where)
    return plain


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for _, body in subgraphs(node):
            yield from _graphs(body)


def _in_order(graph: onnx.GraphProto) -> bool:
    """Whether every node comes after the nodes whose outputs it reads."""
    made_here = {name for node in graph.node for name in node.output if name}
    ready: set[str] = set()
    for node in graph.node:
        if not ready.issuperset(made_here.intersection(tensors_read(node))):
            return False
        ready.update(node.output)
    return True


def _sort(graph: onnx.GraphProto, where: str) -> None:
    """Puts the nodes into topological order."""
    nodes = list(graph.node)
    maker = {name: i for i, node in enumerate(nodes) for name in node.output if name}
    needs = {
        index: sorted(maker[name] for name in tensors_read(node) if name in maker)
        for index, node in enumerate(nodes)
    }
    try:
        order = list(graphlib.TopologicalSorter(needs).static_order())
    except graphlib.CycleError as error:
        name = nodes[error.args[1][0]].output[0]
        raise BadInputError(
            f"{where}: not a graph: tensor {name!r} is computed from itself; export the model again"
        ) from error
    replace_nodes(graph, [nodes[index] for index in order])


def _inlined(model: onnx.ModelProto, where: str) -> onnx.ModelProto:
    """``model`` without model-local functions, whose nodes are named ``call/node``."""
    if not model.functions:
        return model
    # Layers are found by name: nodes without one could not be told from each other.
    model = _named_inside(model)
    try:
        plain = inliner.inline_local_functions(model)
    except Exception as error:  # the C++ library raises several kinds
        raise BadInputError(
            f"{where}: its model-local functions cannot be written out ({one_line(error, 160)}), "
            "and layers inside them could not be reduced; export the model without functions"
        ) from error
    # The inliner appends the number of the call; the call's name in its place makes layer ids
    # that survive edits. Functions of another opset are not inlined and have no numbers.
    outer_names = {node.name for node in every_node(model.graph.node)}
    remaining = _bodies(plain)
    bodies = {key: body for key, body in _bodies(model).items() if key not in remaining}
    calls = list(_calls(model.graph.node, bodies, "", 0))
    for node in every_node(plain.graph.node):
        match = _NUMBERED.match(node.name)
        if match and node.name not in outer_names and 0 < int(match[2]) <= len(calls):
            node.name = f"{calls[int(match[2]) - 1]}/{match[1]}"
    return plain


def _named_inside(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy in which every node of a function has a name, which the inliner needs to number it."""
    named = onnx.ModelProto()
    named.CopyFrom(model)
    for function in named.functions:
        for node in every_node(function.node):
            if not node.name and node.output:
                node.name = f"{node.op_type}_{node.output[0]}"
    return named


def _bodies(model: onnx.ModelProto) -> dict[Function, onnx.FunctionProto]:
    return {(f.domain, f.name, f.overload): f for f in model.functions}


def _calls(
    nodes: Iterable[onnx.NodeProto],
    bodies: dict[Function, onnx.FunctionProto],
    scope: str,
    depth: int,
) -> Iterator[str]:
    """The names of function calls in the order in which the inliner numbers them."""
    if depth > len(bodies):
        return  # a function that calls itself, which the inliner refuses
    for node in nodes:
        body = bodies.get((node.domain, node.op_type, node.overload))
        if body is None:
            for _, graph in subgraphs(node):
                yield from _calls(graph.node, bodies, scope, depth)
            continue
        name = node.name or f"{node.op_type}_{next(iter(node.output), '')}"
        full = f"{scope}/{name}" if scope else name
        yield full
        yield from _calls(body.node, bodies, full, depth + 1)
