"""A model in the form that a runtime loads, with its weights in the files where they are.

ONNX Runtime takes places of values below one folder; TensorRT's parser files beside the model. What
lies in no file yet, because it is rounded first, is handed over or written to a scratch folder.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import onnx
from onnx import TensorProto

from bisect_trt.core.disk.scratch import scratch
from bisect_trt.core.errors import MachineError, one_line
from bisect_trt.graph.files.save import (
    PROTOBUF_LIMIT,
    held_size,
    moved,
    spill,
    take_in,
    types_inside,
    weights_size,
    write_model,
)
from bisect_trt.graph.tensors.tensor_values import Place, place_of, put_at, size_of
from bisect_trt.graph.tensors.wire import LEAST

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

    Args:
        model: read only.
        elsewhere: whether another process opens it, which is handed no values.

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

    Args:
        model: read only.

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
