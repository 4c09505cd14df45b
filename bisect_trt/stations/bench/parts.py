"""Slices of outputs and boxes in them, held against the outputs that there are."""

from __future__ import annotations

from bisect_trt.core.errors import BadInputError, RunnerFailedError
from bisect_trt.core.sample import evenly
from bisect_trt.numerics.requirements.boxes import BoxMatch
from bisect_trt.probe.references import References
from bisect_trt.stations.case.case import Case

_MOST_CHECKED = 8


def check_parts(case: Case, references: References) -> None:
    """Refuse a slice that takes nothing and detections of which there are none: every plan would
    pass.

    Args:
        case: the inputs and the requirements.
        references: gives the FP32 outputs.

    Raises:
        BadInputError: names the condition and the output's shape.
    """
    asked = case.requirements
    sliced = [item for item in asked.items if item.part]
    matches = {n: m for n, m in asked.metrics.items() if isinstance(m, BoxMatch)}
    if not sliced and not matches:
        return
    try:
        outputs = [references.of(sample) for sample in evenly(case.samples, _MOST_CHECKED)]
    except RunnerFailedError as error:
        raise BadInputError(str(error)) from error
    for item in sliced:
        arrays = [of_one[n] for of_one in outputs for n in of_one if n == item.output]
        rank = min((array.ndim for array in arrays), default=0)
        if len(item.slices) > rank or not any(array[item.slices].size for array in arrays):
            shape = arrays[0].shape if arrays else ()
            raise BadInputError(
                f"--requirement {item.text!r}: the slice takes nothing of output {item.output!r}, "
                f"which has shape {shape}"
            )
    for name, match in matches.items():
        if not sum(match.count(of_one) for of_one in outputs):
            raise BadInputError(
                f"--requirement {name}: the outputs hold no box with a score above 0 on the given "
                "inputs, so there is nothing to compare: look at the slices, or give other inputs"
            )
