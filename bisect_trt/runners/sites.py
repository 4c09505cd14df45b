"""Where a plan can make roundings: the outputs and the operands of layers, and the constants they read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bisect_trt.precision import Precision
from bisect_trt.runners.steps import Step
from bisect_trt.runners.weights import ConstantStore


@dataclass(frozen=True)
class Site:
    """One rounding: of ``tensor``, where a layer of ``on`` is lowered and none of ``off`` is.

    It is made by the step at ``position``: of its output, or if ``read``, of what it alone reads.
    """

    position: int
    tensor: str
    read: bool
    constant: bool
    on: tuple[str, ...]
    off: tuple[str, ...] = ()


def rounding_sites(steps: Sequence[Step], constants: ConstantStore, outputs: Sequence[str], precision: Precision) -> list[Site]:
    """Every rounding that lowering layers to ``precision`` can make, in the order of the steps."""
    layers = [step.lowers(precision) for step in steps]
    readers: dict[str, list[int]] = {}
    for position, step in enumerate(steps):
        for name in dict.fromkeys(step.inputs):
            readers.setdefault(name, []).append(position)
    makers = {name: p for p, step in enumerate(steps) if layers[p] for name in step.reduced_out[precision]}

    def reads_reduced_only(position: int, tensor: str) -> bool:
        slots = {slot for slot, name in enumerate(steps[position].inputs) if name == tensor}
        return layers[position] and slots <= steps[position].reduced_in[precision]

    sites = []
    for position, step in enumerate(steps):
        if not layers[position]:
            continue
        for tensor in dict.fromkeys(step.inputs[slot] for slot in sorted(step.reduced_in[precision])):
            if tensor in constants:
                sites.append(Site(position, tensor, True, True, (step.name,)))
                continue
            maker = makers.get(tensor)
            if maker is None or not _only(readers, outputs, tensor, position) or not reads_reduced_only(position, tensor):
                sites.append(Site(position, tensor, True, False, (step.name,), () if maker is None else (steps[maker].name,)))
        for tensor in step.reduced_out[precision]:
            reader = readers.get(tensor, [])
            # Rounding a tensor for the only layer that reads it is rounding it at its source.
            alone = len(reader) == 1 and tensor not in outputs and reads_reduced_only(reader[0], tensor)
            sites.append(Site(position, tensor, False, False, (step.name, steps[reader[0]].name) if alone else (step.name,)))
    return sites


def _only(readers: dict[str, list[int]], outputs: Sequence[str], tensor: str, position: int) -> bool:
    return readers[tensor] == [position] and tensor not in outputs
