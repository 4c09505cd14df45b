"""Models into files: written whole or not at all, their weights a few megabytes at a time."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

import numpy as np
import onnx
from onnx import TensorProto

from bisect_trt.core.disk.files import write_whole, written_whole
from bisect_trt.core.disk.part_copy import BLOCK, copy_part
from bisect_trt.core.disk.scratch import sweep
from bisect_trt.core.errors import (
    BadInputError,
    not_written,
)
from bisect_trt.graph.files.load import LoadedModel
from bisect_trt.graph.tensors.mapped_files import mapped
from bisect_trt.graph.tensors.tensor_values import (
    Place,
    all_tensors,
    pieces_of,
    place_of,
    put_at,
    size_of,
)
from bisect_trt.graph.tensors.wire import tag_of

PROTOBUF_LIMIT = 2**31 - (64 << 20)
"""Protobuf writes less than 2 GB; 64 MB are left for everything that is not a weight."""

_APART = 1024
"""Bytes from which on a tensor goes into the file beside a model of over 2 GB."""

_ALIGNED = 64
"""Where a tensor's values begin in such a file: what a runtime maps it may read in wide steps."""

_SHARED = 1 << 20
"""Bytes from which on values that stay as they are may share their blocks with the source's."""

_GRAPH, _INITIALIZER, _RAW_DATA = 7, 5, 9


def weights_size(model: onnx.ModelProto) -> int:
    """The bytes of all tensors, computed from their shapes so that nothing is read."""
    return sum(size_of(tensor) for tensor in all_tensors(model.graph))


def held_size(model: onnx.ModelProto) -> int:
    """The bytes of those tensors that ``model`` holds itself."""
    return sum(size_of(t) for t in all_tensors(model.graph) if place_of(t) is None)


def save_model(model: onnx.ModelProto, path: Path) -> None:
    """Write ``model`` to ``path`` in one step; over 2 GB the weights go beside it, into
    ``<name>.data``.

    Raises:
        BadInputError: the folder cannot be written, or a file that holds weights has changed.
        MachineError: the disk is full.
    """
    sweep(path.parent)  # what a killed run was writing may be as large as a model
    try:
        with written_whole(path) as draft:
            if weights_size(model) < PROTOBUF_LIMIT:
                with draft.open("wb") as stream:
                    write_model(model, stream)
                return
            side, inside = f"{path.name}.data", types_inside(model)
            with (draft.parent / side).open("wb") as stream:

                def put(tensor: TensorProto) -> None:
                    if size_of(tensor) < _APART or tensor.data_type in inside:
                        take_in(tensor)
                    else:
                        spill(tensor, stream, side)

                draft.write_bytes(moved(model, put).SerializeToString())
            (draft.parent / side).chmod(0o644)
            path.unlink(missing_ok=True)  # no older model stands beside newer weights
            os.replace(draft.parent / side, path.parent / side)
    except OSError as error:
        raise not_written(str(path), error) from error


def save_text(text: str, path: Path) -> None:
    """Write ``text`` to ``path`` in one step.

    Raises:
        BadInputError: as :func:`save_model`.
    """
    try:
        write_whole(path, text)
    except OSError as error:
        raise not_written(str(path), error) from error


def write_model(model: onnx.ModelProto, stream: IO[bytes]) -> None:
    """Write ``model`` as one protobuf message that holds all values.

    Args:
        model: of less than 2 GB in all.
        stream: where to.
    """
    tensors = list(model.graph.initializer)
    if all(place_of(t) is None for t in all_tensors(model.graph)):
        stream.write(model.SerializeToString())
        return
    head, rest = onnx.ModelProto(), onnx.GraphProto()
    head.CopyFrom(model)
    rest.CopyFrom(model.graph)
    head.ClearField("graph")
    rest.ClearField("initializer")
    for inner in all_tensors(rest):  # of attributes and bodies: few are large
        take_in(inner)
    begins = [_begin_of(t) for t in tensors]
    lengths = [
        len(begin) + (size_of(t) if place_of(t) is not None else 0)
        for begin, t in zip(begins, tensors, strict=True)
    ]
    tags = [tag_of(_INITIALIZER, length) for length in lengths]
    others = rest.SerializeToString()
    stream.write(head.SerializeToString())
    stream.write(tag_of(_GRAPH, len(others) + sum(map(len, tags)) + sum(lengths)))
    stream.write(others)
    for tag, begin, tensor in zip(tags, begins, tensors, strict=True):
        stream.write(tag + begin)
        if place_of(tensor) is not None:
            stream.writelines(pieces_of(tensor))


def _begin_of(tensor: TensorProto) -> bytes:
    """All of a serialised tensor but for values that lie in a file, which follow."""
    if place_of(tensor) is None:
        return bytes(tensor.SerializeToString())
    head = TensorProto()
    head.CopyFrom(tensor)
    head.ClearField("data_location")
    del head.external_data[:]
    return bytes(head.SerializeToString()) + tag_of(_RAW_DATA, size_of(tensor))


def moved(model: onnx.ModelProto, move: Callable[[TensorProto], None]) -> onnx.ModelProto:
    """A copy of ``model`` of which ``move`` has changed every tensor in place."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for tensor in all_tensors(copy.graph):
        move(tensor)
    return copy


def types_inside(model: onnx.ModelProto, held: int = 0) -> frozenset[int]:
    """The types of values that have to stay in the model itself: float64, of which TensorRT's
    parser makes FP32, but not of what lies in a file ("Unexpected size for the external weights",
    TensorRT for RTX 1.6.1.120). None where a message has no room for them.

    Args:
        model: with values in files.
        held: bytes that stay in it anyway.
    """
    doubles = (t for t in all_tensors(model.graph) if t.data_type == TensorProto.DOUBLE)
    fits = 2 * (held + sum(map(size_of, doubles))) < PROTOBUF_LIMIT
    return frozenset({TensorProto.DOUBLE} if fits else ())


def take_in(tensor: TensorProto) -> None:
    """Let ``tensor`` hold its values itself, in place."""
    if place_of(tensor) is not None:
        tensor.raw_data = b"".join(pieces_of(tensor))
        tensor.ClearField("data_location")
        del tensor.external_data[:]


def spill(tensor: TensorProto, stream: IO[bytes], location: str) -> None:
    """Append the values of ``tensor`` to a file and let it say so, in place.

    Args:
        tensor: of numbers.
        stream: to the file.
        location: what the tensor calls it.
    """
    place, size = place_of(tensor), size_of(tensor)
    if place is not None and size >= _SHARED and _lies_alike(place):
        stream.write(b"\0" * ((place.offset - stream.tell()) % BLOCK))
        offset = stream.tell()
        mapped(place.path, np.dtype(np.uint8), place.offset, (size,))  # refuses what has changed
        copy_part(Path(place.path), place.offset, size, stream)
    else:
        stream.write(b"\0" * (-stream.tell() % _ALIGNED))
        offset = stream.tell()
        stream.writelines(pieces_of(tensor))
    put_at(tensor, Place(location, offset, size))


def _lies_alike(place: Place) -> bool:
    """Whether the values stay as they are, and begin where they may in the other file too."""
    return place.rounding is None and place.offset % _ALIGNED == 0


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
