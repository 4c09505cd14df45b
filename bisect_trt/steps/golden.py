"""The golden outputs held against the reference; where they differ, why: the usual mistakes of
preprocessing, tried on the inputs one by one and two at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
import onnx
from numpy.typing import NDArray

from bisect_trt.base.display import counted, some_of
from bisect_trt.base.errors import BadInputError, RunnerFailedError
from bisect_trt.base.outcomes import Cause, Diagnosis, Finding
from bisect_trt.base.sample import Sample
from bisect_trt.metrics.arrays import Arrays
from bisect_trt.metrics.parser import DEFAULT_REQUIREMENTS, parse_requirements
from bisect_trt.metrics.requirements import Requirements, times
from bisect_trt.steps.context import Context
from bisect_trt.steps.problem import Problem

_NAMED = 3
Change = Callable[[NDArray[np.float32]], NDArray[np.float32]]
_MEAN, _DEVIATION = (
    np.asarray(v, np.float32) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
)


def check_golden(problem: Problem, context: Context) -> Diagnosis | None:
    """The end of the run if the reference itself misses the golden outputs; None if it meets them,
    or none were given.

    Raises:
        BadInputError: a golden output has another shape than the model's.
    """
    golden = problem.golden
    if golden is None:
        return None
    sample = problem.samples[0]
    reference = context.references.of(sample)
    told = other_shapes(problem, reference) or _not_finite(golden, reference)
    if told is not None:
        return told
    if left := [name for name in reference if name not in golden]:
        message = (
            f"--golden has no {some_of(left, _NAMED)}: of the outputs only the others were held "
            "to it"
        )
        context.note(Finding("golden", left[0], message))
    asked = _for_golden(problem.requirements, golden)
    score = _score(asked, golden, reference)
    if score <= 1.0:
        return None
    context.observer.step("golden outputs")

    def remaining(arrays: Arrays) -> float:
        return _score(asked, golden, problem.reference.outputs(Sample("changed", arrays)))

    found = explain_golden(sample.arrays, remaining)
    problem.reference.release()
    why = (
        "none of the usual mistakes of preprocessing explains it: look at the export, or at what "
        "else the framework does to its input."
    )
    if found is not None:
        why = (
            f"they are those of input {found.input!r} {found.words} ({times(found.score)}): mend "
            "the preprocessing, not the engine."
        )
    return Diagnosis(
        Cause.GOLDEN_MISMATCH,
        f"The reference itself differs from the golden outputs ({times(score)}, "
        f"{_where(asked, problem.requirements, golden, reference)}); {why}",
    )


def other_shapes(problem: Problem, reference: Arrays) -> Diagnosis | None:
    """The end of the run if a golden output has another shape than the reference's.

    Raises:
        BadInputError: it is a shape that the model's output cannot have.
    """
    for name, array in (problem.golden or {}).items():
        if array.shape == reference[name].shape:
            continue
        said = f"output {name!r} has shape {array.shape}, the model gives {reference[name].shape}"
        if _may_differ(problem.graph.proto, name, array.shape):
            told = f"The reference itself differs from the golden outputs: {said}; look at the "
            return Diagnosis(
                Cause.GOLDEN_MISMATCH, f"{told}export, or whether they are of this input."
            )
        raise BadInputError(f"--golden: {said}")
    return None


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


def _may_differ(model: onnx.ModelProto, name: str, shape: tuple[int, ...]) -> bool:
    """Whether the output may have this shape: what a detector finds follows its input."""
    declared = next(o for o in model.graph.output if o.name == name).type.tensor_type
    if not declared.HasField("shape"):
        return True
    dims = declared.shape.dim
    known = [(d.dim_value, size) for d, size in zip(dims, shape, strict=False) if d.dim_value]
    return len(dims) == len(shape) and all(wanted == size for wanted, size in known)


def _where(asked: Requirements, given: Requirements, golden: Arrays, reference: Arrays) -> str:
    """In which output the reference is off by most, and what it was held to if nobody said."""
    worst = max(golden, key=lambda name: _score(asked, {name: golden[name]}, reference))
    alone = (item for item in given.items if item.metric not in given.collective)
    if any(item.output in (None, worst) for item in alone):
        return f"in {worst!r}"
    usual = " and ".join(DEFAULT_REQUIREMENTS)
    return f"in {worst!r}, held to {usual} since no requirement is on it"


def _for_golden(asked: Requirements, golden: Arrays) -> Requirements:
    """The conditions that golden outputs are held to: those on an input alone, and the usual one
    for each output that none of them looks at.
    """
    alone = [item for item in asked.items if item.metric not in asked.collective]
    every = any(item.output is None for item in alone)  # a metric of the user's sees them all
    seen = golden if every else {item.output for item in alone}
    texts = [f"{n}:{text}" for n in golden if n not in seen for text in DEFAULT_REQUIREMENTS]
    usual = parse_requirements(texts, list(golden), {}).items if texts else ()
    return Requirements((*alone, *usual), asked.metrics, scales=asked.scales)


def _score(asked: Requirements, golden: Arrays, outputs: Arrays) -> float:
    """The reference's ``outputs`` held against the golden ones; what these lack is right."""
    return asked.score({**outputs, **golden}, outputs)


@dataclass(frozen=True)
class Explanation:
    """``words`` say what was done to ``input`` where the golden outputs come from; ``score`` is
    what then remains.
    """

    input: str
    words: str
    score: float


def explain_golden(inputs: Arrays, score: Callable[[Arrays], float]) -> Explanation | None:
    """The first change of an input with which the reference gives the golden outputs (``score`` at
    most 1), the simplest first.

    ``score`` runs the reference on changed inputs and holds the outputs against the golden ones.
    None if no change explains them.
    """
    for name, array in inputs.items():
        if array.dtype != np.float32 or not array.ndim:
            continue
        singles = list(_changes(array))
        pairs = (
            (f"{first}, then {second}", _then(one, other))
            for first, one in singles
            for second, other in singles
            if first != second and not _undo(first, second)
        )
        for words, change in chain(singles, pairs):
            try:
                remaining = score({**inputs, name: np.ascontiguousarray(change(array), np.float32)})
            except RunnerFailedError:
                continue
            if remaining <= 1.0:
                return Explanation(name, words, remaining)
    return None


def _changes(array: NDArray[np.float32]) -> Iterator[tuple[str, Change]]:
    """What people forget or do twice; channels are the axis of size 3 behind the batch."""
    yield "divided by 255", lambda x: x / np.float32(255.0)
    yield "multiplied by 255", lambda x: x * np.float32(255.0)
    yield "scaled from [0, 1] to [-1, 1]", lambda x: x * np.float32(2.0) - np.float32(1.0)
    yield "scaled from [-1, 1] to [0, 1]", lambda x: (x + np.float32(1.0)) / np.float32(2.0)
    axis = next((a for a in (1, array.ndim - 1, 0) if a < array.ndim and array.shape[a] == 3), None)
    if axis is None or array.ndim < 3:  # as images have them
        return
    shape = [3 if a == axis else 1 for a in range(array.ndim)]
    mean, deviation = _MEAN.reshape(shape), _DEVIATION.reshape(shape)
    yield "its channels reversed (BGR and RGB)", lambda x: np.flip(x, axis)
    yield "normalised with ImageNet's mean and deviation", lambda x: (x - mean) / deviation
    yield (
        "without the normalisation by ImageNet's mean and deviation",
        lambda x: x * deviation + mean,
    )
    yield (
        "its channels reversed before the normalisation (BGR and RGB)",
        lambda x: (np.flip(x * deviation + mean, axis) - mean) / deviation,
    )
    if array.ndim == 4:
        last = (array.shape[0], *array.shape[2:], array.shape[1])
        yield (
            "its memory in the order NHWC, read as NCHW",
            lambda x: np.transpose(x, (0, 2, 3, 1)).reshape(x.shape),
        )
        yield (
            "its memory in the order NCHW, read as NHWC",
            lambda x: np.transpose(x.reshape(last), (0, 3, 1, 2)),
        )


def _then(one: Change, other: Change) -> Change:
    return lambda x: other(one(x))


_OPPOSITES = (
    {"divided by 255", "multiplied by 255"},
    {"scaled from [0, 1] to [-1, 1]", "scaled from [-1, 1] to [0, 1]"},
    {
        "normalised with ImageNet's mean and deviation",
        "without the normalisation by ImageNet's mean and deviation",
    },
    {"its memory in the order NHWC, read as NCHW", "its memory in the order NCHW, read as NHWC"},
)


def _undo(first: str, second: str) -> bool:
    return {first, second} in _OPPOSITES
