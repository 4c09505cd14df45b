"""Values of initialisers, wherever their bytes lie."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from sys import intern
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import uses_external_data

from bisect_trt.base.errors import BadInputError, MachineError, is_out_of_memory
from bisect_trt.base.limits import in_order
from bisect_trt.base.plan import Precision
from bisect_trt.metrics.arrays import BLOCK, flat, slices
from bisect_trt.metrics.rounding import rounded, to_storage
from bisect_trt.model.precision_rules import FLOAT, is_standard
from bisect_trt.model.tensor_types import subgraphs

_PAGE = mmap.PAGESIZE
_maps: WeakValueDictionary[str, _Map] = WeakValueDictionary()
_alone = Lock()


class _Map(mmap.mmap):
    """A file in memory; lives as long as an array of it."""

    stamp: tuple[int, int, int]


def mapped(path: str, dtype: np.dtype[Any], offset: int, shape: tuple[int, ...]) -> NDArray[Any]:
    """A part of a file, read only. It is not copied, and need not be aligned.

    Raises:
        BadInputError: the file is gone, shorter, or not the one that was mapped before.
    """
    count = int(np.prod(shape, dtype=np.int64))
    if not count:
        return np.empty(shape, dtype)
    try:
        found = np.frombuffer(_map_of(path), dtype, count, offset)
    except (OSError, ValueError) as error:
        if is_out_of_memory(error):
            raise MachineError(
                f"{path}: there is no room to map it ({error}); raise the limit (ulimit -v), or "
                "use a machine with more memory"
            ) from error
        raise BadInputError(f"{path}: cannot be read ({error})") from error
    return found.reshape(shape)


def let_go(array: NDArray[Any]) -> None:
    """Give back the memory of an array of :func:`mapped`: it is read again when it is looked at.
    Nothing where it is none, or where the system knows no such advice.
    """
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    whole = base.obj if isinstance(base, memoryview) else base
    if not isinstance(whole, _Map) or not hasattr(whole, "madvise"):
        return
    begin = array.ctypes.data - np.frombuffer(whole, np.uint8).ctypes.data
    # Pages at its ends are the neighbours' too; they are read again as easily.
    first = begin // _PAGE * _PAGE
    whole.madvise(mmap.MADV_DONTNEED, first, min(begin + array.nbytes, len(whole)) - first)


def _map_of(path: str) -> _Map:
    with _alone:
        status = os.stat(path)
        stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
        found = _maps.get(path)
        if found is None:
            with Path(path).open("rb") as stream:
                found = _Map(stream.fileno(), 0, access=mmap.ACCESS_READ)
            found.stamp = stamp
            _maps[path] = found
        elif found.stamp != stamp:
            raise BadInputError(f"{path}: was changed while it was in use; run the command again")
        return found


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
    validation = (_RAW_DATA, _FLOAT_DATA) if types == [TensorProto.FLOAT] else (_RAW_DATA,)
    values = [f for f in fields if f.number in validation and f.kind == _BYTES]
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


PACKED = {
    getattr(TensorProto, name, -1): bits
    for name, bits in (("INT4", 4), ("UINT4", 4), ("FLOAT4E2M1", 4), ("INT2", 2), ("UINT2", 2))
}
"""The bits of types with several values to a byte; -1 are those that an older onnx lacks."""

_ROUNDED, _SOURCE = "rounded", "source"
_VALUES = (
    "raw_data",
    "float_data",
    "int32_data",
    "int64_data",
    "double_data",
    "uint64_data",
)
"""Where a tensor that is in no file may hold its values; ONNX's checker refuses both."""

_A_SUBGRAPH = BLOCK // 4
"""Elements that a thread rounds at a time: of sixteen threads each has some copies of them."""


@dataclass(frozen=True)
class Place:
    """Where a tensor's values lie: ``length`` bytes from ``offset`` on in the file ``path``.

    ``rounding`` is what the FP32 values there become first, ``source`` the constant that they are.
    """

    path: str
    offset: int
    length: int
    rounding: Precision | None = None
    source: str = ""


def place_of(tensor: TensorProto) -> Place | None:
    """Where the values of ``tensor`` lie; None where it holds them itself."""
    if not uses_external_data(tensor):
        return None
    said = {entry.key: entry.value for entry in tensor.external_data}
    rounding = Precision(said[_ROUNDED]) if _ROUNDED in said else None
    offset, length = int(said.get("offset") or 0), int(said.get("length") or 0)
    return Place(said["location"], offset, length, rounding, said.get(_SOURCE, ""))


def put_at(tensor: TensorProto, place: Place) -> None:
    """Let ``tensor`` have its values at ``place``."""
    said = {"location": place.path, "offset": str(place.offset), "length": str(place.length)}
    if place.rounding is not None:
        said |= {_ROUNDED: place.rounding.value, _SOURCE: place.source}
    for held in _VALUES:
        tensor.ClearField(held)
    del tensor.external_data[:]
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in said.items():
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value


def all_tensors(graph: onnx.GraphProto) -> list[TensorProto]:
    """Initialisers and attributes, those of bodies too, and what sparse ones are made of."""
    tensors = list(graph.initializer)
    for sparse in graph.sparse_initializer:
        tensors += (sparse.values, sparse.indices)
    for node in graph.node:
        if not node.attribute:
            continue
        for a in node.attribute:
            tensors += (a.t,) if a.HasField("t") else a.tensors
            for sparse in (a.sparse_tensor,) if a.HasField("sparse_tensor") else a.sparse_tensors:
                tensors += (sparse.values, sparse.indices)
        for _, body in subgraphs(node):
            tensors += all_tensors(body)
    return tensors


def array_of(tensor: TensorProto) -> NDArray[Any]:
    """The values of ``tensor``; what lies in a file as it is is mapped, not read.

    Raises:
        BadInputError: the file has changed.
    """
    place = place_of(tensor)
    if place is None:
        return numpy_helper.to_array(tensor)
    shape = tuple(tensor.dims)
    if tensor.data_type in PACKED:
        raw = mapped(place.path, np.dtype(np.uint8), place.offset, (place.length,))
        held = TensorProto(data_type=tensor.data_type, dims=tensor.dims, raw_data=raw.tobytes())
        return numpy_helper.to_array(held)
    if place.rounding is None:
        return mapped(place.path, element_type(tensor), place.offset, shape)
    exact = mapped(place.path, np.dtype(np.float32), place.offset, shape)
    found = rounded_values(exact, place.rounding, element_type(tensor))
    let_go(exact)
    return found


def element_type(tensor: TensorProto) -> np.dtype[Any]:
    """NumPy's type for the elements of ``tensor``."""
    return np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type))


def rounded_values(
    exact: NDArray[np.float32], precision: Precision, dtype: np.dtype[Any]
) -> NDArray[Any]:
    """``exact`` rounded, block by block and on several threads: nothing else of its size is made."""
    found = np.empty(exact.shape, dtype)
    source, target = flat(exact), flat(found)

    def fill(part: slice) -> None:
        target[part] = _rounded(source[part], precision, dtype)

    for _ in in_order(fill, slices(source.size, _A_SUBGRAPH)):
        pass
    return found


def rounded_tensor(
    tensor: TensorProto | None,
    arrays: Mapping[str, NDArray[np.float32]],
    source: str,
    name: str,
    precision: Precision,
    elem_type: int,
) -> TensorProto:
    """An FP32 constant rounded, as an initialiser."""
    place = place_of(tensor) if tensor is not None else None
    if tensor is not None and place is not None and place.rounding is None:
        new = TensorProto(name=name, data_type=elem_type, dims=tensor.dims)
        put_at(new, Place(place.path, place.offset, place.length, precision, source))
        return new
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(elem_type))
    return numpy_helper.from_array(rounded_values(arrays[source], precision, dtype), name)


def subgraphs_of(tensor: TensorProto) -> Iterator[bytes]:
    """The bytes of a tensor's values as ONNX's ``raw_data`` has them; of one whose values lie in a
    file a few megabytes at a time.

    Raises:
        BadInputError: the file has changed.
    """
    place = place_of(tensor)
    if place is None:
        if tensor.HasField("raw_data"):
            yield tensor.raw_data
        elif tensor.data_type in PACKED:
            yield numpy_helper.from_array(numpy_helper.to_array(tensor)).raw_data
        else:
            yield numpy_helper.to_array(tensor).tobytes()
        return
    plain = place.rounding is None
    source: np.dtype[Any] = np.dtype(np.uint8 if plain else np.float32)
    values = mapped(place.path, source, place.offset, (place.length // source.itemsize,))
    if place.rounding is None:
        for part in slices(values.size, 4 * BLOCK):
            yield values[part].tobytes()
            let_go(values[part])
        return
    precision, dtype = place.rounding, element_type(tensor)

    def subgraph(part: slice) -> bytes:
        found = _rounded(values[part], precision, dtype).tobytes()
        let_go(values[part])
        return found

    yield from in_order(subgraph, slices(values.size, _A_SUBGRAPH))


def size_of(tensor: TensorProto) -> int:
    """The bytes of its values; 0 for text."""
    if tensor.data_type == TensorProto.STRING:
        return 0
    place = place_of(tensor)
    if place is not None and place.rounding is None:
        return place.length
    count = int(math.prod(tensor.dims))
    if tensor.data_type in PACKED:
        return -(-count * PACKED[tensor.data_type] // 8)
    return int(count * element_type(tensor).itemsize)


def _rounded(
    block: NDArray[np.float32], precision: Precision, dtype: np.dtype[Any]
) -> NDArray[Any]:
    stored = dtype != np.float32
    return np.asarray(to_storage(block, precision) if stored else rounded(block, precision), dtype)


class Constants(Mapping[str, NDArray[Any]]):
    """Every constant tensor of a graph (its bodies apart) by name, unpacked when it is first asked
    for. What lies in a file is mapped, not read.
    """

    def __init__(self, graph: onnx.GraphProto) -> None:
        found: dict[str, TensorProto | NDArray[Any]] = {
            intern(t.name): t for t in graph.initializer
        }
        for node in graph.node:
            if node.op_type == "Constant" and is_standard(node) and node.attribute:
                value = _value(node.attribute[0])
                if value is not None:
                    found[node.output[0]] = value
        self._kept = found
        self._known: dict[str, NDArray[Any]] = {}

    def of_type(self, elem_type: int) -> Constants:
        """Those of one of ONNX's types; what is unpacked is shared."""
        found = Constants(onnx.GraphProto())
        found._kept = {n: v for n, v in self._kept.items() if _type_of(v) == elem_type}
        found._known = self._known
        return found

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name in self._known:
            return self._known[name]
        value = self._kept[name]
        if isinstance(value, np.ndarray):
            return value
        found = array_of(value)
        place = place_of(value)
        if place is None or place.rounding is None:  # a rounded one would be a copy
            self._known[name] = found
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._kept

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def let_go(self) -> None:
        """Give back the memory of those that are mapped; they are read again when needed."""
        for array in self._known.values():
            let_go(array)

    def tensor(self, name: str) -> TensorProto | None:
        """The constant ``name`` as ONNX has it; None where it is an attribute's number."""
        value = self._kept[name]
        return None if isinstance(value, np.ndarray) else value


def _value(attribute: onnx.AttributeProto) -> TensorProto | NDArray[Any] | None:
    name = attribute.name
    if name == "value":
        return attribute.t
    if name in ("value_float", "value_floats"):
        return np.asarray(attribute.f if name == "value_float" else attribute.floats, np.float32)
    if name in ("value_int", "value_ints"):
        return np.asarray(attribute.i if name == "value_int" else attribute.ints, np.int64)
    return None


def _type_of(value: TensorProto | NDArray[Any]) -> int:
    if isinstance(value, np.ndarray):
        return FLOAT if value.dtype == np.float32 else TensorProto.INT64
    return value.data_type


_PLACEHOLDERS = frozenset({"?", "", "-1", "None", "none", "unk", "unknown", "*", "dynamic"})


def is_placeholder(dim: onnx.TensorShapeProto.Dimension) -> bool:
    """True for an unset, negative or ``?``-like dimension."""
    which = dim.WhichOneof("value")
    if which == "dim_value":
        return bool(dim.dim_value < 0)
    return which is None or dim.dim_param.strip() in _PLACEHOLDERS


def shared_placeholders(graph: onnx.GraphProto) -> dict[str, list[str]]:
    """The names like ``?`` that several dimensions of ``graph``'s inputs bear, each with those
    inputs. An empty name and those of outputs are no symbol to TensorRT (measured on TensorRT for
    RTX 1.6.1.120, by building).
    """
    users: dict[str, list[str]] = {}
    for value in graph.input:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param.strip() and is_placeholder(dim):
                users.setdefault(dim.dim_param, []).append(value.name)
    return {name: list(dict.fromkeys(of)) for name, of in users.items() if len(of) > 1}


def name_placeholder_dims(graph: onnx.GraphProto) -> None:
    """Give every placeholder dimension of ``graph``'s inputs and outputs the name ``tensor_axis``,
    in place.
    """
    taken = {
        d.dim_param for v in (*graph.input, *graph.output) for d in v.type.tensor_type.shape.dim
    }
    for value in (*graph.input, *graph.output):
        if not value.type.HasField("tensor_type") or not value.type.tensor_type.HasField("shape"):
            continue
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if is_placeholder(dim):
                name = f"{value.name}_{axis}"
                while name in taken:
                    name += "_"
                taken.add(name)
                dim.dim_param = name
