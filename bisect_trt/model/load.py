"""A model for ONNX's own tools, which would look for values that lie in files in their own way."""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError, EncodeError
from onnx import TensorProto, helper, inliner, numpy_helper
from onnx.external_data_helper import uses_external_data

from bisect_trt.base.errors import BadInputError, MachineError, is_out_of_memory, one_line
from bisect_trt.model.tensor_types import (
    captured_names,
    every_node,
    subgraphs,
    tensor_names,
    unused,
)
from bisect_trt.model.tensor_values import (
    EMBEDDED,
    LEAST,
    PACKED,
    Place,
    WireError,
    all_tensors,
    mapped,
    place_of,
    put_at,
    without_large_values,
)

_NUMBERED = re.compile(r"^(.*)__(\d+)$", re.DOTALL)


Function = tuple[str, str, str]


def inlined(model: onnx.ModelProto, where: str) -> onnx.ModelProto:
    """``model`` without model-local functions: itself where it has none.

    A node of a function bears the name of the call and its own, ``block.3/matmul``, calls within
    calls likewise.

    Raises:
        BadInputError: the functions cannot be written out.
    """
    if not model.functions:
        return model
    model = _named_inside(model)
    try:
        plain = inliner.inline_local_functions(model)
    except Exception as error:  # the C++ library raises what it likes for functions it refuses
        raise BadInputError(
            f"{where}: its model-local functions cannot be written out ({one_line(error, 160)}), "
            "and layers inside them could not be reduced; export the model without functions"
        ) from error
    own = {node.name for node in every_node(model.graph.node)}
    # Functions of another opset than the model's are left, and their calls have no numbers.
    left = _bodies(plain)
    bodies = {key: body for key, body in _bodies(model).items() if key not in left}
    calls = list(_calls(model.graph.node, bodies, "", 0))
    for node in every_node(plain.graph.node):
        found = _NUMBERED.match(node.name)
        if found is None or node.name in own or not 0 < int(found.group(2)) <= len(calls):
            continue
        node.name = f"{calls[int(found.group(2)) - 1]}/{found.group(1)}"
    return plain


def _named_inside(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with a name for every node of its functions: the inliner numbers names alone."""
    inside = [node for f in model.functions for node in every_node(f.node)]
    if all(node.name for node in inside):
        return model
    named = onnx.ModelProto()
    named.CopyFrom(model)
    for function in named.functions:
        for node in every_node(function.node):
            if not node.name and node.output:
                node.name = f"{node.op_type}_{node.output[0]}"
    return named


def _bodies(model: onnx.ModelProto) -> dict[Function, onnx.FunctionProto]:
    return {(f.domain, f.name, getattr(f, "overload", "")): f for f in model.functions}


def _calls(
    nodes: Iterable[onnx.NodeProto],
    bodies: dict[Function, onnx.FunctionProto],
    scope: str,
    depth: int,
) -> Iterator[str]:
    """The calls' names in the order in which the inliner numbers them: as they come, what a call
    calls behind it.
    """
    if depth > len(bodies):
        return  # a function that calls itself: the inliner has refused it
    for node in nodes:
        body = bodies.get((node.domain, node.op_type, getattr(node, "overload", "")))
        if body is None:
            for _, graph in subgraphs(node):
                yield from _calls(graph.node, bodies, scope, depth)
            continue
        name = node.name or f"{node.op_type}_{next(iter(node.output), '')}"
        full = f"{scope}/{name}" if scope else name
        yield full
        yield from _calls(body.node, bodies, full, depth + 1)


_SPELLED_OUT = "ai.onnx"


def normalised(model: onnx.ModelProto, where: str) -> onnx.ModelProto:
    """``model``, or a copy of it where something is to be put right.

    Raises:
        BadInputError: its functions cannot be written out.
    """
    plain = inlined(model, where)
    spelled = any(n.domain == _SPELLED_OUT for n in every_node(plain.graph.node)) or any(
        o.domain == _SPELLED_OUT for o in plain.opset_import
    )
    unsorted = any(not _in_order(graph) for graph in _graphs(plain.graph))
    if not spelled and not unsorted:
        return plain
    if plain is model:
        plain = onnx.ModelProto()
        plain.CopyFrom(model)
    for node in every_node(plain.graph.node):
        if node.domain == _SPELLED_OUT:
            node.domain = ""
    _spell_imports(plain)
    for graph in _graphs(plain.graph):
        if not _in_order(graph):
            _sort(graph)
    return plain


def _spell_imports(model: onnx.ModelProto) -> None:
    named = any(o.domain == "" for o in model.opset_import)
    kept = [o for o in model.opset_import if o.domain != _SPELLED_OUT or not named]
    imports = [onnx.OperatorSetIdProto(domain=o.domain, version=o.version) for o in kept]
    for entry in imports:
        if entry.domain == _SPELLED_OUT:
            entry.domain = ""
    del model.opset_import[:]
    model.opset_import.extend(imports)


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for _, body in subgraphs(node):
            yield from _graphs(body)


def _reads(node: onnx.NodeProto) -> set[str]:
    return {name for name in node.input if name}.union(captured_names(node))


def _in_order(graph: onnx.GraphProto) -> bool:
    """Whether every node stands behind those whose outputs it reads."""
    made_here = {name for node in graph.node for name in node.output if name}
    ready: set[str] = set()
    for node in graph.node:
        if not ready.issuperset(_reads(node) & made_here):
            return False
        ready.update(node.output)
    return True


def _sort(graph: onnx.GraphProto) -> None:
    """Put the nodes into topological order, each reader as soon as what it reads is there; a graph
    with a cycle is left alone, for ONNX Runtime to refuse.
    """
    order = list(_ordered(list(graph.node)))
    if len(order) == len(graph.node):
        copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in order]
        del graph.node[:]
        graph.node.extend(copies)


def _ordered(nodes: list[onnx.NodeProto]) -> Iterable[onnx.NodeProto]:
    maker = {name: i for i, node in enumerate(nodes) for name in node.output if name}
    needs = [{maker[name] for name in _reads(node) if name in maker} for node in nodes]
    readers: dict[int, list[int]] = {}
    for index, needed in enumerate(needs):
        for source in needed:
            readers.setdefault(source, []).append(index)
    waiting = sorted((i for i, needed in enumerate(needs) if not needed), reverse=True)
    while waiting:
        index = waiting.pop()
        yield nodes[index]
        for reader in reversed(readers.get(index, [])):
            needs[reader].discard(index)
            if not needs[reader]:
                waiting.append(reader)


_COMPLEX = (TensorProto.COMPLEX64, TensorProto.COMPLEX128)


def check_constant(tensor: TensorProto, where: str) -> None:
    """Refuse a tensor of an unknown type, of a negative size, or with another number of values
    than its shape promises. One whose values lie in another file is not looked into.

    Raises:
        BadInputError: names the tensor.
    """
    named = f"{where}: constant {tensor.name!r}"
    if any(d < 0 for d in tensor.dims):
        raise BadInputError(f"{named} has a negative size; export the model again")
    if tensor.data_type == TensorProto.STRING:
        return
    try:
        itemsize = helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    except (KeyError, TypeError, ValueError):
        raise BadInputError(
            f"{named} is of the unknown type {tensor.data_type}; export the model again"
        ) from None
    place = {entry.key: entry.value for entry in tensor.external_data}
    apart = uses_external_data(tensor)
    if (apart and place.get("location") != EMBEDDED) or tensor.data_type in PACKED:
        return
    count = math.prod(tensor.dims)
    wanted: int | str
    held: int | str
    if apart:
        wanted, held, unit = str(count * itemsize), place.get("length", ""), "bytes"
    elif tensor.HasField("raw_data"):
        wanted, held, unit = count * itemsize, len(tensor.raw_data), "bytes"
    else:
        field = helper.tensor_dtype_to_field(tensor.data_type)
        wanted = count * (2 if tensor.data_type in _COMPLEX else 1)
        held, unit = len(getattr(tensor, field)), "values"
    if held != wanted:
        raise BadInputError(
            f"{named} holds {held} {unit}, its shape {list(tensor.dims)} needs {wanted}; the file "
            "is damaged, export the model again"
        )


def external_range(tensor: TensorProto, where: Path) -> tuple[str, int, int]:
    """(location, first byte, one behind the last byte) of a tensor's values in another file.

    Raises:
        BadInputError: its location, offset or length is none.
    """
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    named = f"{where}: external data of {tensor.name!r}"
    if not location or ("\0" in location and location != EMBEDDED):
        raise BadInputError(f"{named} names no file; export the model again")
    try:
        offset, length = int(entries.get("offset") or 0), int(entries.get("length") or 0)
    except ValueError:
        offset = length = -1
    itemsize = helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    bits = PACKED.get(tensor.data_type, 8 * itemsize)
    wanted = -(-math.prod(tensor.dims) * bits // 8)  # rounded up to whole bytes
    if offset < 0 or length < 0 or (length and length != wanted):
        raise BadInputError(
            f"{named} has the offset {entries.get('offset')} and the length "
            f"{entries.get('length')}, its shape needs {wanted} bytes; export the model again"
        )
    return location, offset, offset + (length or wanted)


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory, without the large values that lie in its files (see ``tensor_values``):
    ``path`` is None if it was given as a proto; ``side_files`` hold its external data.
    ``digest`` is the SHA-256 of all that was given.
    """

    proto: onnx.ModelProto
    digest: str
    path: Path | None
    side_files: tuple[Path, ...] = ()
    written_out: bool = False

    @property
    def name(self) -> str:
        """What to call the model in reports."""
        return str(self.path) if self.path is not None else self.proto.graph.name or "model"


def load_model(source: str | Path | onnx.ModelProto) -> LoadedModel:
    """Read a model with its external data.

    Raises:
        BadInputError: names the file and the tensor.
    """
    if isinstance(source, onnx.ModelProto):
        _check_graph(source, "model")
        for apart in all_tensors(source.graph):
            place = place_of(apart)
            if place is None or os.path.isabs(place.path):
                continue
            raise BadInputError(
                f"model: the values of {apart.name!r} are in another file, which a model in memory "
                "does not say where to find; give the path of the .onnx file"
            )
        plain, digest = normalised(source, "model"), _proto_digest(source)
        return LoadedModel(plain, digest, None, written_out=bool(source.functions))
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
    side_files = _check_external_data(model, path)
    _point_at_values(model, path)
    digest = _digest(path, *side_files)
    return LoadedModel(model, digest, path, tuple(side_files), written_out=functions)


def _parsed(path: Path) -> onnx.ModelProto:
    """The file's model; values that are large are left in the file.

    Raises:
        BadInputError: it cannot be read, or is no model.
    """
    model = onnx.ModelProto()
    try:
        model.ParseFromString(_content(path))
    except OSError as error:
        if is_out_of_memory(error):
            raise MachineError(f"{path}: there is no memory to read it into") from error
        raise BadInputError(f"{path}: cannot be read ({error.strerror})") from error
    except DecodeError as error:
        raise BadInputError(
            f"{path}: not an ONNX file, or a truncated one ({one_line(error, 80)})"
        ) from error
    return model


def _content(path: Path) -> bytes:
    if not path.is_file() or path.stat().st_size < LEAST or not _can_be_named(path):
        return path.read_bytes()
    size = (path.stat().st_size,)
    whole = mapped(os.path.realpath(path), np.dtype(np.uint8), 0, size)
    try:
        return without_large_values(whole.data)
    except WireError:
        return whole.tobytes()  # the parser has better words for it


def _can_be_named(path: Path) -> bool:
    """Whether a model can name the file: the bytes of a file's name need not be text."""
    return os.path.realpath(path).isprintable()


def _digest(*files: Path) -> str:
    """The SHA-256 of the files' content.

    Raises:
        BadInputError: one cannot be read.
    """
    found = hashlib.sha256()
    for file in files:
        try:
            with file.open("rb") as stream:
                for chunk in iter(lambda: stream.read(1 << 22), b""):
                    found.update(chunk)
        except OSError as error:
            raise BadInputError(f"{file}: cannot be read ({error.strerror})") from error
    return found.hexdigest()


def _point_at_values(model: onnx.ModelProto, path: Path) -> None:
    """Let every tensor that lies in a file say in which, in full; small ones are read.

    Raises:
        BadInputError: a file cannot be read.
    """
    for tensor in all_tensors(model.graph):
        if not uses_external_data(tensor):
            continue
        location, begin, end = external_range(tensor, path)
        file = path if location == EMBEDDED else _beside(path, location)
        name = os.path.realpath(file)  # ONNX Runtime follows no link
        if end - begin >= LEAST and _can_be_named(file):
            put_at(tensor, Place(name, begin, end - begin))
            continue
        tensor.raw_data = mapped(name, np.dtype(np.uint8), begin, (end - begin,)).tobytes()
        tensor.ClearField("data_location")
        del tensor.external_data[:]


def _beside(path: Path, location: str) -> Path:
    """A file of the model's weights: beside it, or beside what it is a link to."""
    file, other = (folder / location for folder in (path.parent.resolve(), path.resolve().parent))
    return other if other.exists() and not file.exists() else file


def _check_graph(model: onnx.ModelProto, where: str) -> None:
    if not model.graph.node:
        raise BadInputError(f"{where}: the graph is empty; is this an ONNX model?")
    if not model.graph.output:
        raise BadInputError(f"{where}: the graph has no outputs, so there is nothing to compare")
    if not model.opset_import:
        raise BadInputError(f"{where}: the model names no opset; export it again")
    _check_names(model.graph, where)
    for tensor in all_tensors(model.graph):
        check_constant(tensor, where)


def _check_names(graph: onnx.GraphProto, where: str) -> None:
    """Protobuf hands out what is no text as bytes, or raises when it is read."""
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


def _check_external_data(model: onnx.ModelProto, path: Path) -> list[Path]:
    """The external files, each checked to lie inside the model's folder, exist and be long
    enough. Where the model is a link, as in caches that keep files by their content, the folder
    that it leads to is the model's too.
    """
    folder = path.parent.resolve()
    roots = {folder, path.resolve().parent}
    files: dict[Path, None] = {}
    for tensor in all_tensors(model.graph):
        if not uses_external_data(tensor):
            continue
        location, _, end = external_range(tensor, path)
        if location == EMBEDDED:
            continue
        beside = _beside(path, location)
        file = beside.resolve()
        if not any(file.is_relative_to(root) for root in roots):
            raise BadInputError(
                f"{path}: external data of {tensor.name!r} points outside the model's folder "
                f"({location}{f', a link to {file}' if beside.is_symlink() else ''}); "
                "refused"
            )
        if not file.is_file():
            raise BadInputError(
                f"{path}: external data of {tensor.name!r} is missing; expected {location} "
                "beside it"
            )
        if file.stat().st_size < end:
            raise BadInputError(
                f"{path}: external data file {location} is truncated: {tensor.name!r} ends at "
                f"byte {end}, "
                f"the file has {file.stat().st_size}"
            )
        files[file] = None
    return list(files)


def _proto_digest(model: onnx.ModelProto) -> str:
    try:
        return hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest()
    except (ValueError, EncodeError):  # over protobuf's 2 GB: hash the weights apart
        digest = hashlib.sha256()
        graph = model.graph
        for tensor in graph.initializer:
            digest.update(f"{tensor.name} {tensor.data_type} {list(tensor.dims)}".encode())
            held = tensor.HasField("raw_data")  # one alone may be of 2 GB
            digest.update(tensor.raw_data if held else tensor.SerializeToString(deterministic=True))
        parts = (
            *(graph.sparse_initializer, graph.node, graph.input, graph.output, graph.value_info),
            *(model.functions, model.opset_import),
        )
        for part in parts:
            for message in part:
                digest.update(message.SerializeToString(deterministic=True))
        return digest.hexdigest()


def values_aside(model: onnx.ModelProto) -> onnx.ModelProto:
    """``model``, or a copy in which constants whose values lie in files are inputs, or identities
    of some, and those of bodies zeros. Nodes of the main graph keep their places.
    """
    apart = [t for t in model.graph.initializer if place_of(t) is not None]
    large = {i: t for i, n in enumerate(model.graph.node) if (t := _apart(n)) is not None}
    inside = any(
        place_of(tensor) is not None
        for node in model.graph.node
        for _, body in subgraphs(node)
        for tensor in all_tensors(body)
    )
    if not apart and not large and not inside:
        return model
    light = onnx.ModelProto()
    light.CopyFrom(model)
    graph = light.graph
    kept = [t for t in model.graph.initializer if place_of(t) is None]
    declared = {i.name for i in graph.input}
    del graph.initializer[:]
    graph.initializer.extend(kept)
    stand_ins = [(t.name, t) for t in apart if t.name not in declared]
    taken = tensor_names(model.graph) if large else set[str]()
    for index, tensor in large.items():
        node = graph.node[index]
        stand_ins.append((unused(f"{node.output[0]}__value", taken), tensor))
        node.CopyFrom(
            helper.make_node("Identity", [stand_ins[-1][0]], list(node.output), node.name)
        )
    graph.input.extend(
        helper.make_tensor_value_info(name, t.data_type, list(t.dims)) for name, t in stand_ins
    )
    for node in graph.node if inside else ():
        for _, body in subgraphs(node):
            _empty(body)
    return light


def _empty(body: onnx.GraphProto) -> None:
    """Let constants of ``body`` whose values lie in files be zeros of their shape and type."""
    apart = [t for t in body.initializer if place_of(t) is not None]
    kept = [t for t in body.initializer if place_of(t) is None]
    nodes = [node for tensor in apart for node in _zeros(tensor, tensor.name)]
    for node in body.node:
        tensor = _apart(node)
        nodes += [node] if tensor is None else _zeros(tensor, node.output[0])
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del body.initializer[:], body.node[:]
    body.initializer.extend(kept)
    body.node.extend(copies)
    for node in body.node:
        for _, inner in subgraphs(node):
            _empty(inner)


def _zeros(tensor: TensorProto, name: str) -> list[onnx.NodeProto]:
    shape = numpy_helper.from_array(np.asarray(tensor.dims, np.int64))
    zero = helper.make_tensor("", tensor.data_type, [1], [0])
    return [
        helper.make_node("Constant", [], [f"{name}__shape"], value=shape),
        helper.make_node("ConstantOfShape", [f"{name}__shape"], [name], value=zero),
    ]


def _apart(node: onnx.NodeProto) -> TensorProto | None:
    if node.op_type != "Constant" or not node.attribute or not node.attribute[0].HasField("t"):
        return None
    tensor = node.attribute[0].t
    return tensor if place_of(tensor) is not None else None
