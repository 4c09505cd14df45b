"""Checks inputs against those that a model declares, and names its dynamic axes."""

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
from bisect_trt.model.walk import fed_inputs

_BATCH = re.compile(r"batch|^(n|b|bs)$", re.IGNORECASE)
"""Names that exporters give to the batch axis."""

_COUNTED = re.compile(r"^(p2o\.DynamicDimension\.|unk__)\d+$")
"""Names that Paddle's and TensorFlow's exporters give to unnamed axes."""


@dataclass(frozen=True)
class InputSpec:
    """One graph input; ``shape`` holds a size, a symbolic name or None for each axis."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | str | None, ...] | None


def input_specs(model: onnx.ModelProto) -> list[InputSpec]:
    """The graph inputs without an initialiser, which a caller must supply.

    Raises:
        BadInputError: an input is a sequence or an optional.
    """
    specs = []
    for value in fed_inputs(model.graph):
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
    """The inputs with dynamic shapes, which an engine's profile must bound."""
    return [
        spec.name
        for spec in input_specs(model)
        if spec.shape is None or not all(isinstance(size, int) for size in spec.shape)
    ]


def dynamic_axes(specs: Sequence[InputSpec]) -> Iterator[tuple[InputSpec, int, str]]:
    """Each dynamic axis except batch axes: the input, the axis and its name or number."""
    for spec in specs:
        for axis, size in enumerate(spec.shape or ()):
            if isinstance(size, int):
                continue
            name = "" if size is None or _COUNTED.match(size) else size
            # The batch size changes no number of a sample.
            if axis == 0 and len(spec.shape or ()) > 1 and (not name or _BATCH.search(name)):
                continue
            yield spec, axis, name or str(axis)


def length_axes(specs: Sequence[InputSpec]) -> dict[str, int]:
    """By input, the axis of the sequence length, if that is the model's only dynamic size."""
    axes = list(dynamic_axes(specs))
    names = {name for _, _, name in axes}
    once_per_input = len({spec.name for spec, _, _ in axes}) == len(axes)
    if len(names) != 1 or not once_per_input or any(name.isdigit() for name in names):
        return {}
    return {spec.name: axis for spec, axis, _ in axes}


def check_names(where: str, names: Sequence[str], specs: Sequence[InputSpec]) -> None:
    """Refuses a sample whose arrays are not exactly the model's inputs."""
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
    """Refuses an array of another dtype, rank or size; ``symbols`` collects the symbolic sizes.

    Raises:
        BadInputError: the model does not take the array.
    """
    layout = _layout_hint(shape, spec.shape)
    if dtype != spec.dtype:
        hint = "convert it with .astype()"
        if spec.dtype.kind == "V":  # NumPy lacks this type
            hint = "NumPy's files cannot hold it: give it through --input MODULE:FUNCTION"
        if spec.dtype.hasobject:
            raise BadInputError(
                f"{where}: input {spec.name!r} is text; models that take text are not supported"
            )
        raise BadInputError(
            f"{where}: input {spec.name!r} is {dtype}, the model takes {spec.dtype}; {hint}{layout}"
        )
    if spec.shape is not None and len(shape) != len(spec.shape):
        raise BadInputError(
            f"{where}: input {spec.name!r} has {counted(len(shape), 'dimension')}, the model "
            f"takes {len(spec.shape)}{layout}"
        )
    for axis, (size, dim) in enumerate(zip(shape, spec.shape or (), strict=False)):
        if isinstance(dim, int) and size != dim:
            raise BadInputError(
                f"{where}: input {spec.name!r} has size {size} on axis {axis}, the model takes "
                f"{dim}{layout}"
            )
        if isinstance(dim, str) and symbols.setdefault(dim, size) != size:
            raise BadInputError(
                f"{where}: input {spec.name!r} has size {size} on axis {axis}, but {dim!r} is "
                f"{symbols[dim]} elsewhere"
            )


_LAYOUTS = (("NHWC", "NCHW", (0, 3, 1, 2)), ("NCHW", "NHWC", (0, 2, 3, 1)))
"""A layout of images, another, and the axes that turn the first into the second."""


def _layout_hint(shape: tuple[int, ...], wanted: tuple[int | str | None, ...] | None) -> str:
    """How images of another layout, or without a batch axis, become what the model takes."""
    if wanted is None or _fits(shape, wanted):
        return ""
    lacks_batch = len(shape) + 1 == len(wanted)
    whole, array = ((1, *shape), "array[None]") if lacks_batch else (shape, "array")
    if lacks_batch and _fits(whole, wanted):
        return f"; add the batch axis: {array}"
    for given, asked, axes in _LAYOUTS:
        if len(whole) == 4 and _fits(tuple(whole[axis] for axis in axes), wanted):
            return f"; it looks like {given}, the model takes {asked}: {array}.transpose{axes}"
    return ""


def _fits(shape: tuple[int, ...], wanted: tuple[int | str | None, ...]) -> bool:
    """Whether an array of this shape has the sizes that are fixed."""
    return len(shape) == len(wanted) and all(
        not isinstance(dim, int) or size == dim for size, dim in zip(shape, wanted, strict=True)
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


def name_placeholder_dims(graph: onnx.GraphProto) -> None:
    """Names every placeholder dimension of the inputs and outputs ``tensor_axis``, in place."""
    # TensorRT takes dimensions of one name for equal sizes, even where the name is "?".
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
