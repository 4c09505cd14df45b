"""What the layer-by-layer walk is made of: a model's nodes as steps, and the live tensors of one
history.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import onnx
import onnxruntime as ort

from bisect_trt.core.precision import Precision
from bisect_trt.graph.layers import Kind, Role, node_names, role_of
from bisect_trt.graph.tensor_types import captured_names, infer_types, opset_of
from bisect_trt.runners.emulator.constant_store import ConstantStore, Value


@dataclass(frozen=True)
class Step:
    """One node as the walk sees it; ``frees`` are the tensors that nobody reads after it."""

    index: int
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    roles: Mapping[Precision, Role]
    reduced_in: Mapping[Precision, frozenset[int]]
    reduced_out: Mapping[Precision, tuple[str, ...]]
    frees: tuple[str, ...]

    def lowers(self, precision: Precision) -> bool:
        """True if the node is a layer that runs differently at ``precision``."""
        return self.roles[precision].kind is Kind.LAYER


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

    def fork(self) -> Chain:
        """The same tensors, to go on in another way."""
        return Chain(dict(self.values), dict(self.versions), dict(self.state), self.held)

    def free(self, names: Sequence[str]) -> None:
        """Let go of tensors."""
        for name in names:
            self.values.pop(name, None)
        if self.versions:
            gone = set(names)
            for key in [k for k in self.versions if k[0] in gone]:
                del self.versions[key]


def compile_steps(model: onnx.ModelProto, constants: ConstantStore) -> list[Step]:
    """The nodes of ``model`` that are to be run, in order."""
    graph = model.graph
    scope, opset = infer_types(model), opset_of(model)
    last_use: dict[str, int] = {}
    parts = []
    for index, (node, name) in enumerate(zip(graph.node, node_names(graph.node), strict=True)):
        if node.output and node.output[0] in constants:
            continue
        slots = tuple(i for i, tensor in enumerate(node.input) if tensor)
        inputs = (*(node.input[i] for i in slots), *captured_names(node))
        outputs = tuple(o for o in node.output if o)
        for tensor in (*inputs, *outputs):
            last_use[tensor] = index
        parts.append((index, node, name, slots, inputs, outputs))
    kept = {o.name for o in graph.output}
    steps = []
    for index, node, name, slots, inputs, outputs in parts:
        frees = tuple(t for t in {*inputs, *outputs} if last_use[t] == index and t not in kept)
        roles = {p: role_of(node, name, scope, opset, p) for p in Precision}
        positions = {
            p: frozenset(slots.index(i) for i in role.reduced_in) for p, role in roles.items()
        }
        reduced = {p: tuple(node.output[i] for i in role.reduced_out) for p, role in roles.items()}
        steps.append(Step(index, name, inputs, outputs, roles, positions, reduced, frees))
    return steps
