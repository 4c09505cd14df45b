"""Values of initialisers, wherever their bytes lie."""

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
from bisect_trt.base.limits import in_order
from bisect_trt.base.plan import Precision
from bisect_trt.metrics.arrays import BLOCK, flat, slices
from bisect_trt.metrics.rounding import rounded, to_storage
from bisect_trt.model.precision_rules import is_standard
from bisect_trt.model.tensor_types import subgraphs

MAPPED_BYTES = 1 << 16
"""From this size on a tensor stays in its external file; small ones are read faster than mapped."""

PACKED = {
    getattr(TensorProto, name, -1): bits
    for name, bits in (("INT4", 4), ("UINT4", 4), ("FLOAT4E2M1", 4), ("INT2", 2), ("UINT2", 2))
}
"""The bits of types with several values to a byte; -1 are those that an older onnx lacks."""

_ROUNDED = "rounded"
_SOURCE = "source"
_STAMP = "checksum"
"""Keys of ``external_data``; ONNX knows the last one, and runtimes pass over it."""

_VALUES = ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data")


@dataclass(frozen=True)
class Place:
    """Where a tensor's values lie: ``length`` bytes from ``offset`` on in the file ``path``.

    ``rounding`` is what the FP32 values there become first, ``source`` the constant that they are.
    ``stamp`` tells the file from a later one of its name; blank for a file that we write.
    """

    path: str
    offset: int
    length: int
    rounding: Precision | None = None
    source: str = ""
    stamp: str = ""


def place_of(tensor: TensorProto) -> Place | None:
    """Where the values of ``tensor`` lie; None where it holds them itself."""
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
    """Let ``tensor`` have its values at ``place``."""
    entries = {"location": place.path, "offset": str(place.offset), "length": str(place.length)}
    if place.rounding is not None:
        entries |= {_ROUNDED: place.rounding.value, _SOURCE: place.source}
    if place.stamp:
        entries[_STAMP] = place.stamp
    for held in _VALUES:  # ONNX's checker refuses values in two places
        tensor.ClearField(held)
    del tensor.external_data[:]
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)


def take_in(tensor: TensorProto) -> None:
    """Let ``tensor`` hold its values itself, in place."""
    if place_of(tensor) is not None:
        tensor.raw_data = b"".join(chunks_of(tensor))
        tensor.ClearField("data_location")
        del tensor.external_data[:]


def stamp_of(path: str) -> str:
    """What tells that a file was written again.

    Raises:
        OSError: there is no such file.
    """
    status = os.stat(path)
    return f"{status.st_ino}-{status.st_size}-{status.st_mtime_ns}"


def _mapped(place: Place, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The values in a file in one dimension, read only and not copied.

    Raises:
        BadInputError: the file is gone, shorter, or was written again.
    """
    try:
        if place.stamp and stamp_of(place.path) != place.stamp:
            raise BadInputError(
                f"{place.path}: was changed while it was in use; run the command again"
            )
        count = place.length // dtype.itemsize
        if not count:
            return np.empty(0, dtype)
        return np.memmap(place.path, dtype, "r", place.offset, (count,)).view(np.ndarray)
    except (OSError, ValueError) as error:
        if is_out_of_memory(error):
            raise MachineError(
                f"{place.path}: there is no room to map it ({error}); raise the limit (ulimit -v), "
                "or use a machine with more memory"
            ) from error
        raise BadInputError(f"{place.path}: cannot be read ({error})") from error


def let_go(array: NDArray[Any]) -> None:
    """Give back the memory of a mapped array, which is read again when it is looked at."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, mmap.mmap) and hasattr(base, "madvise"):
        base.madvise(mmap.MADV_DONTNEED)


def all_tensors(graph: onnx.GraphProto) -> list[TensorProto]:
    """Initialisers and attributes, those of bodies too, and what sparse ones are made of."""
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
    """The values of ``tensor``; what lies in a file as it is is mapped, not read.

    Raises:
        BadInputError: the file has changed.
    """
    place = place_of(tensor)
    if place is None:
        return numpy_helper.to_array(tensor)
    if tensor.data_type in PACKED:
        held = TensorProto()
        held.CopyFrom(tensor)
        take_in(held)
        return numpy_helper.to_array(held)
    if place.rounding is None:
        return _mapped(place, element_type(tensor)).reshape(tensor.dims)
    exact = _mapped(place, np.dtype(np.float32)).reshape(tensor.dims)
    found = rounded_values(exact, place.rounding, element_type(tensor))
    let_go(exact)
    return found


def element_type(tensor: TensorProto) -> np.dtype[Any]:
    """NumPy's type for the elements of ``tensor``."""
    return np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type))


def rounded_values(
    exact: NDArray[np.float32], precision: Precision, dtype: np.dtype[Any]
) -> NDArray[Any]:
    """``exact`` rounded block by block on several threads, so that nothing else grows with it."""
    found = np.empty(exact.shape, dtype)
    source, target = flat(exact), flat(found)

    def fill(part: slice) -> None:
        target[part] = _rounded(source[part], precision, dtype)

    for _ in in_order(fill, slices(source.size, BLOCK // 4)):
        pass
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
    """The FP32 constant ``source`` rounded, as an initialiser; one in a file is rounded later."""
    place = place_of(tensor) if tensor is not None else None
    if tensor is not None and place is not None and place.rounding is None:
        new = TensorProto(name=name, data_type=elem_type, dims=tensor.dims)
        put_at(new, replace(place, rounding=precision, source=source))
        return new
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(elem_type))
    return numpy_helper.from_array(rounded_values(arrays[source], precision, dtype), name)


def chunks_of(tensor: TensorProto) -> Iterator[bytes]:
    """The bytes of a tensor's values as ``raw_data`` has them, a few megabytes at a time.

    Raises:
        BadInputError: the file has changed.
    """
    place = place_of(tensor)
    if place is None:
        listed = not tensor.HasField("raw_data")
        yield (numpy_helper.from_array(array_of(tensor)) if listed else tensor).raw_data
        return
    values = _mapped(place, np.dtype(np.uint8 if place.rounding is None else np.float32))
    for part in slices(values.size):
        block = values[part]
        if place.rounding is not None:
            block = _rounded(block, place.rounding, element_type(tensor))
        yield block.tobytes()
        let_go(values)


def size_of(tensor: TensorProto) -> int:
    """The bytes of its values, of which none are read; 0 for text."""
    place = place_of(tensor)
    if place is not None and place.rounding is None:
        return place.length
    return 0 if tensor.data_type == TensorProto.STRING else shape_bytes(tensor)


def shape_bytes(tensor: TensorProto) -> int:
    """The bytes of as many values as its shape has."""
    bits: int = PACKED.get(tensor.data_type) or 8 * element_type(tensor).itemsize
    return -(-int(math.prod(tensor.dims)) * bits // 8)


def _rounded(
    block: NDArray[np.float32], precision: Precision, dtype: np.dtype[Any]
) -> NDArray[Any]:
    stored = dtype != np.float32
    return np.asarray(to_storage(block, precision) if stored else rounded(block, precision), dtype)


class Constants(Mapping[str, NDArray[Any]]):
    """Every constant of a graph (its bodies apart) by name, unpacked when it is first asked for."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._kept: dict[str, TensorProto] = {intern(t.name): t for t in graph.initializer}
        for node in graph.node:
            if node.op_type == "Constant" and is_standard(node) and node.attribute:
                value = _value(node.attribute[0])
                if value is not None:
                    self._kept[node.output[0]] = value
        self._known: dict[str, NDArray[Any]] = {}

    def of_type(self, elem_type: int) -> Constants:
        """Those of one of ONNX's types; what is unpacked is shared."""
        found = Constants(onnx.GraphProto())
        found._kept = {n: t for n, t in self._kept.items() if t.data_type == elem_type}
        found._known = self._known
        return found

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name in self._known:
            return self._known[name]
        found = array_of(self._kept[name])
        place = place_of(self._kept[name])
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

    def count(self, name: str) -> int:
        """How many values the constant ``name`` has, of which none are read."""
        return math.prod(self._kept[name].dims)

    def tensor(self, name: str) -> TensorProto:
        """The constant ``name`` as ONNX has it."""
        return self._kept[name]


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
