"""Compares the golden outputs with the reference."""

from __future__ import annotations

import numpy as np
import onnx

from bisect_trt.base.display import counted, some_of
from bisect_trt.base.errors import BadInputError
from bisect_trt.base.outcomes import Cause, Diagnosis, Finding
from bisect_trt.metrics.arrays import Arrays
from bisect_trt.metrics.parser import DEFAULT_REQUIREMENTS, parse_requirements
from bisect_trt.metrics.requirements import Requirement, Requirements, times
from bisect_trt.steps.context import Context
from bisect_trt.steps.problem import Problem


def check_golden(problem: Problem, context: Context) -> Diagnosis | None:
    """The diagnosis of a reference that misses the golden outputs; None if it meets them.

    Raises:
        BadInputError: a golden output has a shape that the model's cannot have.
    """
    golden = problem.golden
    if golden is None:
        return None
    reference = context.references.of(problem.samples[0])
    wrong = _other_shape(problem.graph.proto, golden, reference) or _not_finite(golden, reference)
    if wrong is not None:
        return wrong
    if absent := [name for name in reference if name not in golden]:
        message = (
            f"--golden has no {some_of(absent)}: of the outputs only the others were held to it"
        )
        context.note(Finding("golden", absent[0], message))
    requirements = _for_golden(problem.requirements, golden)
    scores = {
        name: requirements.score({**reference, name: golden[name]}, reference) for name in golden
    }
    score = requirements.score({**reference, **golden}, reference)
    if score <= 1.0:
        return None
    worst = max(scores, key=lambda name: scores[name])
    where = f"in {worst!r}"
    if not any(item.output in (None, worst) for item in _alone(problem.requirements)):
        where += f", held to {' and '.join(DEFAULT_REQUIREMENTS)} since no requirement is on it"
    return Diagnosis(
        Cause.GOLDEN_MISMATCH,
        f"The reference itself differs from the golden outputs ({times(score)}, {where}): look at "
        "the preprocessing (range, mean and deviation, BGR or RGB, NCHW or NHWC) or the export, "
        "not at the engine.",
    )


def _other_shape(model: onnx.ModelProto, golden: Arrays, reference: Arrays) -> Diagnosis | None:
    """The diagnosis of a golden output with another shape than the reference's.

    Raises:
        BadInputError: the model's output cannot have that shape.
    """
    for name, array in golden.items():
        if array.shape == reference[name].shape:
            continue
        shapes = f"output {name!r} has shape {array.shape}, the model gives {reference[name].shape}"
        if not _may_have(model, name, array.shape):
            raise BadInputError(f"--golden: {shapes}")
        return Diagnosis(
            Cause.GOLDEN_MISMATCH,
            f"The reference itself differs from the golden outputs: {shapes}; look at the export, "
            "or whether they are of this input.",
        )
    return None


def _may_have(model: onnx.ModelProto, name: str, shape: tuple[int, ...]) -> bool:
    """Whether the output may have this shape; the number of a detector's boxes may differ."""
    declared = next(o for o in model.graph.output if o.name == name).type.tensor_type
    if not declared.HasField("shape"):
        return True
    dims = declared.shape.dim
    fixed = [(d.dim_value, size) for d, size in zip(dims, shape, strict=False) if d.dim_value]
    return len(dims) == len(shape) and all(wanted == size for wanted, size in fixed)


def _not_finite(golden: Arrays, reference: Arrays) -> Diagnosis | None:
    """The diagnosis of golden outputs that are not finite where the reference is."""
    # They were written wrongly: no preprocessing makes them so.
    for name, array in golden.items():
        broken = ~np.isfinite(array) & np.isfinite(reference[name])
        if count := int(np.count_nonzero(broken)):
            at = tuple(int(i) for i in np.argwhere(broken)[0])
            return Diagnosis(
                Cause.GOLDEN_MISMATCH,
                f"Golden output {name!r} is NaN or infinite at {counted(count, 'place')} where the "
                f"reference is finite, the first at {at}: look at what wrote it.",
            )
    return None


def _for_golden(requirements: Requirements, golden: Arrays) -> Requirements:
    """The requirements on one input, and the default for outputs without any."""
    alone = _alone(requirements)
    every = any(item.output is None for item in alone)  # also a user's metric, which sees all
    covered = golden if every else {item.output for item in alone}
    texts = [f"{n}:{text}" for n in golden if n not in covered for text in DEFAULT_REQUIREMENTS]
    default = parse_requirements(texts, list(golden), {}).items if texts else ()
    return Requirements((*alone, *default), requirements.metrics, scales=requirements.scales)


def _alone(requirements: Requirements) -> list[Requirement]:
    """The requirements on each input alone."""
    return [item for item in requirements.items if item.metric not in requirements.collective]
