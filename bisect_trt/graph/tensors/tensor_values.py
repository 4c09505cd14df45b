"""The values of a model's tensors, wherever they are: in the model, in a file, or in a file and to
be rounded.

A large tensor of a loaded model says where its values lie (see ``wire`` and ``load``), in ONNX's
own words but for one: ``rounded`` says that they are to be rounded first. So a plan is written as
another model without a copy of the weights, and whoever needs values maps them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import uses_external_data

from bisect_trt.core.machine.threads import in_order
from bisect_trt.core.precision import Precision
from bisect_trt.graph.tensors.mapped_files import let_go, mapped
from bisect_trt.graph.tensors.tensor_types import subgraphs
from bisect_trt.numerics.blocks import BLOCK, flat, slices
from bisect_trt.numerics.rounding import rounded, to_storage

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

_A_PIECE = BLOCK // 4
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
    """``exact`` rounded, block by block and on several threads: nothing else of its size is made.

    Args:
        exact: of any shape.
        precision: what the values are rounded to.
        dtype: float32, or the type that stores ``precision``.

    Returns:
        An array of ``exact``'s shape and ``dtype``.
    """
    found = np.empty(exact.shape, dtype)
    source, target = flat(exact), flat(found)

    def fill(part: slice) -> None:
        target[part] = _rounded(source[part], precision, dtype)

    for _ in in_order(fill, slices(source.size, _A_PIECE)):
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
    """An FP32 constant rounded, as an initialiser.

    Args:
        tensor: the constant; None where its values are to be held in any case.
        arrays: the constants' values by name.
        source: the constant's name.
        name: of the initialiser.
        precision: what the values are rounded to.
        elem_type: ONNX's type that they are stored in.

    Returns:
        An initialiser that holds the values, or says where they lie if ``tensor`` does.
    """
    place = place_of(tensor) if tensor is not None else None
    if tensor is not None and place is not None and place.rounding is None:
        new = TensorProto(name=name, data_type=elem_type, dims=tensor.dims)
        put_at(new, Place(place.path, place.offset, place.length, precision, source))
        return new
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(elem_type))
    return numpy_helper.from_array(rounded_values(arrays[source], precision, dtype), name)


def pieces_of(tensor: TensorProto) -> Iterator[bytes]:
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

    def piece(part: slice) -> bytes:
        found = _rounded(values[part], precision, dtype).tobytes()
        let_go(values[part])
        return found

    yield from in_order(piece, slices(values.size, _A_PIECE))


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
