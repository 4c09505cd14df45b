"""Constants that are not what they say: refused by name before a library stumbles over them."""

from __future__ import annotations

import math
from pathlib import Path

from onnx import TensorProto, helper
from onnx.external_data_helper import uses_external_data

from bisect_trt.core.errors import BadInputError
from bisect_trt.graph.tensors.tensor_values import PACKED
from bisect_trt.graph.tensors.wire import EMBEDDED

_COMPLEX = (TensorProto.COMPLEX64, TensorProto.COMPLEX128)


def check_constant(tensor: TensorProto, where: str) -> None:
    """Refuse a tensor of an unknown type, of a negative size, or with another number of values
    than its shape promises. One whose values lie in another file is not looked into.

    Args:
        tensor: an initialiser or an attribute.
        where: the model's name, for the message.

    Raises:
        BadInputError: names the tensor.
    """
    named = f"{where}: constant {tensor.name!r}"
    if any(d < 0 for d in tensor.dims):
        raise BadInputError(f"{named} has a negative size; export the model again")
    if tensor.data_type == TensorProto.STRING:
        return
    try:
        itemsize = helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    except (KeyError, TypeError, ValueError):
        raise BadInputError(
            f"{named} is of the unknown type {tensor.data_type}; export the model again"
        ) from None
    place = {entry.key: entry.value for entry in tensor.external_data}
    apart = uses_external_data(tensor)
    if (apart and place.get("location") != EMBEDDED) or tensor.data_type in PACKED:
        return
    count = math.prod(tensor.dims)
    wanted: int | str
    held: int | str
    if apart:
        wanted, held, unit = str(count * itemsize), place.get("length", ""), "bytes"
    elif tensor.HasField("raw_data"):
        wanted, held, unit = count * itemsize, len(tensor.raw_data), "bytes"
    else:
        field = helper.tensor_dtype_to_field(tensor.data_type)
        wanted = count * (2 if tensor.data_type in _COMPLEX else 1)
        held, unit = len(getattr(tensor, field)), "values"
    if held != wanted:
        raise BadInputError(
            f"{named} holds {held} {unit}, its shape {list(tensor.dims)} needs {wanted}; the file "
            "is damaged, export the model again"
        )


def external_range(tensor: TensorProto, where: Path) -> tuple[str, int, int]:
    """(location, first byte, one behind the last byte) of a tensor's values in another file.

    Args:
        tensor: with external data.
        where: the model's path, for the message.

    Raises:
        BadInputError: its location, offset or length is none.
    """
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    named = f"{where}: external data of {tensor.name!r}"
    if not location or ("\0" in location and location != EMBEDDED):
        raise BadInputError(f"{named} names no file; export the model again")
    try:
        offset, length = int(entries.get("offset") or 0), int(entries.get("length") or 0)
    except ValueError:
        offset = length = -1
    itemsize = helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    bits = PACKED.get(tensor.data_type, 8 * itemsize)
    wanted = -(-math.prod(tensor.dims) * bits // 8)  # rounded up to whole bytes
    if offset < 0 or length < 0 or (length and length != wanted):
        raise BadInputError(
            f"{named} has the offset {entries.get('offset')} and the length "
            f"{entries.get('length')}, its shape needs {wanted} bytes; export the model again"
        )
    return location, offset, offset + (length or wanted)
