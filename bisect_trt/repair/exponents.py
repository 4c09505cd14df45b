"""Exponents as an integer program: what each operator asks of them, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import highspy
import numpy as np
import onnx
from numpy.typing import NDArray

from bisect_trt.model.precision_rules import FLOAT, is_standard
from bisect_trt.model.walk import attribute
from bisect_trt.repair.edits import (
    HEADROOM,
    LARGEST_FP16,
    SMALLEST_FP16,
    SMALLEST_NORMAL_FP16,
    Range,
    Ranges,
    Wiring,
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
class ExponentProblem:
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
        """Adds an exponent, of a tensor or constant with the range ``observed``."""
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
        """Makes exponents equal."""
        for other in variables[1:]:
            self.equation({variables[0]: 1}, {other: -1})

    def equation(self, *terms: Mapping[int, float]) -> None:
        """Makes the sum of all ``terms`` 0; a variable may stand in several."""
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
        self.problem = ExponentProblem()
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


def problem_of(
    wiring: Wiring, ranges: Ranges, cut: frozenset[tuple[int, int]] = frozenset()
) -> ExponentProblem:
    """The equations of every node; a Mul may stand on the edges ``cut``, by (node, slot)."""
    return _Builder(wiring, ranges, cut).problem


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


def cost_at(problem: ExponentProblem, exponents: NDArray[np.int64]) -> float:
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


def _solve(problem: ExponentProblem, seconds: float) -> NDArray[np.int64] | None:
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


@dataclass(frozen=True)
class Solution:
    """Exponents and what they cost."""

    problem: ExponentProblem
    exponents: NDArray[np.int64]
    cost: float


def solved(problem: ExponentProblem) -> Solution | None:
    """The best exponents that HiGHS finds; None if it finds none."""
    found = _solve(problem, SOLVER_SECONDS)
    if found is None:
        return None
    return Solution(problem, found, cost_at(problem, found))


def stuck_variables(problem: ExponentProblem, exponents: NDArray[np.int64]) -> set[int]:
    """The variables that overflow or vanish."""
    return overflows(problem, exponents) | _vanishing(problem, exponents)


def overflows(problem: ExponentProblem, exponents: NDArray[np.int64]) -> set[int]:
    """The variables that come nearer to FP16's largest number than the headroom allows."""
    return {
        number
        for number, observed in enumerate(problem.ranges)
        if observed is not None
        and not problem.constant[number]
        and observed.reach * 2.0 ** exponents[number] > LARGEST_FP16
    }


def _vanishing(problem: ExponentProblem, exponents: NDArray[np.int64]) -> set[int]:
    """The constants that FP16 rounds to 0 altogether, such as an epsilon of 1e-12."""
    return {
        number
        for number, observed in enumerate(problem.ranges)
        if observed is not None
        and problem.constant[number]
        and observed.largest * 2.0 ** exponents[number] < 2 * SMALLEST_FP16
    }
