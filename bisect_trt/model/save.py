"""Writes models as files to ship, and in the forms that runtimes read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import onnx
from onnx import TensorProto

from bisect_trt.base.atomic_files import scratch, sweep, write_whole, written_whole
from bisect_trt.base.errors import BadInputError, MachineError, not_written, one_line
from bisect_trt.model.load import LoadedModel
from bisect_trt.model.tensor_values import (
    MAPPED_BYTES,
    Place,
    all_tensors,
    chunks_of,
    place_of,
    put_at,
    size_of,
    take_in,
)

PROTOBUF_LIMIT_BYTES = 2**31 - (64 << 20)
"""Bytes of weights in one message: protobuf's 2 GB less 64 MB for the rest of the model."""

SENT_WHOLE_BYTES = 64 << 20
"""Bytes of weights from which on a model goes to TensorRT's parser as a file."""

_SCRATCH_NAME = "weights.bin"


def weights_size(model: onnx.ModelProto) -> int:
    """The bytes of all tensors, computed from their shapes."""
    return sum(size_of(tensor) for tensor in all_tensors(model.graph))


def held_size(model: onnx.ModelProto) -> int:
    """The bytes of the tensors whose values are in the model itself."""
    return sum(size_of(t) for t in all_tensors(model.graph) if place_of(t) is None)


def save_model(model: onnx.ModelProto, path: Path, limit_bytes: int = PROTOBUF_LIMIT_BYTES) -> None:
    """Writes ``model`` in one step; over the limit its weights go beside it: ``<name>.data``."""
    sweep(path.parent)  # a killed run may have left a draft as large as a model
    try:
        with written_whole(path) as draft:
            if weights_size(model) < limit_bytes:
                with draft.open("wb") as stream:
                    write_model(model, stream)
                return
            side, inside = f"{path.name}.data", _types_inside(model, limit_bytes)
            with (draft.parent / side).open("wb") as stream:

                def put(tensor: TensorProto) -> None:
                    if size_of(tensor) < MAPPED_BYTES or tensor.data_type in inside:
                        take_in(tensor)
                    else:
                        _spill(tensor, stream, side)

                draft.write_bytes(moved(model, put).SerializeToString())
            # Files in a scratch folder are private; a model to ship is not.
            (draft.parent / side).chmod(0o644)
            path.unlink(missing_ok=True)  # an older model must not read the new weights
            os.replace(draft.parent / side, path.parent / side)
    except OSError as error:
        raise not_written(str(path), error) from error


def save_text(text: str, path: Path) -> None:
    """Writes ``text`` to ``path`` in one step."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise not_written(str(path), error) from error


def write_model(model: onnx.ModelProto, stream: IO[bytes]) -> None:
    """Writes ``model`` as one protobuf message that holds all values."""
    stream.write(moved(model, take_in).SerializeToString())


def moved(model: onnx.ModelProto, move: Callable[[TensorProto], None]) -> onnx.ModelProto:
    """A copy of ``model`` in which ``move`` has changed every tensor in place."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for tensor in all_tensors(copy.graph):
        move(tensor)
    return copy


def _types_inside(model: onnx.ModelProto, limit_bytes: int) -> frozenset[int]:
    """The element types whose values must stay in the model: float64, if a message has room."""
    # TensorRT's parser converts float64 to FP32, but refuses float64 in external files
    # ("Unexpected size for the external weights", TensorRT for RTX 1.6.1.120). Transformers'
    # RT-DETR has such tables.
    doubles = (t for t in all_tensors(model.graph) if t.data_type == TensorProto.DOUBLE)
    fits = 2 * sum(map(size_of, doubles)) < limit_bytes
    return frozenset({TensorProto.DOUBLE} if fits else ())


def _spill(tensor: TensorProto, stream: IO[bytes], location: str) -> None:
    """Appends the values of ``tensor`` to a file and makes it refer to them, in place."""
    stream.write(b"\0" * (-stream.tell() % 64))  # aligned for vector loads
    offset = stream.tell()
    stream.writelines(chunks_of(tensor))
    put_at(tensor, Place(location, offset, size_of(tensor)))


def check_target(target: Path, model: LoadedModel, *sources: Path) -> None:
    """Refuses to overwrite the model, its external files or ``sources``."""
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


@dataclass(frozen=True)
class SessionForm:
    """A serialised model for ONNX Runtime, whose external values are in ``folder``.

    A session may take the values of the initialisers ``mapped`` from a mapped file. It must be
    given those of the initialisers ``rounded``.
    """

    content: bytes
    folder: str
    mapped: tuple[TensorProto, ...] = ()
    rounded: tuple[TensorProto, ...] = ()


@contextmanager
def session_form(model: onnx.ModelProto, *, elsewhere: bool = False) -> Iterator[SessionForm]:
    """``model`` as ONNX Runtime reads it, valid inside the ``with`` block.

    With ``elsewhere`` another process opens it, so that all values are in files.
    """
    with ExitStack() as opened:
        scratch_file = _ScratchFile(opened, model, PROTOBUF_LIMIT_BYTES)
        # Copies, because a reference to a tensor would keep the whole model in memory.
        mapped, rounded = onnx.GraphProto(), onnx.GraphProto()
        for tensor in () if elsewhere else model.graph.initializer:
            place = place_of(tensor)
            if place is not None:
                (mapped if place.rounding is None else rounded).initializer.append(tensor)
        folder = ""

        def put(tensor: TensorProto) -> None:
            nonlocal folder
            place = place_of(tensor)
            if scratch_file.takes(tensor) and (place is None or elsewhere):
                place = scratch_file.move(tensor)
            if place is not None:
                # ONNX Runtime takes relative locations only: relative to the root of the drive.
                folder = Path(place.path).anchor
                relative = os.path.relpath(place.path, folder)
                put_at(tensor, Place(relative, place.offset, place.length))

        content = moved(model, put).SerializeToString()
        del model  # the content is a second copy of the weights
        yield SessionForm(content, folder, tuple(mapped.initializer), tuple(rounded.initializer))


@contextmanager
def file_form(
    model: onnx.ModelProto,
    whole_bytes: int = SENT_WHOLE_BYTES,
    limit_bytes: int = PROTOBUF_LIMIT_BYTES,
) -> Iterator[bytes | str]:
    """``model`` as TensorRT's parser reads it, valid inside the ``with`` block.

    Bytes where its weights are fewer than ``whole_bytes``, else a path. Values in memory of
    ``limit_bytes`` or more go into a file of their own.
    """
    if weights_size(model) < whole_bytes:
        yield moved(model, take_in).SerializeToString()
        return
    with ExitStack() as opened:
        scratch_file = _ScratchFile(opened, model, limit_bytes)
        inside = _types_inside(model, limit_bytes)
        links: dict[str, str] = {}

        def put(tensor: TensorProto) -> None:
            place = place_of(tensor)
            if tensor.data_type in inside:
                take_in(tensor)
            elif scratch_file.takes(tensor):
                put_at(tensor, replace(scratch_file.move(tensor), path=_SCRATCH_NAME))
            elif place is not None:
                # The parser looks for external data in the model's folder.
                if place.path not in links:
                    links[place.path] = f"weights-{len(links)}"
                    (scratch_file.folder / links[place.path]).symlink_to(place.path)
                put_at(tensor, Place(links[place.path], place.offset, place.length))

        path = scratch_file.folder / "model.onnx"
        path.write_bytes(moved(model, put).SerializeToString())
        yield str(path)


class _ScratchFile:
    """A temporary file for values that are in no file as needed and must not stay in the model."""

    def __init__(self, opened: ExitStack, model: onnx.ModelProto, limit_bytes: int) -> None:
        self._opened = opened
        # Up to the limit values may stay in the message.
        self._too_large = held_size(model) >= limit_bytes
        self._stream: IO[bytes] | None = None
        self._folder: Path | None = None

    @property
    def folder(self) -> Path:
        """The temporary folder, created at the first access."""
        if self._folder is None:
            self._folder = Path(self._opened.enter_context(scratch("model")))
        return self._folder

    def takes(self, tensor: TensorProto) -> bool:
        """Whether the values must be rounded first, or would make the message too large."""
        place = place_of(tensor)
        # A runtime can map values in a file as they are, but cannot round them.
        if place is not None:
            return place.rounding is not None
        return self._too_large and size_of(tensor) >= MAPPED_BYTES

    def move(self, tensor: TensorProto) -> Place:
        """Moves the values of ``tensor`` into the file, and returns their place."""
        path = self.folder / _SCRATCH_NAME
        try:
            if self._stream is None:
                self._stream = self._opened.enter_context(path.open("wb"))
            _spill(tensor, self._stream, str(path))
            self._stream.flush()
        except OSError as error:
            raise MachineError(f"{self.folder}: cannot be written ({one_line(error)})") from error
        place = place_of(tensor)
        assert place is not None
        return place
