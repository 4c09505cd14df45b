"""An ONNX file without the values of its large tensors: these stay where they are in the file.

What comes out names a range of the file in place of each, in ONNX's own words (external data). The
file is read in protobuf's wire format (protobuf.dev, "Encoding"), because a parser would hold all
values in memory before anybody could leave them out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from onnx import TensorProto

LEAST = 1 << 16
"""Bytes from which on a tensor stays in its file; many small ones are read faster than found."""

EMBEDDED = "\0embedded"
"""The location of what lies in the model's own file: no file's name, which zero bytes cannot be
part of."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_INSIDE: Mapping[str, Mapping[int, str]] = {
    "model": {7: "graph"},
    "graph": {1: "node", 5: "tensor"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph"},
}
"""By message the fields that may hold large tensors, and what they are (onnx.proto)."""

_FLOAT_DATA, _DATA_TYPE, _RAW_DATA, _EXTERNAL, _LOCATION = 4, 2, 9, 13, 14


class WireError(ValueError):
    """These bytes are no protobuf message."""


@dataclass(frozen=True)
class _Field:
    """One field of a message: ``begin`` is where its tag stands, ``content`` where its value
    begins, ``end`` what follows.
    """

    number: int
    kind: int
    begin: int
    content: int
    end: int


def without_large_values(data: memoryview) -> bytes:
    """The serialised model ``data`` with ranges of itself in place of its large values.

    Args:
        data: of a whole ONNX file, bytes.

    Returns:
        A serialised model, whose tensors of :data:`LEAST` bytes and more have external data at
        :data:`EMBEDDED`.

    Raises:
        WireError: it is no protobuf message.
    """
    return b"".join(_parts(data, 0, len(data), "model"))


def _parts(data: memoryview, begin: int, end: int, kind: str) -> Iterator[bytes | memoryview]:
    inside = _INSIDE[kind]
    kept = begin
    for field in _fields(data, begin, end):
        inner = inside.get(field.number)
        if inner is None or field.kind != _BYTES or field.end - field.content < LEAST:
            continue
        if inner == "tensor":
            found = _without_values(data, field.content, field.end)
            if found is None:
                continue
        else:
            found = b"".join(_parts(data, field.content, field.end, inner))
        yield data[kept : field.begin]
        yield tag_of(field.number, len(found)) + found
        kept = field.end
    yield data[kept:end]


def _without_values(data: memoryview, begin: int, end: int) -> bytes | None:
    """A tensor with the place of its values; None where they have none to point at."""
    fields = list(_fields(data, begin, end))
    if any(f.number in (_EXTERNAL, _LOCATION) for f in fields):
        return None
    types = [_varint(data, f.content, end)[0] for f in fields if f.number == _DATA_TYPE]
    # Packed floats are their bytes one after the other, as raw data is.
    holds = (_RAW_DATA, _FLOAT_DATA) if types == [TensorProto.FLOAT] else (_RAW_DATA,)
    values = [f for f in fields if f.number in holds and f.kind == _BYTES]
    if len(values) != 1 or values[0].end - values[0].content < LEAST:
        return None
    value = values[0]
    place = TensorProto(data_location=TensorProto.EXTERNAL)
    length = value.end - value.content
    for key, text in (("location", EMBEDDED), ("offset", value.content), ("length", length)):
        entry = place.external_data.add()
        entry.key, entry.value = key, str(text)
    return b"".join((data[begin : value.begin], data[value.end : end], place.SerializeToString()))


def _fields(data: memoryview, begin: int, end: int) -> Iterator[_Field]:
    position = begin
    while position < end:
        tag, content = _varint(data, position, end)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            after = _varint(data, content, end)[1]
        elif kind == _BYTES:
            length, content = _varint(data, content, end)
            after = content + length
        elif kind in (_FIXED64, _FIXED32):
            after = content + (8 if kind == _FIXED64 else 4)
        else:
            raise WireError(f"field {number} is of the kind {kind}")
        if after > end or number == 0:
            raise WireError(f"field {number} ends behind its message")
        yield _Field(number, kind, position, content, after)
        position = after


def _varint(data: memoryview, position: int, end: int) -> tuple[int, int]:
    """(value, position behind it)."""
    value = shift = 0
    while position < end and shift < 70:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise WireError("a number does not end")


def tag_of(number: int, length: int) -> bytes:
    """What stands before the ``length`` bytes of the field ``number``."""
    return _written(number << 3 | _BYTES) + _written(length)


def _written(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
