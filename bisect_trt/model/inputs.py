"""What a model says of the inputs that a caller must supply."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from bisect_trt.base.display import counted
from bisect_trt.base.errors import BadInputError

_BATCH = re.compile(r"batch|^(n|b|bs)$", re.IGNORECASE)
"""What exporters call the axis of a batch, which changes no number."""

_COUNTED = re.compile(r"^(p2o\.DynamicDimension\.|unk__)\d+$")
"""What Paddle's and TensorFlow's exporters call axes without a name."""


@dataclass(frozen=True)
class InputSpec:
    """One graph input; ``shape`` holds an int, a symbolic name or None for each axis."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | str | None, ...] | None


def input_specs(model: onnx.ModelProto) -> list[InputSpec]:
    """The inputs a caller must supply: graph inputs without an initialiser.

    Raises:
        BadInputError: one is a sequence or an optional.
    """
    given = {t.name for t in model.graph.initializer}
    specs = []
    for value in model.graph.input:
        if value.name in given:
            continue
        if not value.type.HasField("tensor_type"):
            raise BadInputError(
                f"model: input {value.name!r} is no tensor; sequences and optionals cannot be fed "
                "from .npz"
            )
        tensor = value.type.tensor_type
        shape = tuple(_dimension(d) for d in tensor.shape.dim) if tensor.HasField("shape") else None
        dtype = (
            object
            if tensor.elem_type == TensorProto.STRING
            else helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        )
        specs.append(InputSpec(value.name, np.dtype(dtype), shape))
    return specs


def dynamic_inputs(model: onnx.ModelProto) -> list[str]:
    """The inputs whose shapes ``model`` leaves open, for an engine's profile to bound."""
    return [
        spec.name
        for spec in input_specs(model)
        if spec.shape is None or not all(isinstance(size, int) for size in spec.shape)
    ]


def dynamic_axes(specs: Sequence[InputSpec]) -> Iterator[tuple[InputSpec, int, str]]:
    """Each axis that the model leaves open, but for batches, with what to call it."""
    for spec in specs:
        for axis, size in enumerate(spec.shape or ()):
            if isinstance(size, int):
                continue
            name = "" if size is None or _COUNTED.match(size) else size
            if axis == 0 and len(spec.shape or ()) > 1 and (not name or _BATCH.search(name)):
                continue
            yield spec, axis, name or str(axis)


def length_axes(specs: Sequence[InputSpec]) -> dict[str, int]:
    """By input, the axis that is a sequence's length, if the model leaves just one size open."""
    found = list(dynamic_axes(specs))
    named = {name for _, _, name in found}
    once = len({spec.name for spec, _, _ in found}) == len(found)
    if len(named) != 1 or not once or any(name.isdigit() for name in named):
        return {}
    return {spec.name: axis for spec, axis, _ in found}


def check_names(where: str, names: Sequence[str], specs: Sequence[InputSpec]) -> None:
    """Refuse a sample of other arrays than the model takes.

    Raises:
        BadInputError: names the first that is missing, or is too many.
    """
    wanted = [s.name for s in specs]
    missing = [n for n in wanted if n not in names]
    extra = [n for n in names if n not in wanted]
    if missing:
        raise BadInputError(
            f"{where}: input {missing[0]!r} is missing; the model takes {', '.join(wanted)}, the "
            f"sample holds {', '.join(names) or 'nothing'}"
        )
    if extra:
        raise BadInputError(
            f"{where}: {extra[0]!r} is no input of the model, or one with a default, which is a "
            f"constant here; it takes {', '.join(wanted) or 'none'}"
        )


def check_array(
    where: str,
    spec: InputSpec,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    symbols: dict[str, int],
) -> None:
    """Refuse an array that the model does not take, by its header.

    Raises:
        BadInputError: another dtype, rank or size.
    """
    if dtype != spec.dtype:
        hint = "convert it with .astype()"
        if spec.dtype.kind == "V":  # what NumPy has no type for
            hint = "NumPy's files cannot hold it: give it through --input MODULE:FUNCTION"
        if spec.dtype.hasobject:
            raise BadInputError(
                f"{where}: input {spec.name!r} is text; models that take text are not supported"
            )
        raise BadInputError(
            f"{where}: input {spec.name!r} is {dtype}, the model takes {spec.dtype}; {hint}"
        )
    if spec.shape is not None and len(shape) != len(spec.shape):
        raise BadInputError(
            f"{where}: input {spec.name!r} has {counted(len(shape), 'dimension')}, the model "
            f"takes {len(spec.shape)}"
        )
    for axis, (size, dim) in enumerate(zip(shape, spec.shape or (), strict=False)):
        if isinstance(dim, int) and size != dim:
            raise BadInputError(
                f"{where}: input {spec.name!r} has size {size} on axis {axis}, the model takes "
                f"{dim}"
            )
        if isinstance(dim, str) and symbols.setdefault(dim, size) != size:
            raise BadInputError(
                f"{where}: input {spec.name!r} has size {size} on axis {axis}, but {dim!r} is "
                f"{symbols[dim]} elsewhere"
            )


def _dimension(dim: onnx.TensorShapeProto.Dimension) -> int | str | None:
    if is_placeholder(dim):
        return None
    return int(dim.dim_value) if dim.WhichOneof("value") == "dim_value" else str(dim.dim_param)


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
