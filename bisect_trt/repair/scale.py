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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import highspy
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from bisect_trt.base.display import counted
from bisect_trt.model.graph import Graph
from bisect_trt.model.precision_rules import FLOAT, is_standard
from bisect_trt.repair.edits import (
    HEADROOM,
    LARGEST_FP16,
    SMALLEST_FP16,
    SMALLEST_NORMAL_FP16,
    Changed,
    Edit,
    Proposal,
    Range,
    Ranges,
    Refusal,
    Rule,
    Wiring,
    attribute,
    copied,
    size_words,
)

EQUAL = frozenset(
    {"Abs", "Add", "AveragePool", "Clip", "Compress", "Concat", "CumSum", "DepthToSpace"}
    | {"Dropout", "Expand", "Flatten", "Gather", "GatherElements", "GatherND"}
    | {"GlobalAveragePool", "GlobalMaxPool", "Identity", "LeakyRelu", "LpPool", "Max", "MaxPool"}
    | {"Mean", "Min", "Neg", "Pad", "ReduceL1", "ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin"}
    | {"ReduceSum", "Relu", "Reshape", "Resize", "ReverseSequence", "ScatterElements", "ScatterND"}
    | {"Slice", "SpaceToDepth", "Split", "Squeeze", "Sub", "Sum", "Tile", "TopK", "Transpose"}
    | {"Trilu", "Unsqueeze", "Upsample", "Where"}
    | {"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"}
)
"""Positively homogeneous in all their FP32 operands together; comparisons give no FP32 output."""

FIRST_ONLY = frozenset({"Resize", "Upsample", "Dropout"})
"""Of these only the first operand scales; others are sizes and ratios."""

INVARIANT = frozenset({"ArgMax", "ArgMin", "NonZero", "Shape", "Sign", "Size"})
"""Any exponent goes in, 0 comes out."""

NORMS = {
    "LayerNormalization": 1e-5,
    "InstanceNormalization": 1e-5,
    "GroupNormalization": 1e-5,
    "RMSNormalization": 1e-5,
}
"""norm_eps(x) = norm_{eps*4^e}(2^e * x), with the default epsilon. LpNormalization has none."""

MAX_EXPONENT = 40
"""The bound of every exponent: FP16 spans 40 powers of two."""

MAX_FACTOR = 15.0
"""The largest exponent of an inserted Mul, whose factor is to be a number of FP16."""

OVERFLOW_COST = 50.0
"""A bit by which a tensor comes nearer to FP16's largest than the headroom."""

VANISHING_COST = 2.0
"""A bit by which even a tensor's largest value is below what FP16 resolves."""

SMALL_COST = 0.2
"""A bit by which a tensor's median is below FP16's smallest normal number."""

MUL_COST = 4.0
"""An inserted Mul, or Add behind a logarithm."""

MOVE_COST = 0.002
"""A bit by which a tensor moves: of equal answers the smallest is taken."""

MIN_CONSTANT = 2.0**-19
"""A constant whose largest value is smaller has fewer than five bits in FP16."""

SAMPLED = 1 << 16
"""Values of a constant that its median is taken from."""


@dataclass(frozen=True)
class _Equation:
    """The sum of ``terms``, exponents by variable times coefficients, is 0."""

    terms: Mapping[int, float]


@dataclass
class _Problem:
    """Exponents as variables of a mixed integer program, with the edges that a Mul may stand on.

    ``tensors`` gives the variable of each computed tensor, ``slots`` those of constant operands and
    of edges by (node, slot); the slot of an output of the graph belongs to node -1. ``fixed``
    variables are 0.
    """

    ranges: list[Range | None] = field(default_factory=list)
    constant: list[bool] = field(default_factory=list)
    fixed: set[int] = field(default_factory=set)
    tensors: dict[str, int] = field(default_factory=dict)
    slots: dict[tuple[int, int], int] = field(default_factory=dict)
    equations: list[_Equation] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)

    def variable(self, observed: Range | None, *, constant: bool = False) -> int:
        self.ranges.append(observed)
        self.constant.append(constant)
        return len(self.ranges) - 1

    def added_to(self, read: int) -> None:
        """Lets a node read any exponent at the cost of one node behind it."""
        zero, behind = self.variable(None), self.variable(None)
        self.fixed.add(zero)
        self.equal(behind, read)
        self.edges.append((behind, zero))

    def equal(self, *variables: int) -> None:
        for other in variables[1:]:
            self.equation({variables[0]: 1}, {other: -1})

    def equation(self, *terms: Mapping[int, float]) -> None:
        total: dict[int, float] = {}
        for part in terms:
            for variable, factor in part.items():
                total[variable] = total.get(variable, 0) + factor
        self.equations.append(_Equation({v: f for v, f in total.items() if f}))


class _Builder:
    """Writes the equations of every node."""

    def __init__(self, wiring: Wiring, ranges: Ranges, cut: frozenset[tuple[int, int]]) -> None:
        self._wiring, self._ranges, self._cut = wiring, ranges, cut
        self._types = wiring.graph.types
        self._of_constants: dict[str, Range | None] = {}
        self.problem = _Problem()
        for index, node in enumerate(wiring.nodes):
            self._node(index, node)
        for place, name in enumerate(wiring.graph.outputs):
            if self._is_float(name) and name not in wiring.constants:
                self.problem.fixed.add(self._slot(-1, place, name))
        # Inputs, and sparse initialisers.
        tensors = self.problem.tensors
        self.problem.fixed.update(v for n, v in tensors.items() if n not in wiring.maker)
        # What token ids look up is perturbed for tests, in the original's values.
        looked_up = {lookup.tensor for lookup in wiring.graph.lookups}
        for name in (wiring.captured | looked_up) & tensors.keys():
            self.problem.fixed.add(tensors[name])

    def _is_float(self, name: str) -> bool:
        return bool(name) and self._types.type_of(name) == FLOAT

    def _tensor(self, name: str) -> int:
        found = self.problem.tensors.get(name)
        if found is None:
            found = self.problem.variable(self._ranges.get(name))
            self.problem.tensors[name] = found
        return found

    def _slot(self, index: int, slot: int, name: str) -> int:
        """The variable of what a node reads: a tensor's, a copy of a constant, or an edge's."""
        key = (index, slot)
        if name in self._wiring.constants:
            if key not in self.problem.slots:
                # A bound that vanishes does no harm by itself; rule *epsilon* looks at divisors.
                bound = index >= 0 and self._wiring.nodes[index].op_type in ("Clip", "Max", "Min")
                observed = None if bound else self._constant_range(name)
                found = self.problem.variable(observed, constant=True)
                self.problem.slots[key] = found
            return self.problem.slots[key]
        tensor = self._tensor(name)
        if key not in self._cut:
            return tensor
        if key not in self.problem.slots:
            found = self.problem.variable(self._ranges.get(name))
            self.problem.slots[key] = found
            self.problem.edges.append((self.problem.slots[key], tensor))
        return self.problem.slots[key]

    def _constant_range(self, name: str) -> Range | None:
        if name not in self._of_constants:
            self._of_constants[name] = range_of(self._wiring.constants[name])
        return self._of_constants[name]

    def _node(self, index: int, node: onnx.NodeProto) -> None:
        if all(o in self._wiring.constants for o in node.output if o):
            return
        ins = {
            slot: self._slot(index, slot, name)
            for slot, name in enumerate(node.input)
            if self._is_float(name)
        }
        outs = {s: self._tensor(name) for s, name in enumerate(node.output) if self._is_float(name)}
        rule = self._rule(node, ins, outs)
        if rule is None:
            self.problem.fixed.update(ins.values())
            self.problem.fixed.update(outs.values())

    def _rule(
        self, node: onnx.NodeProto, ins: Mapping[int, int], outs: Mapping[int, int]
    ) -> bool | None:
        """Adds the equations of ``node``; None where it has no rule, so that all are 0."""
        p, op = self.problem, node.op_type
        if not is_standard(node) or attribute(node, "reduction") == b"mul":
            return None
        if op in EQUAL:
            if op in FIRST_ONLY:
                p.fixed.update(v for s, v in ins.items() if s)
                ins = {s: v for s, v in ins.items() if s == 0}
            p.equal(*ins.values(), *outs.values())
        elif op == "Cast":
            if not ins or not outs:
                return None
            p.equal(*ins.values(), *outs.values())
        elif op == "PRelu" and len(ins) == 2:
            p.equal(ins[0], outs[0])
            p.fixed.add(ins[1])
        elif op in ("Mul", "MatMul") and len(ins) == 2:
            p.equation({ins[0]: 1}, {ins[1]: 1}, {outs[0]: -1})
        elif op in ("Conv", "ConvTranspose", "Gemm") and {0, 1} <= ins.keys():
            p.equation({ins[0]: 1}, {ins[1]: 1}, {outs[0]: -1})
            if 2 in ins:
                p.equal(ins[2], outs[0])
        elif op == "Einsum" and ins:
            p.equation(*({v: 1} for v in ins.values()), {outs[0]: -1})
        elif op == "Div" and len(ins) == 2:
            p.equation({ins[0]: 1}, {ins[1]: -1}, {outs[0]: -1})
        elif op == "Reciprocal":
            p.equation({ins[0]: 1}, {outs[0]: 1})
        elif op == "Sqrt":
            p.equation({ins[0]: 1}, {outs[0]: -2})
        elif op == "ReduceSumSquare":
            p.equation({ins[0]: 2}, {outs[0]: -1})
        elif op == "Pow" and 0 in ins:
            return self._power(node, ins, outs)
        elif op == "Log":
            p.fixed.update(outs.values())
            p.added_to(ins[0])
        elif op in INVARIANT:
            p.fixed.update(outs.values())
        elif op in NORMS or op in ("BatchNormalization", "LpNormalization"):
            return self._norm(node, ins, outs)
        else:
            return None
        return True

    def _power(
        self, node: onnx.NodeProto, ins: Mapping[int, int], outs: Mapping[int, int]
    ) -> bool | None:
        constants = self._wiring.constants
        name = node.input[1]
        if name not in constants or constants.count(name) != 1:
            return None
        power = float(constants[name].ravel()[0])
        if power not in (0.5, 1.0, 2.0, 3.0, 4.0):
            return None
        self.problem.equation({ins[0]: 2 * power}, {outs[0]: -2})
        if 1 in ins:
            self.problem.fixed.add(ins[1])
        return True

    def _norm(
        self, node: onnx.NodeProto, ins: Mapping[int, int], outs: Mapping[int, int]
    ) -> bool | None:
        """Scale and bias have the output's exponent; the input's is free of it."""
        p = self.problem
        if len(outs) != 1 or 0 not in outs:
            return None
        affine = [v for s, v in ins.items() if s in (1, 2)]
        if not affine:
            p.fixed.add(outs[0])
        p.equal(outs[0], *affine)
        if node.op_type == "BatchNormalization":
            if any(node.input[s] not in self._wiring.constants for s in (3, 4)):
                return None
            p.equal(ins[0], ins[3])
            p.equation({ins[0]: 2}, {ins[4]: -1})
        return True


def range_of(array: NDArray[np.float32]) -> Range | None:
    """The range of an array's finite values; None if all are 0 or infinite."""
    values = np.abs(array.ravel())
    values = values[np.isfinite(values) & (values > 0)]
    if not values.size:
        return None
    sampled = values[:: max(1, values.size // SAMPLED)]
    middle = sampled.size // 2  # no mean of two, which may leave FP32's range
    return Range(
        largest=float(values.max()),
        median=float(np.partition(sampled, middle)[middle]),
        smallest=float(values.min()),
        reach=HEADROOM * float(values.max()),
        positive=bool((array > 0).any()),
    )


def _costs(observed: Range, constant: bool) -> Iterator[tuple[float, float, float]]:
    """(cost a bit, sign of the exponent, offset): cost * max(0, sign * e + offset)."""
    # Constants do not grow with the inputs; their bound is that of an inserted Mul.
    over = math.log2(observed.reach / LARGEST_FP16)
    if constant:
        over = math.log2(observed.largest) - MAX_FACTOR
    yield OVERFLOW_COST, 1.0, over
    least = math.log2(MIN_CONSTANT if constant else SMALLEST_NORMAL_FP16)
    yield VANISHING_COST, -1.0, least - math.log2(observed.largest)
    yield SMALL_COST, -1.0, math.log2(SMALLEST_NORMAL_FP16) - math.log2(observed.median)


def _cost_at(problem: _Problem, exponents: NDArray[np.int64]) -> float:
    """The cost of exponents and inserted Muls."""
    read_from, total = dict(problem.edges), 0.0
    for number, observed in enumerate(problem.ranges):
        exponent, tensor = exponents[number], read_from.get(number)
        if tensor is not None:
            if exponent == exponents[tensor]:
                continue  # no Mul: the tensor itself is read
            total += MUL_COST
        if observed is not None:
            parts = _costs(observed, problem.constant[number])
            total += sum(cost * max(0.0, sign * exponent + offset) for cost, sign, offset in parts)
    return total


class _Quiet(highspy.Highs):
    """HiGHS without callbacks: its own constructor enables them and prints a banner."""

    def __init__(self) -> None:
        super(highspy.Highs, self).__init__()


class _Program:
    """The rows and columns of a mixed integer linear program."""

    def __init__(self) -> None:
        self.cost: list[float] = []
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.whole: list[bool] = []
        self.starts, self.index, self.value = [0], list[int](), list[float]()
        self.row_lower: list[float] = []
        self.row_upper: list[float] = []

    def column(self, cost: float, lower: float, upper: float, *, whole: bool = False) -> int:
        self.cost.append(cost)
        self.lower.append(lower)
        self.upper.append(upper)
        self.whole.append(whole)
        return len(self.cost) - 1

    def row(self, terms: Mapping[int, float], lower: float, upper: float = math.inf) -> None:
        self.index += terms.keys()
        self.value += terms.values()
        self.starts.append(len(self.index))
        self.row_lower.append(lower)
        self.row_upper.append(upper)

    def solve(self, seconds: float) -> NDArray[np.float64] | None:
        """The best values that HiGHS finds in time; None if it finds none."""
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(self.cost), len(self.row_lower)
        lp.col_cost_ = np.array(self.cost)
        lp.col_lower_, lp.col_upper_ = np.array(self.lower), np.array(self.upper)
        lp.row_lower_, lp.row_upper_ = np.array(self.row_lower), np.array(self.row_upper)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.array(self.starts)
        lp.a_matrix_.index_ = np.array(self.index)
        lp.a_matrix_.value_ = np.array(self.value, np.float64)
        kinds = highspy.HighsVarType
        lp.integrality_ = [kinds.kInteger if w else kinds.kContinuous for w in self.whole]
        solver = _Quiet()
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("time_limit", seconds)
        solver.setOptionValue("threads", 1)  # the same answer at every run
        solver.setOptionValue("mip_rel_gap", 1e-6)
        solver.passModel(lp)
        solver.run()
        if (
            solver.getInfo().primal_solution_status
            != highspy.SolutionStatus.kSolutionStatusFeasible
        ):
            return None
        return np.array(solver.getSolution().col_value)


def _solve(problem: _Problem, seconds: float) -> NDArray[np.int64] | None:
    """The exponents that cost least."""
    program = _Program()
    bound = float(MAX_EXPONENT)
    for number in range(len(problem.ranges)):
        limit = 0.0 if number in problem.fixed else bound
        observed, upper = problem.ranges[number], limit
        if observed is not None and problem.constant[number]:  # it is to stay finite
            upper = min(limit, 128.0 - math.frexp(observed.largest)[1])
        program.column(0.0, -limit, upper, whole=True)
    inserted = {}
    for edge, tensor in problem.edges:
        inserted[edge] = program.column(MUL_COST, 0.0, 1.0, whole=True)
        for sign in (1.0, -1.0):
            program.row({inserted[edge]: MAX_FACTOR, edge: -sign, tensor: sign}, 0.0)
    for number, observed in enumerate(problem.ranges):
        constant = problem.constant[number]
        for sign in (1.0, -1.0) if observed is None or not constant else ():
            moved = program.column(MOVE_COST, 0.0, math.inf)
            program.row({moved: 1.0, number: -sign}, 0.0)
        for cost, sign, offset in _costs(observed, constant) if observed is not None else ():
            terms = {program.column(cost, 0.0, math.inf): 1.0, number: -sign}
            if number in inserted:  # without a Mul nothing is read but the tensor itself
                terms[inserted[number]] = -(bound + abs(offset))
                offset -= bound + abs(offset)
            program.row(terms, offset)
    for equation in problem.equations:
        program.row(dict(equation.terms), 0.0, 0.0)
    found = program.solve(seconds)
    return None if found is None else np.rint(found[: len(problem.ranges)]).astype(np.int64)


SOLVER_SECONDS = 20.0
"""The time that HiGHS may take for one solution."""


def propose_scale(graph: Graph, ranges: Ranges) -> Proposal:
    """Powers of two that cost least, as one edit for each region of tensors that move together.

    Identity: f(2^a x, 2^b c) = 2^e f(x, c), where a, b and e solve the equation of each operator.
    """
    wiring = Wiring(graph)
    problem = _Builder(wiring, ranges, frozenset()).problem
    unmoved = np.zeros(len(problem.ranges), np.int64)
    before = _cost_at(problem, unmoved)
    if before < MUL_COST or not _stuck(problem, unmoved):
        return (), ()
    names = [n for n, v in problem.tensors.items() if v in _overflows(problem, unmoved)]
    best = _solved(problem)
    if best is None or _stuck(problem, best.exponents):
        exponents = unmoved if best is None else best.exponents
        cut = _borders(wiring, problem, exponents)
        wider = _solved(_Builder(wiring, ranges, cut).problem)
        best = min((s for s in (best, wider) if s is not None), key=lambda s: s.cost, default=None)
    if best is None or before - best.cost < MUL_COST:
        reason = "no powers of two bring these tensors into FP16's range"
        return (), (Refusal(Rule.SCALE, tuple(names[:5]), reason),) if names else ()
    return _Writer(wiring, best.problem, best.exponents, ranges).edits(), ()


@dataclass(frozen=True)
class _Solution:
    """Exponents and what they cost."""

    problem: _Problem
    exponents: NDArray[np.int64]
    cost: float


def _solved(problem: _Problem) -> _Solution | None:
    """The best exponents that HiGHS finds; None if it finds none."""
    found = _solve(problem, SOLVER_SECONDS)
    if found is None:
        return None
    return _Solution(problem, found, _cost_at(problem, found))


def _stuck(problem: _Problem, exponents: NDArray[np.int64]) -> set[int]:
    """The variables that overflow or vanish."""
    return _overflows(problem, exponents) | _vanishing(problem, exponents)


def _overflows(problem: _Problem, exponents: NDArray[np.int64]) -> set[int]:
    """The variables that come nearer to FP16's largest number than the headroom allows."""
    return {
        number
        for number, observed in enumerate(problem.ranges)
        if observed is not None
        and not problem.constant[number]
        and observed.reach * 2.0 ** exponents[number] > LARGEST_FP16
    }


def _vanishing(problem: _Problem, exponents: NDArray[np.int64]) -> set[int]:
    """The constants that FP16 rounds to 0 altogether, such as an epsilon of 1e-12."""
    return {
        number
        for number, observed in enumerate(problem.ranges)
        if observed is not None
        and problem.constant[number]
        and observed.largest * 2.0 ** exponents[number] < 2 * SMALLEST_FP16
    }


def _borders(
    wiring: Wiring, problem: _Problem, exponents: NDArray[np.int64]
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
    stuck = _stuck(problem, exponents)
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
        self, wiring: Wiring, problem: _Problem, exponents: NDArray[np.int64], ranges: Ranges
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
