"""The scales of the outputs over the given inputs, which the default requirement judges by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from bisect_trt.core.errors import BadInputError, RunnerFailedError
from bisect_trt.core.finding import Finding
from bisect_trt.core.names import counted
from bisect_trt.numerics.arrays import Arrays
from bisect_trt.numerics.requirements.scales import Scale, measure_scales
from bisect_trt.probe.journal import Journal, Row, content_key
from bisect_trt.probe.references import References
from bisect_trt.stations.case.case import Case
from bisect_trt.version import __version__

_NAMED_ENTRIES = 4


def with_scales(case: Case, references: References, journal: Journal) -> Case:
    """``case`` with the scales of its outputs, where a requirement is judged by them and no saved
    plan has brought them: recalled from the journal, or measured on the given inputs.

    Args:
        case: the model, the inputs and the requirements.
        references: gives the FP32 outputs.
        journal: where they are kept.

    Raises:
        BadInputError: the model cannot be run on an input.
    """
    asked = case.requirements
    if asked.scales or not any(item.by_scale for item in asked.items):
        return case
    digests = [sample.digest for sample in case.samples]
    key = content_key(__version__, case.model.digest, "scales", case.judged, digests)
    known = journal.recall(key)
    if known is not None:
        scales = {name: Scale.from_json(told) for name, told in known[0].items()}
    else:
        try:
            references.prepare(case.samples, lambda: None)
            scales = measure_scales(_outputs(case, references), _static_axes(case))
        except RunnerFailedError as error:
            raise BadInputError(str(error)) from error
        told = {name: scale.as_json() for name, scale in scales.items()}
        journal.record_later(Row(key, "scales", told))
    return replace(case, requirements=replace(asked, scales=scales))


def scale_findings(case: Case) -> list[Finding]:
    """A finding for each output that is judged group by group."""
    found = []
    for name, scale in case.requirements.scales.items():
        if scale.axis is None:
            continue
        groups = "; ".join(
            f"{_entries(entries)} (RMS {rms:.3g})"
            for entries, rms in zip(scale.groups, scale.rms, strict=True)
        )
        found.append(
            Finding(
                "scales",
                name,
                f"output {name!r} mixes {len(scale.groups)} scales along axis {scale.axis}, each "
                f"held to its own RMS: entries {groups}; ask otherwise with a slice, such as "
                f"--requirement '{name}[{':,' * scale.axis}0:1]:max_abs<=X'",
            )
        )
    return found


def _outputs(case: Case, references: References) -> Iterator[Arrays]:
    return (references.of(sample) for sample in case.samples)


def _static_axes(case: Case) -> dict[str, list[bool]]:
    """By output, whether the model fixes the size of each axis; those of unknown rank are left
    out.
    """
    return {
        value.name: [dim.dim_value > 0 for dim in value.type.tensor_type.shape.dim]
        for value in case.graph.proto.graph.output
        if value.type.tensor_type.HasField("shape")
    }


def _entries(entries: tuple[int, ...]) -> str:
    """Entry numbers, neighbours as ranges: "0-3, 5"."""
    spans: list[list[int]] = []
    for entry in entries:
        if spans and entry == spans[-1][1] + 1:
            spans[-1][1] = entry
        else:
            spans.append([entry, entry])
    said = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    more = len(said) - _NAMED_ENTRIES
    shown = ", ".join(said[:_NAMED_ENTRIES])
    return f"{shown} and {counted(more, 'range')} more" if more > 0 else shown
