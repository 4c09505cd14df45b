"""What the way node by node is made of: a model's nodes as steps, and the live tensors of one
history.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from sys import intern

import onnxruntime as ort

from bisect_trt.core.precision import Precision
from bisect_trt.graph.model.graph import Graph
from bisect_trt.graph.model.layers import Kind
from bisect_trt.graph.model.roundings import list_roundings
from bisect_trt.graph.tensors.tensor_types import captured_names
from bisect_trt.runners.emulator.constants.constant_store import ConstantStore
from bisect_trt.runners.ort.values import Value

Places = Mapping[Precision, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Step:
    """One node as it is run, with its roundings at each precision.

    ``reduced_in`` holds positions among ``inputs``, ``reduced_out`` among ``outputs``; ``frees``
    are the tensors that nobody reads after it.
    """

    index: int
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    lowered_at: tuple[Precision, ...]
    reduced_in: Places
    reduced_out: Places
    frees: tuple[str, ...]

    def lowers(self, precision: Precision) -> bool:
        """True if the node is a layer that runs differently at ``precision``."""
        return precision in self.lowered_at


@dataclass
class Chain:
    """The live tensors of one history: values, their rounded versions, and what is rounded
    already.
    """

    values: dict[str, Value]
    versions: dict[tuple[str, Precision], Value] = field(default_factory=dict)
    state: dict[str, Precision] = field(default_factory=dict)
    held: tuple[ort.OrtValue, ...] = ()
    """The inputs' owners: ONNX Runtime's C values only borrow NumPy's memory."""

    def free(self, names: Sequence[str]) -> None:
        """Let go of tensors."""
        for name in names:
            self.values.pop(name, None)
        if self.versions:
            gone = set(names)
            for key in [k for k in self.versions if k[0] in gone]:
                del self.versions[key]


def compile_steps(graph: Graph, constants: ConstantStore) -> list[Step]:
    """The nodes of the main graph that are to be run, in order."""
    last_use: dict[str, int] = {}
    parts = []
    for index, node in enumerate(graph.proto.graph.node):
        if node.output and node.output[0] in constants:
            continue
        slots = tuple(i for i, tensor in enumerate(node.input) if tensor)
        inputs = tuple(map(intern, (*(node.input[i] for i in slots), *captured_names(node))))
        outputs = tuple(intern(o) for o in node.output if o)
        for tensor in (*inputs, *outputs):
            last_use[tensor] = index
        parts.append((index, slots, inputs, outputs))
    rounded = {p: list_roundings(graph, p) for p in Precision}
    steps = []
    known = _Known()
    for index, slots, inputs, outputs in parts:
        unread = {t for t in {*inputs, *outputs} if last_use[t] == index}
        here = {p: found[index] for p, found in rounded.items()}
        steps.append(
            Step(
                index,
                graph.names[index],
                inputs,
                outputs,
                tuple(p for p in Precision if graph.role(index, p).kind is Kind.LAYER),
                known({p: tuple(map(slots.index, r.operands)) for p, r in here.items()}),
                known(
                    {
                        p: tuple(outputs.index(x.tensor) for x in r.results.values())
                        for p, r in here.items()
                    }
                ),
                tuple(unread.difference(graph.outputs)),
            )
        )
    return steps


class _Known:
    """The first of equal places: thousands of nodes have the same few, which would be most of what
    a model's steps take.
    """

    def __init__(self) -> None:
        self._first: dict[tuple[tuple[int, ...], ...], Places] = {}

    def __call__(self, places: Places) -> Places:
        return self._first.setdefault(tuple(places.values()), places)
