"""The golden outputs held against the reference."""

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
    """The end of the run if the reference itself misses the golden outputs; None if it meets them,
    or none were given.

    Raises:
        BadInputError: a golden output has another shape than the model's.
    """
    golden = problem.golden
    if golden is None:
        return None
    reference = context.references.of(problem.samples[0])
    found = _other_shape(problem.graph.proto, golden, reference) or _not_finite(golden, reference)
    if found is not None:
        return found
    if left := [name for name in reference if name not in golden]:
        message = f"--golden has no {some_of(left)}: of the outputs only the others were held to it"
        context.note(Finding("golden", left[0], message))
    asked = _for_golden(problem.requirements, golden)
    scores = {name: asked.score({**reference, name: golden[name]}, reference) for name in golden}
    score = asked.score({**reference, **golden}, reference)
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
    """The end of the run if a golden output has another shape than the reference's.

    Raises:
        BadInputError: it is a shape that the model's output cannot have.
    """
    for name, array in golden.items():
        if array.shape == reference[name].shape:
            continue
        said = f"output {name!r} has shape {array.shape}, the model gives {reference[name].shape}"
        if not _may_have(model, name, array.shape):
            raise BadInputError(f"--golden: {said}")
        return Diagnosis(
            Cause.GOLDEN_MISMATCH,
            f"The reference itself differs from the golden outputs: {said}; look at the export, or "
            "whether they are of this input.",
        )
    return None


def _may_have(model: onnx.ModelProto, name: str, shape: tuple[int, ...]) -> bool:
    """Whether the output may have this shape: what a detector finds follows its input."""
    declared = next(o for o in model.graph.output if o.name == name).type.tensor_type
    if not declared.HasField("shape"):
        return True
    dims = declared.shape.dim
    known = [(d.dim_value, size) for d, size in zip(dims, shape, strict=False) if d.dim_value]
    return len(dims) == len(shape) and all(wanted == size for wanted, size in known)


def _not_finite(golden: Arrays, reference: Arrays) -> Diagnosis | None:
    """Golden outputs that are not finite where the reference is: no preprocessing made them so."""
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


def _for_golden(asked: Requirements, golden: Arrays) -> Requirements:
    """The conditions on one input, and the default for outputs without any."""
    alone = _alone(asked)
    every = any(item.output is None for item in alone)  # a metric of the user's sees them all
    seen = golden if every else {item.output for item in alone}
    texts = [f"{n}:{text}" for n in golden if n not in seen for text in DEFAULT_REQUIREMENTS]
    usual = parse_requirements(texts, list(golden), {}).items if texts else ()
    return Requirements((*alone, *usual), asked.metrics, scales=asked.scales)


def _alone(asked: Requirements) -> list[Requirement]:
    """The conditions on each input alone."""
    return [item for item in asked.items if item.metric not in asked.collective]
