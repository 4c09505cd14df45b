"""Models on disk: as files to ship, in the forms that runtimes read, and annotated for viewers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import onnx
from onnx import TensorProto

from bisect_trt.base.atomic_files import scratch, sweep, write_whole, written_whole
from bisect_trt.base.errors import BadInputError, MachineError, not_written, one_line
from bisect_trt.model.graph import Graph
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

PROTOBUF_LIMIT = 2**31 - (64 << 20)
"""Protobuf writes less than 2 GB; 64 MB are left for everything that is not a weight."""

MOST_SENT = 64 << 20
"""Bytes of a model that goes to another process as one message; a larger one goes by file."""

_ALIGNED = 64
"""Bytes: where a tensor's values begin in a file, so that a runtime may read them in wide steps."""

_SPILLED = "weights.bin"

PREFIX = "bisect_trt."
LEFT_OUT = "weights-left-out"
_IR_WITH_NODE_METADATA = 10
_ANNOTATED_WHOLE_BYTES = 64 << 20
_ANNOTATED_CONSTANT_BYTES = 1 << 10


def weights_size(model: onnx.ModelProto) -> int:
    """The bytes of all tensors, computed from their shapes so that nothing is read."""
    return sum(size_of(tensor) for tensor in all_tensors(model.graph))


def held_size(model: onnx.ModelProto) -> int:
    """The bytes of those tensors that ``model`` holds itself."""
    return sum(size_of(t) for t in all_tensors(model.graph) if place_of(t) is None)


def save_model(model: onnx.ModelProto, path: Path) -> None:
    """Write ``model`` in one step; over 2 GB its weights go beside it, into ``<name>.data``.

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
            side, inside = f"{path.name}.data", _types_inside(model)
            with (draft.parent / side).open("wb") as stream:

                def put(tensor: TensorProto) -> None:
                    if size_of(tensor) < MAPPED_BYTES or tensor.data_type in inside:
                        take_in(tensor)
                    else:
                        _spill(tensor, stream, side)

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
    stream.write(moved(model, take_in).SerializeToString())


def moved(model: onnx.ModelProto, move: Callable[[TensorProto], None]) -> onnx.ModelProto:
    """A copy of ``model`` of which ``move`` has changed every tensor in place."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for tensor in all_tensors(copy.graph):
        move(tensor)
    return copy


def _types_inside(model: onnx.ModelProto) -> frozenset[int]:
    """The element types whose values have to stay in the model itself: float64.

    TensorRT's parser makes FP32 of float64 values, but not of what lies in a file ("Unexpected size
    for the external weights", TensorRT for RTX 1.6.1.120). None where a message has no room.
    """
    doubles = (t for t in all_tensors(model.graph) if t.data_type == TensorProto.DOUBLE)
    fits = 2 * sum(map(size_of, doubles)) < PROTOBUF_LIMIT
    return frozenset({TensorProto.DOUBLE} if fits else ())


def _spill(tensor: TensorProto, stream: IO[bytes], location: str) -> None:
    """Append the values of ``tensor`` to a file and let it say so, in place."""
    stream.write(b"\0" * (-stream.tell() % _ALIGNED))
    offset = stream.tell()
    stream.writelines(chunks_of(tensor))
    put_at(tensor, Place(location, offset, size_of(tensor)))


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


@contextmanager
def session_form(model: onnx.ModelProto, *, elsewhere: bool = False) -> Iterator[SessionForm]:
    """``model`` as ONNX Runtime takes it, as long as the block lasts.

    With ``elsewhere`` another process opens it, to which no values can be handed over.

    Raises:
        MachineError: the scratch folder cannot be written.
    """
    with ExitStack() as opened:
        scratch_file = _ScratchFile(opened, model)
        # Copied: a tensor of a message would keep the whole model in memory.
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
                folder = Path(place.path).anchor
                relative = os.path.relpath(place.path, folder)
                put_at(tensor, Place(relative, place.offset, place.length))

        content = moved(model, put).SerializeToString()
        count = len(model.graph.initializer)
        del model
        yield SessionForm(
            content, folder, count, tuple(mapped.initializer), tuple(rounded.initializer)
        )


@contextmanager
def file_form(model: onnx.ModelProto) -> Iterator[bytes | str]:
    """``model`` as TensorRT's parser takes it, its bytes or a path, as long as the block lasts.

    Raises:
        MachineError: the scratch folder cannot be written.
    """
    if weights_size(model) < MOST_SENT:
        yield moved(model, take_in).SerializeToString()
        return
    with ExitStack() as opened:
        scratch_file = _ScratchFile(opened, model)
        inside = _types_inside(model)
        links: dict[str, str] = {}

        def put(tensor: TensorProto) -> None:
            place = place_of(tensor)
            if tensor.data_type in inside:
                take_in(tensor)
            elif scratch_file.takes(tensor):
                put_at(tensor, replace(scratch_file.move(tensor), path=_SPILLED))
            elif place is not None:
                if place.path not in links:
                    links[place.path] = f"weights-{len(links)}"
                    _link(Path(place.path), scratch_file.folder / links[place.path])
                put_at(tensor, Place(links[place.path], place.offset, place.length))

        path = scratch_file.folder / "model.onnx"
        path.write_bytes(moved(model, put).SerializeToString())
        yield str(path)


class _ScratchFile:
    """A file for values that lie in no file as they are and may not stay in the model."""

    def __init__(self, opened: ExitStack, model: onnx.ModelProto) -> None:
        self._opened = opened
        self._too_large = held_size(model) >= PROTOBUF_LIMIT
        self._stream: IO[bytes] | None = None
        self._folder: Path | None = None

    @property
    def folder(self) -> Path:
        """Made when it is first asked for."""
        if self._folder is None:
            self._folder = Path(self._opened.enter_context(scratch("model")))
        return self._folder

    def takes(self, tensor: TensorProto) -> bool:
        """Whether the values are rounded first, or would make the message too large."""
        place = place_of(tensor)
        if place is not None:
            return place.rounding is not None
        return self._too_large and size_of(tensor) >= MAPPED_BYTES

    def move(self, tensor: TensorProto) -> Place:
        """Let the values of ``tensor`` lie in the file; where they are now."""
        path = self.folder / _SPILLED
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


def _link(source: Path, target: Path) -> None:
    """``target`` for ``source``: another name of it, or a pointer to it, but no copy."""
    try:
        target.symlink_to(source)
    except OSError:  # a system or a user that may not
        os.link(source, target)


def annotated(
    graph: Graph, of_model: Mapping[str, str], of_layers: Mapping[str, Mapping[str, str]]
) -> onnx.ModelProto:
    """A copy of the model with metadata at itself and at its nodes, which viewers show.

    A viewer in a browser opens no gigabytes: of models with more than 64 MB of weights only
    constants of 1 kB are kept; the others name ``LEFT_OUT`` as their file.
    """
    whole = weights_size(graph.proto) <= _ANNOTATED_WHOLE_BYTES

    def leave_out(tensor: TensorProto) -> None:
        if not whole and size_of(tensor) > _ANNOTATED_CONSTANT_BYTES:
            put_at(tensor, Place(LEFT_OUT, 0, 0))

    model = moved(graph.proto, leave_out)
    model.ir_version = max(model.ir_version, _IR_WITH_NODE_METADATA)
    _annotate(model, of_model)
    for node, name in zip(model.graph.node, graph.names, strict=True):
        if name in of_layers:
            _annotate(node, of_layers[name])
    return model


def _annotate(message: onnx.ModelProto | onnx.NodeProto, words: Mapping[str, str]) -> None:
    kept = [p for p in message.metadata_props if p.key.removeprefix(PREFIX) not in words]
    del message.metadata_props[:]
    message.metadata_props.extend(kept)
    for key, value in words.items():
        message.metadata_props.add(key=f"{PREFIX}{key}", value=value)
