"""Models out of files, checked before use; the values of large tensors stay in the files."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError, EncodeError
from onnx.external_data_helper import uses_external_data

from bisect_trt.core.errors import BadInputError, MachineError, is_out_of_memory, one_line
from bisect_trt.graph.files.constant_checks import check_constant, external_range
from bisect_trt.graph.files.normalised import normalised
from bisect_trt.graph.tensors.mapped_files import mapped
from bisect_trt.graph.tensors.tensor_types import subgraphs
from bisect_trt.graph.tensors.tensor_values import Place, all_tensors, place_of, put_at
from bisect_trt.graph.tensors.wire import EMBEDDED, LEAST, WireError, without_large_values


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

    Args:
        source: a path, or the model.

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
