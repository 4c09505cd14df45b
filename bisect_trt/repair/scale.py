"""Rule *scale*: powers of two that keep every tensor within FP16's range.

Every FP32 tensor t gets an integer exponent e(t); the repaired graph computes 2^e(t) * t. Operators
are linear equations between exponents: equal for Add, sums for Mul and MatMul, halves for Sqrt.
Constants absorb any exponent, and norms take any and scale their epsilon by 4^e. Operators that are
not homogeneous need 0; a logarithm turns a factor into an offset. A Mul may be inserted where a
tensor is read, at a cost.

Scaling by powers of two is exact in FP32, so this rule changes no bit unless a number leaves FP32's
range. Sources: the scale folded into weights in TensorRT-Model-Connect #387, transformers #37226,
onnxruntime #26732 (Gemma 3), ComfyUI #11187; OpenVINO's ACTIVATIONS_SCALE_FACTOR.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from bisect_trt.base.display import counted
from bisect_trt.model.graph import Graph
from bisect_trt.model.walk import attribute
from bisect_trt.repair.edits import (
    LARGEST_FP16,
    Changed,
    Edit,
    Proposal,
    Ranges,
    Refusal,
    Rule,
    Wiring,
    copied,
    size_words,
)
from bisect_trt.repair.exponents import (
    MUL_COST,
    NORMS,
    ExponentProblem,
    cost_at,
    overflows,
    problem_of,
    solved,
    stuck_variables,
)


def propose_scale(graph: Graph, ranges: Ranges) -> Proposal:
    """Powers of two that cost least, as one edit for each region of tensors that move together.

    Identity: f(2^a x, 2^b c) = 2^e f(x, c), where a, b and e solve the equation of each operator.
    """
    wiring = Wiring(graph)
    problem = problem_of(wiring, ranges)
    unmoved = np.zeros(len(problem.ranges), np.int64)
    before = cost_at(problem, unmoved)
    if before < MUL_COST or not stuck_variables(problem, unmoved):
        return (), ()
    names = [n for n, v in problem.tensors.items() if v in overflows(problem, unmoved)]
    best = solved(problem)
    if best is None or stuck_variables(problem, best.exponents):
        exponents = unmoved if best is None else best.exponents
        cut = _borders(wiring, problem, exponents)
        wider = solved(problem_of(wiring, ranges, cut))
        best = min((s for s in (best, wider) if s is not None), key=lambda s: s.cost, default=None)
    if best is None or before - best.cost < MUL_COST:
        reason = "no powers of two bring these tensors into FP16's range"
        return (), (Refusal(Rule.SCALE, tuple(names[:5]), reason),) if names else ()
    return _Writer(wiring, best.problem, best.exponents, ranges).edits(), ()


def _borders(
    wiring: Wiring, problem: ExponentProblem, exponents: NDArray[np.int64]
) -> frozenset[tuple[int, int]]:
    """The edges on which a Mul may stand: between a fixed exponent and what is still at stake.

    Those are the edges of fixed tensors that equations link to one that overflows or vanishes, and
    the edges around that one itself.
    """
    links: dict[int, list[int]] = {}
    for equation in problem.equations:
        members = list(equation.terms)
        # A constant operand absorbs any difference, so that the others are free of each other.
        if len(members) == 2 or not any(problem.constant[v] for v in members):
            for one in members:
                links.setdefault(one, []).extend(members)
    stuck = stuck_variables(problem, exponents)
    reached, stack = set[int](), list(stuck)
    while stack:
        one = stack.pop()
        if one not in reached:
            reached.add(one)
            stack += () if one in problem.fixed else links.get(one, ())
    found = set[tuple[int, int]]()
    for index, node in enumerate(wiring.nodes):
        makes_stuck = any(problem.tensors.get(o, -1) in stuck for o in node.output)
        for slot, name in enumerate(node.input):
            number = problem.tensors.get(name, -1)
            border = number in problem.fixed and number in reached
            if makes_stuck or border or number in stuck:
                found.add((index, slot))
    for place, name in enumerate(wiring.graph.outputs):
        number = problem.tensors.get(name, -1)
        observed = problem.ranges[number] if number >= 0 else None
        # An output beyond the range cannot be repaired: a Mul behind it would overflow.
        fits = observed is None or observed.largest <= LARGEST_FP16
        if number in reached and fits:
            found.add((-1, place))
    return frozenset(found)


class _Writer:
    """Writes nodes with scaled constants and inserted Muls, one edit for each region."""

    def __init__(
        self, wiring: Wiring, problem: ExponentProblem, exponents: NDArray[np.int64], ranges: Ranges
    ) -> None:
        self._wiring, self._problem, self._ranges = wiring, problem, ranges
        self._exponents = exponents
        self._constants: dict[tuple[str, int], str] = {}
        self._muls: dict[tuple[str, int], str] = {}
        self._added = set[str]()
        self._new: dict[int, tuple[onnx.NodeProto, ...]] = {}
        self._arrays: dict[str, NDArray[np.float32]] = {}
        self._changed: dict[int, list[Changed]] = {}

    def edits(self) -> tuple[Edit, ...]:
        outputs = self._scaled_outputs()
        for index, node in enumerate(self._wiring.nodes):
            self._node(index, node, outputs)
        return tuple(self._edit(region) for region in self._regions())

    def _edit(self, region: Sequence[int]) -> Edit:
        """The edit of the nodes ``region``."""
        new = {index: self._new[index] for index in region}
        read = {n for nodes in new.values() for node in nodes for n in node.input}
        touched = [
            name
            for index in region
            for name in (*self._wiring.nodes[index].input, *self._wiring.nodes[index].output)
        ]
        numbers = {n: self._problem.tensors[n] for n in touched if n in self._problem.tensors}
        moved = {n: self._at(v) for n, v in numbers.items() if self._at(v)}
        return Edit(
            rule=Rule.SCALE,
            nodes=tuple(self._wiring.names[i] for i in region),
            tensors=tuple(n for n in numbers if n in self._ranges and self._over(n)),
            sentence=_sentence(sorted(set(moved.values())), len(moved)),
            changed=tuple(c for i in region for c in self._changed.get(i, ())),
            replaced=new,
            constants={n: a for n, a in self._arrays.items() if n in read},
        )

    def _regions(self) -> list[list[int]]:
        """The changed nodes in groups that share no scaled tensor, each in the file's order."""
        # Unchanged nodes link too: a Reshape passes a scaled tensor on.
        group = list(range(len(self._wiring.nodes)))

        def root(index: int) -> int:
            while group[index] != index:
                group[index] = group[group[index]]
                index = group[index]
            return index

        first: dict[str, int] = {}
        for index, node in enumerate(self._wiring.nodes):
            names = {n for new in self._new.get(index, (node,)) for n in (*new.input, *new.output)}
            for name in filter(None, names - self._arrays.keys()):
                number = self._problem.tensors.get(name)
                added = number is None and name in self._added
                if added or (number is not None and self._at(number)):
                    group[root(index)] = root(first.setdefault(name, index))
        found: dict[int, list[int]] = {}
        for index in self._new:
            found.setdefault(root(index), []).append(index)
        return list(found.values())

    def _over(self, name: str) -> bool:
        return self._ranges[name].reach > LARGEST_FP16

    def _at(self, variable: int) -> int:
        return int(self._exponents[variable])

    def _scaled_outputs(self) -> dict[str, str]:
        """The new names of graph outputs that are computed scaled; a Mul gives the old ones."""
        found = {}
        for name in self._wiring.outputs:
            number = self._problem.tensors.get(name)
            if number is not None and self._at(number) and name in self._wiring.maker:
                found[name] = self._wiring.fresh(f"{name}__scaled")
                self._added.add(found[name])
        return found

    def _node(self, index: int, node: onnx.NodeProto, outputs: Mapping[str, str]) -> None:
        new, before, after = copied(node), list[onnx.NodeProto](), list[onnx.NodeProto]()
        touched = False
        for slot, name in enumerate(node.input):
            number = self._problem.slots.get((index, slot))
            if name in outputs:
                new.input[slot], touched = outputs[name], True
            if number is None:
                continue
            if name in self._wiring.constants:
                if self._at(number):
                    new.input[slot] = self._scaled_constant(index, name, self._at(number))
                    touched = True
                continue
            by = self._at(number) - self._at(self._problem.tensors[name])
            if by:
                source = outputs.get(name, name)
                new.input[slot] = self._scaled_tensor(name, source, by, before)
                touched = True
        touched |= self._attributes(index, new)
        if node.op_type == "Log" and (moved := self._input_exponent(index)):
            new.output[0] = self._wiring.fresh(f"{node.output[0]}__moved")
            after.append(self._offset(new.output[0], node.output[0], -moved * math.log(2.0)))
            touched = True
        for slot, name in enumerate(node.output):
            if name in outputs:
                new.output[slot], touched = outputs[name], True
                back = -self._at(self._problem.tensors[name])
                after.append(self._mul(outputs[name], name, back))
        if touched:
            self._new[index] = (*before, new, *after)

    def _scaled_constant(self, index: int, name: str, exponent: int) -> str:
        key = (name, exponent)
        if key not in self._constants:
            array = np.asarray(self._wiring.constants[name])
            scaled = _times_power(array, exponent)
            self._constants[key] = self._wiring.fresh(f"{name}__x2^{exponent}")
            self._arrays[self._constants[key]] = scaled
            words = Changed(name, size_words(array), size_words(scaled))
            self._changed.setdefault(index, []).append(words)
        return self._constants[key]

    def _scaled_tensor(self, name: str, source: str, by: int, before: list[onnx.NodeProto]) -> str:
        key = (name, by)
        if key not in self._muls:
            result = self._wiring.fresh(f"{name}__x2^{by}")
            before.append(self._mul(source, result, by))
            self._muls[key] = result
            self._added.add(result)
        return self._muls[key]

    def _mul(self, source: str, result: str, exponent: int) -> onnx.NodeProto:
        factor = self._wiring.fresh(f"{result}__factor")
        self._arrays[factor] = np.array(2.0**exponent, np.float32)
        return helper.make_node(
            "Mul", [source, factor], [result], self._wiring.fresh(f"{result}__Mul")
        )

    def _offset(self, source: str, result: str, amount: float) -> onnx.NodeProto:
        """An Add that takes back what a factor inside a logarithm added."""
        offset = self._wiring.fresh(f"{result}__offset")
        self._arrays[offset] = np.array(amount, np.float32)
        name = self._wiring.fresh(f"{result}__Add")
        return helper.make_node("Add", [source, offset], [result], name)

    def _attributes(self, index: int, node: onnx.NodeProto) -> bool:
        """Scales epsilons, bounds and padding that are attributes; True if any changed."""
        first = self._input_exponent(index)
        if not first:
            return False
        if node.op_type in NORMS or node.op_type == "BatchNormalization":
            epsilon = attribute(node, "epsilon", 1e-5)
            _set(node, "epsilon", epsilon * 4.0**first)
            words = Changed(
                f"{node.name}: epsilon", f"{epsilon:.4g}", f"{epsilon * 4.0**first:.4g}"
            )
            self._changed.setdefault(index, []).append(words)
            return True
        found = [n for n in _VALUES.get(node.op_type, ()) if attribute(node, n) is not None]
        for name in found:
            _set(node, name, float(_times_power(attribute(node, name), first)))
        return bool(found)

    def _input_exponent(self, index: int) -> int:
        """The exponent of what a node reads first."""
        node = self._wiring.nodes[index]
        if not node.input or not node.input[0]:
            return 0
        number = self._problem.slots.get((index, 0), self._problem.tensors.get(node.input[0], -1))
        return self._at(number) if number >= 0 else 0


_VALUES = {"Clip": ("min", "max"), "Pad": ("value",), "Resize": ("extrapolation_value",)}
"""The attributes that scale with what a node reads."""


def _times_power(values: Any, exponent: int) -> NDArray[np.float32]:
    """``values`` times 2^exponent; a bound that leaves FP32's range becomes its largest number."""
    wide = np.ldexp(np.asarray(values, np.float64), exponent)
    limit = float(np.finfo(np.float32).max)
    return np.where(np.isfinite(wide), np.clip(wide, -limit, limit), wide).astype(np.float32)


def _set(node: onnx.NodeProto, name: str, value: float) -> None:
    kept = [a for a in node.attribute if a.name != name]
    del node.attribute[:]
    node.attribute.extend(kept)
    node.attribute.append(helper.make_attribute(name, float(value)))


def _sentence(powers: list[int], tensors: int) -> str:
    shown = ", ".join(f"2^{p}" for p in powers[:4]) + (", ..." if len(powers) > 4 else "")
    return f"{counted(tensors, 'tensor')} scaled by {shown}, taken back by constants and norms"
