"""The walk in ONNX Runtime's optimised arithmetic: what a default session over ``to_emulated``'s model computes, node by node.

Such a session sums in another order where it may: it gives convolutions with constant weights a blocked layout, folds a
BatchNormalization into the convolution before it, and pools in that layout. A lowered layer's roundings keep it apart from its
neighbours, so its bits can be had from a session over that node alone, if the constants are part of it. Between pinned layers only
the two cases named are followed: a network that ONNX Runtime fuses otherwise gets slightly other bits here than as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx
from onnx import TensorProto, helper, numpy_helper

from bisect_trt.graph.emulate import EmulationRewriter
from bisect_trt.precision import Precision, PrecisionPlan
from bisect_trt.runners.base import Sample
from bisect_trt.runners.emulated import EmulatedRunner
from bisect_trt.runners.pieces import Piece
from bisect_trt.runners.sessions import piece_session
from bisect_trt.runners.steps import Chain, Step
from bisect_trt.runners.weights import Value

_FOLLOWS = frozenset({"BatchNormalization", "GlobalAveragePool", "AveragePool", "MaxPool"})


class OptimisedRunner(EmulatedRunner):
    """Walks as :class:`EmulatedRunner` does, with the bits of an optimised session where it can."""

    name = "emulated-optimised"

    def __init__(self, model: onnx.ModelProto, samples: Sequence[Sample], base: Precision = Precision.FP16, *, threads: int = 0) -> None:
        super().__init__(model, samples, base, threads=threads)
        self._producers = {tensor: step for step in self.steps for tensor in step.outputs}
        self._single: dict[tuple[int, Precision], Piece] = {}
        self._pairs: dict[int, Piece] = {}

    def _execute(self, step: Step, precision: Precision, chain: Chain, kernels: bool = False) -> list[Value]:
        if not step.lowers(precision):
            precision = Precision.FP32
        op = self.model.graph.node[step.index].op_type
        if op == "Conv" and self._has_constants(step):
            name = step.inputs[0]
            read = self._rounded(name, precision, chain) if 0 in step.reduced_in[precision] else self._value(name, chain)
            if precision is Precision.FP32:
                chain.sources[step.outputs[0]] = read
            if (step.index, precision) not in self._single:
                self._single[(step.index, precision)] = self._make([step], precision)
            return _run(self._single[(step.index, precision)], read)
        if op in _FOLLOWS and precision is Precision.FP32 and step.inputs[0] in chain.sources and self._has_constants(step):
            if step.index not in self._pairs:
                self._pairs[step.index] = self._make([self._producers[step.inputs[0]], step], precision)
            return _run(self._pairs[step.index], chain.sources[step.inputs[0]])
        return super()._execute(step, precision, chain, kernels)

    def _has_constants(self, step: Step) -> bool:
        """Whether ``step`` reads one activation, and all else are constants."""
        return step.inputs[0] not in self.constants and all(name in self.constants for name in step.inputs[1:])

    def _make(self, steps: Sequence[Step], precision: Precision) -> Piece:
        nodes, names = [self.model.graph.node[s.index] for s in steps], dict.fromkeys(n for s in steps for n in s.inputs)
        stored = [numpy_helper.from_array(self.constants.value(n).numpy(), n) for n in names if n in self.constants]
        given, made = steps[0].inputs[0], steps[-1].outputs
        graph = helper.make_graph(
            nodes, "piece", [helper.make_tensor_value_info(given, TensorProto.FLOAT, None)], [onnx.ValueInfoProto(name=o) for o in made],
            stored,
        )  # fmt: skip
        model = onnx.ModelProto(ir_version=max(self.model.ir_version, 4), graph=graph)
        model.opset_import.extend(self.model.opset_import)
        rounded = frozenset({given}) if 0 in steps[0].reduced_in[precision] else frozenset[str]()
        emulated = EmulationRewriter(model, PrecisionPlan(precision), rounded_inputs=rounded).rewrite()
        return Piece(piece_session(emulated.SerializeToString(), self._threads, optimised=True), (given,), made)


def _run(piece: Piece, read: Value) -> list[Value]:
    results = piece.run({piece.inputs[0]: read}, piece.outputs, None)
    return [results[i] for i in range(len(piece.outputs))]
