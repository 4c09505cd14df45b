"""Models on disk: as files to ship, and in the forms that runtimes read."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import numpy as np
import onnx
from onnx import TensorProto

from bisect_trt.base.atomic_files import (
    BLOCK,
    copy_part,
    scratch,
    sweep,
    write_whole,
    written_whole,
)
from bisect_trt.base.errors import BadInputError, MachineError, not_written, one_line
from bisect_trt.model.load import LoadedModel
from bisect_trt.model.tensor_values import (
    LEAST,
    Place,
    all_tensors,
    mapped,
    place_of,
    put_at,
    size_of,
    subgraphs_of,
    tag_of,
)

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
    """Write ``model`` as one protobuf message that holds all values."""
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
            stream.writelines(subgraphs_of(tensor))


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
    """
    doubles = (t for t in all_tensors(model.graph) if t.data_type == TensorProto.DOUBLE)
    fits = 2 * (held + sum(map(size_of, doubles))) < PROTOBUF_LIMIT
    return frozenset({TensorProto.DOUBLE} if fits else ())


def take_in(tensor: TensorProto) -> None:
    """Let ``tensor`` hold its values itself, in place."""
    if place_of(tensor) is not None:
        tensor.raw_data = b"".join(subgraphs_of(tensor))
        tensor.ClearField("data_location")
        del tensor.external_data[:]


def spill(tensor: TensorProto, stream: IO[bytes], location: str) -> None:
    """Append the values of ``tensor`` to a file and let it say so, in place."""
    place, size = place_of(tensor), size_of(tensor)
    if place is not None and size >= _SHARED and _lies_alike(place):
        stream.write(b"\0" * ((place.offset - stream.tell()) % BLOCK))
        offset = stream.tell()
        mapped(place.path, np.dtype(np.uint8), place.offset, (size,))  # refuses what has changed
        copy_part(Path(place.path), place.offset, size, stream)
    else:
        stream.write(b"\0" * (-stream.tell() % _ALIGNED))
        offset = stream.tell()
        stream.writelines(subgraphs_of(tensor))
    put_at(tensor, Place(location, offset, size))


def _lies_alike(place: Place) -> bool:
    """Whether the values stay as they are, and begin where they may in the other file too."""
    return place.rounding is None and place.offset % _ALIGNED == 0


def check_target(target: Path, model: LoadedModel, *sources: Path) -> None:
    """Refuse to write over what is read.

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


MOST_SENT = 64 << 20
"""Bytes of a model that goes to another process as one message; a larger one goes by file."""

_SPILLED = "weights.bin"


@dataclass(frozen=True)
class SessionForm:
    """A model for ONNX Runtime: the serialised ``content`` says where in ``folder`` values lie.

    ``mapped`` and ``rounded`` are the initialisers of the main graph whose values may be handed
    over instead: as they lie in a file, and those that are rounded first, which must be.
    ``initialisers`` counts those of the main graph.
    """

    content: bytes
    folder: str
    initialisers: int
    mapped: tuple[TensorProto, ...] = ()
    rounded: tuple[TensorProto, ...] = ()


@dataclass(frozen=True)
class FileForm:
    """A model for TensorRT's parser: its bytes, or the path of a file. ``key`` tells it from others
    by its content, which a path does not.
    """

    source: bytes | str
    key: str


@contextmanager
def session_form(model: onnx.ModelProto, *, elsewhere: bool = False) -> Iterator[SessionForm]:
    """``model`` as ONNX Runtime takes it, as long as the block lasts; the model itself is not held
    for that.

    Raises:
        MachineError: the scratch folder cannot be written.
    """
    with ExitStack() as opened:
        spills = _Spill(opened, model)
        # Of a message a part holds the whole.
        mapped, rounded = onnx.GraphProto(), onnx.GraphProto()
        folder = ""

        def put(tensor: TensorProto) -> None:
            nonlocal folder
            place = place_of(tensor)
            if place is None or (place.rounding is not None and elsewhere):
                spills.move(tensor, wanted=place is not None)
                place = place_of(tensor)
            if place is None:
                return
            folder = Path(place.path).anchor
            put_at(tensor, Place(os.path.relpath(place.path, folder), place.offset, place.length))

        for tensor in () if elsewhere else model.graph.initializer:
            place = place_of(tensor)
            if place is not None:
                (mapped if place.rounding is None else rounded).initializer.append(tensor)
            del tensor
        content = moved(model, put).SerializeToString()
        spills.close()
        handed = tuple(mapped.initializer), tuple(rounded.initializer)
        form = SessionForm(content, folder, len(model.graph.initializer), *handed)
        del model
        yield form


@contextmanager
def file_form(model: onnx.ModelProto) -> Iterator[FileForm]:
    """``model`` as TensorRT's parser takes it, as long as the block lasts.

    Raises:
        MachineError: the scratch folder cannot be written.
    """
    if weights_size(model) < MOST_SENT:
        stream = io.BytesIO()
        write_model(model, stream)
        yield FileForm(stream.getvalue(), hashlib.sha256(stream.getbuffer()).hexdigest())
        return
    with ExitStack() as opened:
        spills = _Spill(opened, model)
        links: dict[str, str] = {}
        inside = types_inside(model, held_size(model))

        def put(tensor: TensorProto) -> None:
            if tensor.data_type in inside:
                take_in(tensor)
                return
            place = place_of(tensor)
            if place is None or place.rounding is not None:
                spills.move(tensor, wanted=place is not None)
                if (moved_to := place_of(tensor)) is not None:
                    put_at(tensor, replace(moved_to, path=_SPILLED))
                return
            if place.path not in links:
                links[place.path] = f"weights-{len(links)}"
                _link(Path(place.path), spills.folder / links[place.path])
            put_at(tensor, replace(place, path=links[place.path]))

        content = moved(model, put).SerializeToString()
        spills.close()
        path = spills.folder / "model.onnx"
        path.write_bytes(content)
        # The links' names tell nothing: the places in the user's own files do.
        said = moved(model, lambda _: None).SerializeToString(deterministic=True)
        yield FileForm(str(path), hashlib.sha256(said).hexdigest())


class _Spill:
    """A scratch file for values that lie in no file and may not stay in the model."""

    def __init__(self, opened: ExitStack, model: onnx.ModelProto) -> None:
        self._opened = opened
        self._large = held_size(model) >= PROTOBUF_LIMIT
        self._stream: IO[bytes] | None = None
        self._folder: Path | None = None

    @property
    def folder(self) -> Path:
        """Made when it is first asked for."""
        if self._folder is None:
            self._folder = Path(self._opened.enter_context(scratch("model")))
        return self._folder

    def move(self, tensor: TensorProto, *, wanted: bool) -> None:
        """Let the values of ``tensor`` lie in the file, if that is wanted, or the model would be
        too large with them.
        """
        large = self._large and tensor.data_type != TensorProto.STRING
        if not wanted and not (large and size_of(tensor) >= LEAST):
            return
        try:
            if self._stream is None:
                path = self.folder / _SPILLED
                self._stream = self._opened.enter_context(path.open("wb"))
            spill(tensor, self._stream, str(self.folder / _SPILLED))
        except OSError as error:
            raise MachineError(f"{self.folder}: cannot be written ({one_line(error)})") from error

    def close(self) -> None:
        """Let others read what was written."""
        if self._stream is not None:
            self._stream.close()


def _link(source: Path, target: Path) -> None:
    """``target`` for ``source``: another name of it, or a pointer to it, but no copy."""
    try:
        target.symlink_to(source)
    except OSError:  # a system or a user that may not
        os.link(source, target)
