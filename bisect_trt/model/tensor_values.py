"""Reads, maps, rounds and moves the values of constants, in memory or in files."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from sys import intern
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import uses_external_data

from bisect_trt.base.errors import BadInputError, MachineError, is_out_of_memory
from bisect_trt.base.plan import Precision
from bisect_trt.metrics.arrays import BLOCK, flat, slices
from bisect_trt.metrics.rounding import rounded, to_storage
from bisect_trt.model.precision_rules import is_standard
from bisect_trt.model.walk import subgraphs

MAPPED_BYTES = 1 << 16
"""Bytes from which on a tensor stays in its external file; reading a small one is faster."""

PACKED = {
    getattr(TensorProto, name, -1): bits
    for name, bits in (("INT4", 4), ("UINT4", 4), ("FLOAT4E2M1", 4), ("INT2", 2), ("UINT2", 2))
}
"""The bits of types with several values to a byte; -1 stands for types that onnx lacks."""

# Keys of ``external_data``. ONNX defines the last one, and runtimes ignore all three.
_ROUNDED = "rounded"
_SOURCE = "source"
_STAMP = "checksum"

_VALUES = ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data")


@dataclass(frozen=True)
class Place:
    """The place of a tensor's values: ``length`` bytes from ``offset`` on in the file ``path``.

    ``rounding`` says what the FP32 values of the constant ``source`` there are rounded to first.
    ``stamp`` identifies the file's content; it is blank for files of this program.
    """

    path: str
    offset: int
    length: int
    rounding: Precision | None = None
    source: str = ""
    stamp: str = ""


def place_of(tensor: TensorProto) -> Place | None:
    """The place of the values of ``tensor`` in a file; None if the tensor has them itself."""
    if not uses_external_data(tensor):
        return None
    entries = {entry.key: entry.value for entry in tensor.external_data}
    return Place(
        entries["location"],
        int(entries.get("offset") or 0),
        int(entries.get("length") or 0),
        Precision(entries[_ROUNDED]) if _ROUNDED in entries else None,
        entries.get(_SOURCE, ""),
        entries.get(_STAMP, ""),
    )


def put_at(tensor: TensorProto, place: Place) -> None:
    """Makes ``tensor`` refer to its values at ``place``."""
    entries = {"location": place.path, "offset": str(place.offset), "length": str(place.length)}
    if place.rounding is not None:
        entries |= {_ROUNDED: place.rounding.value, _SOURCE: place.source}
    if place.stamp:
        entries[_STAMP] = place.stamp
    for field in _VALUES:  # ONNX's checker refuses values in two places
        tensor.ClearField(field)
    del tensor.external_data[:]
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)


def take_in(tensor: TensorProto) -> None:
    """Reads the values of ``tensor`` into itself, in place."""
    if place_of(tensor) is not None:
        tensor.raw_data = b"".join(chunks_of(tensor))
        tensor.ClearField("data_location")
        del tensor.external_data[:]


def stamp_of(path: str) -> str:
    """A text that changes if the file is written again.

    Raises:
        OSError: there is no such file.
    """
    status = os.stat(path)
    return f"{status.st_ino}-{status.st_size}-{status.st_mtime_ns}"


def _mapped(place: Place, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The values at ``place`` as a mapped array of one dimension, read only."""
    try:
        # A file that changes during a run would change the weights in the middle of a search.
        if place.stamp and stamp_of(place.path) != place.stamp:
            raise BadInputError(
                f"{place.path}: was changed while it was in use; run the command again"
            )
        count = place.length // dtype.itemsize
        if not count:
            return np.empty(0, dtype)
        # A plain array: each slice of a memmap object costs microseconds more.
        return np.memmap(place.path, dtype, "r", place.offset, (count,)).view(np.ndarray)
    except (OSError, ValueError) as error:
        if is_out_of_memory(error):
            raise MachineError(
                f"{place.path}: there is no room to map it ({error}); raise the limit (ulimit -v), "
                "or use a machine with more memory"
            ) from error
        raise BadInputError(f"{place.path}: cannot be read ({error})") from error


def let_go(array: NDArray[Any]) -> None:
    """Frees the memory of a mapped array; the next access reads the file again."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, mmap.mmap) and hasattr(base, "madvise"):
        base.madvise(mmap.MADV_DONTNEED)


def all_tensors(graph: onnx.GraphProto) -> list[TensorProto]:
    """The tensors of initialisers and attributes, in bodies too, with the parts of sparse ones."""
    tensors = list(graph.initializer)
    sparse = list(graph.sparse_initializer)
    for node in graph.node:
        if not node.attribute:
            continue
        for a in node.attribute:
            tensors += (a.t,) if a.HasField("t") else a.tensors
            sparse += (a.sparse_tensor,) if a.HasField("sparse_tensor") else a.sparse_tensors
        for _, body in subgraphs(node):
            tensors += all_tensors(body)
    for each in sparse:
        tensors += (each.values, each.indices)
    return tensors


def array_of(tensor: TensorProto) -> NDArray[Any]:
    """The values of ``tensor``; a file is mapped unless the values must be unpacked or rounded."""
    place = place_of(tensor)
    if place is None:
        return numpy_helper.to_array(tensor)
    # Two or four values share a byte, so that NumPy has no type to map.
    if tensor.data_type in PACKED:
        copy = TensorProto()
        copy.CopyFrom(tensor)
        take_in(copy)
        return numpy_helper.to_array(copy)
    if place.rounding is None:
        return _mapped(place, element_type(tensor)).reshape(tensor.dims)
    exact = _mapped(place, np.dtype(np.float32)).reshape(tensor.dims)
    found = rounded_values(exact, place.rounding, element_type(tensor))
    let_go(exact)
    return found


def element_type(tensor: TensorProto) -> np.dtype[Any]:
    """The NumPy type of the elements of ``tensor``."""
    return np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type))


def rounded_values(
    exact: NDArray[np.float32], precision: Precision, dtype: np.dtype[Any]
) -> NDArray[Any]:
    """``exact`` rounded in blocks, to bound the memory for intermediates."""
    found = np.empty(exact.shape, dtype)
    source, target = flat(exact), flat(found)
    for part in slices(source.size, BLOCK // 4):
        target[part] = _rounded(source[part], precision, dtype)
    return found


def rounded_tensor(
    tensor: TensorProto | None,
    arrays: Mapping[str, NDArray[np.float32]],
    *,
    source: str,
    name: str,
    precision: Precision,
    elem_type: int,
) -> TensorProto:
    """The FP32 constant ``source`` as a rounded initialiser; values in files are rounded later."""
    place = place_of(tensor) if tensor is not None else None
    if tensor is not None and place is not None and place.rounding is None:
        new = TensorProto(name=name, data_type=elem_type, dims=tensor.dims)
        put_at(new, replace(place, rounding=precision, source=source))
        return new
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(elem_type))
    return numpy_helper.from_array(rounded_values(arrays[source], precision, dtype), name)


def chunks_of(tensor: TensorProto) -> Iterator[bytes]:
    """The bytes of a tensor's values in the form of ``raw_data``, a few megabytes at a time."""
    place = place_of(tensor)
    if place is None:
        is_raw = tensor.HasField("raw_data")
        yield (tensor if is_raw else numpy_helper.from_array(array_of(tensor))).raw_data
        return
    # Bytes are copied as they are; only values that must be rounded are read as numbers.
    values = _mapped(place, np.dtype(np.uint8 if place.rounding is None else np.float32))
    for part in slices(values.size):
        block = values[part]
        if place.rounding is not None:
            block = _rounded(block, place.rounding, element_type(tensor))
        yield block.tobytes()
        let_go(values)


def size_of(tensor: TensorProto) -> int:
    """The bytes of the tensor's values, without reading them; 0 for text."""
    place = place_of(tensor)
    if place is not None and place.rounding is None:
        return place.length
    return 0 if tensor.data_type == TensorProto.STRING else shape_bytes(tensor)


def shape_bytes(tensor: TensorProto) -> int:
    """The bytes that values of the tensor's type and shape take."""
    bits: int = PACKED.get(tensor.data_type) or 8 * element_type(tensor).itemsize
    return -(-int(math.prod(tensor.dims)) * bits // 8)  # rounded up to whole bytes


def _rounded(
    block: NDArray[np.float32], precision: Precision, dtype: np.dtype[Any]
) -> NDArray[Any]:
    stored = dtype != np.float32
    return np.asarray(to_storage(block, precision) if stored else rounded(block, precision), dtype)


class Constants(Mapping[str, NDArray[Any]]):
    """Every constant of a graph by name, without those of bodies, unpacked at the first access."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._tensors: dict[str, TensorProto] = {intern(t.name): t for t in graph.initializer}
        for node in graph.node:
            if node.op_type == "Constant" and is_standard(node) and node.attribute:
                value = _value(node.attribute[0])
                if value is not None:
                    self._tensors[node.output[0]] = value
        self._arrays: dict[str, NDArray[Any]] = {}

    def of_type(self, elem_type: int) -> Constants:
        """The constants of one element type, which share the unpacked arrays."""
        found = Constants(onnx.GraphProto())
        found._tensors = {n: t for n, t in self._tensors.items() if t.data_type == elem_type}
        found._arrays = self._arrays
        return found

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name in self._arrays:
            return self._arrays[name]
        found = array_of(self._tensors[name])
        place = place_of(self._tensors[name])
        if place is None or place.rounding is None:  # a rounded array is a large copy
            self._arrays[name] = found
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def let_go(self) -> None:
        """Frees the memory of the mapped arrays; the next access reads the files again."""
        for array in self._arrays.values():
            let_go(array)

    def count(self, name: str) -> int:
        """The number of values of the constant ``name``, without reading them."""
        return math.prod(self._tensors[name].dims)

    def tensor(self, name: str) -> TensorProto:
        """The constant ``name`` as a message."""
        return self._tensors[name]


def _value(attribute: onnx.AttributeProto) -> TensorProto | None:
    name = attribute.name
    if name == "value":
        return attribute.t
    if name in ("value_float", "value_floats"):
        values = attribute.f if name == "value_float" else attribute.floats
        return numpy_helper.from_array(np.asarray(values, np.float32))
    if name in ("value_int", "value_ints"):
        values = attribute.i if name == "value_int" else attribute.ints
        return numpy_helper.from_array(np.asarray(values, np.int64))
    return None
