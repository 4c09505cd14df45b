"""Models in and out of files: checked before use, written whole or not at all."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError, EncodeError
from onnx import TensorProto, helper
from onnx.external_data_helper import (
    load_external_data_for_model,
    uses_external_data,
)

from bisect_trt.core.errors import BadInputError, BisectError, MachineError, is_disk_full, one_line
from bisect_trt.core.files import write_whole, written_whole
from bisect_trt.core.scratch import scratch
from bisect_trt.graph.constant_checks import check_constant, external_range
from bisect_trt.graph.normalised import normalised
from bisect_trt.graph.tensor_types import subgraphs

_PROTOBUF_LIMIT = 2**31 - (64 << 20)
"""Protobuf writes less than 2 GB; 64 MB are left for everything that is not a weight."""


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory: ``path`` is None if it was given as a proto; ``digest`` is the SHA-256 of
    its content; ``side_files`` hold its external data.
    """

    proto: onnx.ModelProto
    digest: str
    path: Path | None
    side_files: tuple[Path, ...] = ()

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
        return LoadedModel(normalised(source, "model"), _proto_digest(source), None)
    if not str(source):
        raise BadInputError("model: an empty path")
    path = Path(source)
    if not path.exists():
        raise BadInputError(f"{path}: no such file")
    if path.is_dir():
        raise BadInputError(f"{path}: a folder; give the .onnx file in it")
    digest = hashlib.sha256()
    try:
        data = path.read_bytes()
        digest.update(data)
        model = onnx.ModelProto()
        model.ParseFromString(data)
        del data
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read ({error.strerror})") from error
    except DecodeError as error:
        raise BadInputError(
            f"{path}: not an ONNX file, or a truncated one ({one_line(error, 80)})"
        ) from error
    _check_graph(model, str(path))
    model = normalised(model, str(path))  # before its weights are read: copies are small
    side_files = _check_external_data(model, path)
    for file in side_files:
        with file.open("rb") as stream:
            for chunk in iter(lambda: stream.read(1 << 22), b""):
                digest.update(chunk)
    try:
        load_external_data_for_model(model, str(path.parent))
    except Exception as error:  # the library raises ValidationError, OSError and ValueError here
        raise BadInputError(
            f"{path}: its external data cannot be read ({one_line(error)})"
        ) from error
    return LoadedModel(model, digest.hexdigest(), path, tuple(side_files))


@contextmanager
def loadable(model: onnx.ModelProto) -> Iterator[str | bytes]:
    """``model`` in a form that ONNX Runtime loads: its bytes, or over 2 GB a file that lives as
    long as the context.
    """
    if weights_size(model) < _PROTOBUF_LIMIT:
        yield model.SerializeToString()
        return
    with scratch("model") as folder:
        path = Path(folder) / "model.onnx"
        save_model(model, path)
        yield str(path)


def save_model(model: onnx.ModelProto, path: Path) -> None:
    """Write ``model`` to ``path`` in one step; over 2 GB the weights go beside it, into
    ``<name>.data``.

    Raises:
        BadInputError: the folder cannot be written.
        MachineError: the disk is full.
    """
    try:
        with written_whole(path) as draft:
            if weights_size(model) < _PROTOBUF_LIMIT:
                onnx.save_model(model, str(draft))
                return
            side = f"{path.name}.data"
            onnx.save_model(
                model, str(draft), save_as_external_data=True, location=side, size_threshold=1024
            )
            (draft.parent / side).chmod(0o644)
            os.replace(draft.parent / side, path.parent / side)
    except OSError as error:
        raise _not_written(path, error) from error


def save_text(text: str, path: Path) -> None:
    """Write ``text`` to ``path`` in one step. Raises as :func:`save_model`."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise _not_written(path, error) from error


def check_target(target: Path, model: LoadedModel, *sources: Path) -> None:
    """Refuse to write over what is read.

    Args:
        target: what would be written; a model of over 2 GB puts a file beside it.
        model: the source.
        sources: what else is read.

    Raises:
        BadInputError: ``target`` is one of them, or no regular file.
    """
    if target.exists() and not target.is_file():
        raise BadInputError(
            f"--output {target}: not a regular file; give the name of one, or leave it out to print"
        )
    read = [p for p in (model.path, *model.side_files, *sources) if p is not None]
    for written in (target, target.with_name(f"{target.name}.data")):
        for source in read:
            if written.exists() and source.exists() and written.samefile(source):
                raise BadInputError(
                    f"--output {target}: {source} would be written over; choose another name"
                )


def _not_written(path: Path, error: OSError) -> BisectError:
    if is_disk_full(error):
        return MachineError(f"{path}: the disk is full; free some space")
    return BadInputError(f"{path}: cannot be written ({error.strerror})")


def _check_graph(model: onnx.ModelProto, where: str) -> None:
    if not model.graph.node:
        raise BadInputError(f"{where}: the graph is empty; is this an ONNX model?")
    if not model.graph.output:
        raise BadInputError(f"{where}: the graph has no outputs, so there is nothing to compare")
    if not model.opset_import:
        raise BadInputError(f"{where}: the model names no opset; export it again")
    _check_names(model.graph, where)
    for tensor in _all_tensors(model.graph):
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
    enough.
    """
    folder = path.parent.resolve()
    files: dict[Path, None] = {}
    for tensor in _all_tensors(model.graph):
        if not uses_external_data(tensor):
            continue
        location, _, end = external_range(tensor, path)
        file = (folder / location).resolve()
        if not file.is_relative_to(folder):
            raise BadInputError(
                f"{path}: external data of {tensor.name!r} points outside the model's folder "
                f"({location}); refused"
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


def _all_tensors(graph: onnx.GraphProto) -> list[TensorProto]:
    tensors = list(graph.initializer)
    for node in graph.node:
        tensors += [a.t for a in node.attribute if a.HasField("t")]
        for _, body in subgraphs(node):
            tensors += _all_tensors(body)
    return tensors


def weights_size(model: onnx.ModelProto) -> int:
    """The bytes of all tensors, computed from their shapes so that nothing is copied."""
    return sum(
        math.prod(t.dims) * helper.tensor_dtype_to_np_dtype(t.data_type).itemsize
        for t in _all_tensors(model.graph)
        if t.data_type != TensorProto.STRING
    )


def _proto_digest(model: onnx.ModelProto) -> str:
    try:
        return hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest()
    except (ValueError, EncodeError):  # over protobuf's 2 GB: hash the weights apart
        digest = hashlib.sha256()
        for tensor in _all_tensors(model.graph):
            digest.update(tensor.name.encode() + tensor.raw_data)
        for node in model.graph.node:
            digest.update(
                f"{node.op_type}{node.name}{list(node.input)}{list(node.output)}".encode()
            )
        return digest.hexdigest()
