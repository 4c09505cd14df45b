"""The input shapes and shape values that an engine is built for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx

from bisect_trt.base.errors import BadInputError
from bisect_trt.base.sample import Sample
from bisect_trt.model.inputs import input_specs
from bisect_trt.runners.tensorrt.records import Profile, Shape


def profile_of(model: onnx.ModelProto, samples: Sequence[Sample], texts: Sequence[str]) -> Profile:
    """Returns the (min, opt, max) shapes of every input.

    Raises:
        BadInputError: a text cannot be read, an input is unknown, or a sample is outside its
            profile.
    """
    given = dict(_parsed_profile(text) for text in texts)
    names = [spec.name for spec in input_specs(model)]
    unknown = [name for name in given if name not in names]
    if unknown:
        raise BadInputError(
            f"--profile: the model has no input {unknown[0]!r}; it takes {', '.join(names)}"
        )
    profile = {}
    for name in names:
        shapes = [s.shapes[name] for s in samples]
        other = next((s for s in samples if len(s.shapes[name]) != len(shapes[0])), None)
        if other is not None:
            raise BadInputError(
                f"{other.name}: input {name!r} has {len(other.shapes[name])} axes and in "
                f"{samples[0].name} {len(shapes[0])}; an engine takes one number: give one kind"
            )
        # TensorRT tunes for opt: the first sample is taken for the usual one.
        smallest, _, largest = profile[name] = given.get(name) or (
            tuple(map(min, zip(*shapes, strict=True))),
            shapes[0],
            tuple(map(max, zip(*shapes, strict=True))),
        )
        for sample, shape in zip(samples, shapes, strict=True):
            if not _inside(shape, profile[name]):
                raise BadInputError(
                    f"{sample.name}: input {name!r} of shape {shape} is outside --profile "
                    f"{smallest} to {largest}"
                )
    return profile


def values_of(samples: Sequence[Sample]) -> Profile:
    """Returns the (min, opt, max) values of the small integer inputs, which may be shapes."""
    # Larger inputs are no shapes, and those of all samples together may not fit into memory.
    values: dict[str, tuple[Shape, Shape, Shape]] = {}
    for name, first in samples[0].arrays.items():
        if first.dtype.kind not in "iu" or first.size > 64:
            continue
        arrays = [s.arrays[name].ravel() for s in samples]
        if len({a.size for a in arrays}) == 1:
            stacked = np.stack(arrays)
            smallest, usual, largest = (
                tuple(map(int, row))
                for row in (stacked.min(axis=0), arrays[0], stacked.max(axis=0))
            )
            values[name] = (smallest, usual, largest)
    return values


def takes(profile: Profile, sample: Sample) -> bool:
    """Whether an engine of ``profile`` takes the shapes of ``sample``."""
    return all(_inside(sample.shapes.get(name, ()), shapes) for name, shapes in profile.items())


def _inside(shape: Shape, shapes: tuple[Shape, Shape, Shape]) -> bool:
    smallest, _, largest = shapes
    if len(shape) != len(smallest):
        return False
    return all(a <= b <= c for a, b, c in zip(smallest, shape, largest, strict=True))


def shape_of(option: str, text: str) -> tuple[str, Shape]:
    """Reads INPUT:SHAPE, such as "x:8x3x224x224".

    Raises:
        BadInputError: it is written in another way.
    """
    name, _, shape = text.rpartition(":")
    try:
        found = tuple(int(size) for size in shape.split("x"))
    except ValueError:
        found = ()
    if not name or not found or min(found) < 1:
        raise BadInputError(f"{option} {text!r}: write INPUT:SHAPE, such as x:8x3x224x224")
    return name, found


def _parsed_profile(text: str) -> tuple[str, tuple[Shape, Shape, Shape]]:
    name, _, shapes = text.rpartition(":")
    try:
        smallest, usual, largest = (
            tuple(int(d) for d in part.split("x")) for part in shapes.split("/")
        )
    except ValueError:
        raise BadInputError(
            f"--profile {text!r}: write INPUT:MIN/OPT/MAX, such as "
            "x:1x3x32x32/1x3x64x64/1x3x128x128"
        ) from None
    same_rank = len(smallest) == len(usual) == len(largest)
    ordered = same_rank and _inside(usual, (smallest, usual, largest))
    if not name or not ordered or min(smallest) < 1:
        raise BadInputError(
            f"--profile {text!r}: sizes must be positive, as many in each shape, and none smaller "
            "than the one before it: MIN/OPT/MAX"
        )
    return name, (smallest, usual, largest)
