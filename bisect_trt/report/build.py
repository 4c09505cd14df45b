"""Writes the command that builds the engine of a plan."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping

import pandas as pd

from bisect_trt.base.atomic_files import TYPED_MODEL
from bisect_trt.base.plan import Precision
from bisect_trt.report.record import Record

Shape = tuple[int, ...]
Profile = Mapping[str, tuple[Shape, Shape, Shape]]

ENGINE = "model.engine"
"""The name of the engine that the command writes, beside the model."""


def build_command(result: Record, *, in_folder: bool = False) -> str:
    """The command that builds the engine of the model to ship, for a POSIX shell.

    It is for the run's own folder if ``in_folder``, else for where the run was started.
    """
    return shlex.join(build_words(result, "" if in_folder else f"{result.folder}/"))


def build_words(result: Record, folder: str = "") -> list[str]:
    """The words of :func:`build_command`, for the model in ``folder``, where the engine goes too.

    TF32 is off unless the plan was judged with it, or leaves it no layer to round.
    """
    words = ["trtexec", f"--onnx={folder}{TYPED_MODEL}", "--stronglyTyped"]
    words += [] if allows_tf32(result) else ["--noTF32"]
    profile = profile_of_inputs(result)
    for place, part in enumerate(("min", "opt", "max")):
        shapes = [f"{n}:{'x'.join(map(str, s[place]))}" for n, s in profile.items() if s[place]]
        words += [f"--{part}Shapes={','.join(shapes)}"] if shapes else []
    return [*words, f"--saveEngine={folder}{ENGINE}"]


def why_no_tf32(result: Record) -> str:
    """How TF32 alone misses the requirement; blank where it meets it or was not judged."""
    if result.outputs.empty or _is_tf32(result):
        return ""
    label = result.outputs["baseline"].astype(str)
    is_of_graph = label.str.startswith("repaired") == result.is_repaired
    scores = result.outputs["score"][is_of_graph & label.str.split().str[-1].eq("tf32")]
    worst = float(pd.to_numeric(scores).max())
    return f"TF32 alone uses {worst:.3g} of the tolerance" if worst > 1.0 else ""


def allows_tf32(result: Record) -> bool:
    """Whether TF32 cannot make the plan wrong."""
    if _is_tf32(result):
        return True
    return not (result.pinned or result.plan.base is Precision.FP32 or why_no_tf32(result))


def _is_tf32(result: Record) -> bool:
    """Whether the plan was judged with TF32."""
    return Precision.TF32 in (result.plan.base, result.plan.pin_precision)


def profile_of_inputs(result: Record) -> Profile:
    """The smallest, median and largest shape of each input with a dynamic shape.

    The median is of the given inputs in the order of their elements, all dynamic tensors together.
    """
    if "shapes" not in result.inputs:
        return {}
    by_sample = [json.loads(shapes) for shapes in result.inputs["shapes"]]
    # Of one input, as the axes of its tensors belong together.
    by_sample.sort(key=lambda s: sum(math.prod(s[n]) for n in result.dynamic_inputs if n in s))
    profile = {}
    for name in result.dynamic_inputs:
        shapes = [tuple(int(d) for d in sample[name]) for sample in by_sample if name in sample]
        if shapes and len({len(shape) for shape in shapes}) == 1:
            sizes, median = list(zip(*shapes, strict=True)), shapes[len(shapes) // 2]
            profile[name] = (tuple(map(min, sizes)), median, tuple(map(max, sizes)))
    return profile
