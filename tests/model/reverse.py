"""What reverse models are held to: finite differences in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from bisect_trt.base.plan import Precision
from bisect_trt.model.gradients import ForwardValues, ReverseModel, to_reverse
from bisect_trt.model.graph import Graph
from bisect_trt.model.layers import with_outputs
from bisect_trt.runners.ort_session import session_as_written

Arrays = dict[str, NDArray[Any]]


def node_model(
    op: str,
    inputs: Mapping[str, NDArray[Any]],
    *,
    opset: int = 17,
    constants: Sequence[str] = (),
    outputs: int = 1,
    **attributes: Any,
) -> onnx.ModelProto:
    """A node of ``inputs``; each float one that is no constant comes from a layer of its own."""
    nodes, reads, given, weights = [], [], [], []
    zero = numpy_helper.from_array(np.zeros((), np.float32), "zero")
    for name, array in inputs.items():
        if array.size == 0:  # an input that is left out
            reads.append("")
        elif array.dtype != np.float32 or name in constants:
            weights.append(numpy_helper.from_array(array, name))
            reads.append(name)
        else:
            given.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape))
            nodes.append(helper.make_node("Add", [name, "zero"], [f"{name}_in"], f"/{name}"))
            reads.append(f"{name}_in")
    results = [f"y{number}" for number in range(outputs)]
    nodes.append(helper.make_node(op, reads, results, "/node", **attributes))
    given_back = [onnx.ValueInfoProto(name=name) for name in results]
    graph = helper.make_graph(nodes, "one", given, given_back, [zero, *weights])
    opsets = [helper.make_opsetid("", opset)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    return onnx.shape_inference.infer_shapes(model)


def as_double(model: onnx.ModelProto) -> onnx.ModelProto:
    """``model`` with every FP32 type replaced by FP64."""
    double = onnx.ModelProto()
    double.CopyFrom(model)
    graph = double.graph
    del graph.value_info[:]
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.DOUBLE
    for tensor in graph.initializer:
        # The scales of a Resize stay FP32.
        if tensor.data_type == TensorProto.FLOAT and not tensor.name.startswith("scales"):
            array = numpy_helper.to_array(tensor).astype(np.float64)
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    for node in graph.node:
        for attribute in node.attribute:
            if (node.op_type, attribute.name, attribute.i) == ("Cast", "to", TensorProto.FLOAT):
                attribute.i = TensorProto.DOUBLE
    return double


def evaluated(model: onnx.ModelProto, inputs: Arrays, precise: bool) -> Arrays:
    """The outputs of ``model``: in FP64 by ONNX's evaluator, or in FP32 by ONNX Runtime."""
    if precise:
        evaluator = ReferenceEvaluator(as_double(model))
        fed = {n: a.astype(np.float64) if a.dtype == np.float32 else a for n, a in inputs.items()}
        return dict(zip(evaluator.output_names, evaluator.run(None, fed), strict=True))
    session = session_as_written(model, "the model")
    fed = {n: a.astype(np.float32) if a.dtype == np.float64 else a for n, a in inputs.items()}
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, fed), strict=True))


def reverse_of(model: onnx.ModelProto, values: Arrays, outputs: Sequence[str]) -> ReverseModel:
    """The reverse model, for the tensors of a forward pass."""
    known = ForwardValues(
        {n: tuple(np.shape(a)) for n, a in values.items()},
        {n: np.asarray(a) for n, a in values.items() if np.asarray(a).dtype.kind in "iu"},
    )
    return to_reverse(Graph(model), Precision.FP16, known, outputs)


def check(
    model: onnx.ModelProto, inputs: Arrays, *, step: float = 1e-6, precise: bool = True
) -> ReverseModel:
    """Hold the effect of each layer ``/x``, which adds zero to input ``x``, to a quotient.

    It is that of differences. ``precise``: in FP64, by ONNX's evaluator. ONNX Runtime's, with a
    larger ``step``, serves where that rounds to FP32 or does not know an operator's older form.
    """
    random = np.random.default_rng(0)
    given = [o.name for o in model.graph.output]
    every = [o for node in model.graph.node for o in node.output if o]
    values = evaluated(with_outputs(model, every), inputs, precise) | inputs
    values |= {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    outputs = [name for name in given if values[name].dtype.kind == "f"]
    reverse = reverse_of(model, values, outputs)
    weights = {n: random.standard_normal(values[n].shape) for n in outputs}
    read = [n for n in (f"{name}_in" for name in inputs) if n in values]
    errors = {t: random.standard_normal(values[t].shape) for t in [*reverse.errors, *read]}
    fed = {n: np.asarray(values[n]) for n in reverse.reads}
    fed |= {slot: errors[t] for t, slot in reverse.errors.items()}
    fed |= {slot: weights[n] for n, slot in reverse.weights.items()}
    effects = evaluated(reverse.proto, fed, False)[reverse.effects]
    found = dict(zip(reverse.layers, effects.tolist(), strict=True))

    def weighed(name: str, by: float) -> float:
        moved = inputs | {name: inputs[name] + by * errors[f"{name}_in"]}
        results = evaluated(model, moved, precise)
        return float(sum(np.sum(results[n] * weights[n]) for n in outputs))

    for name in inputs:
        if f"/{name}" not in reverse.uncovered:
            expected = (weighed(name, step) - weighed(name, -step)) / (2 * step)
            # The reverse model runs in FP32.
            scale = 1.0 + float(np.abs(expected)) + float(np.linalg.norm(errors[f"{name}_in"]))
            assert abs(found.get(f"/{name}", 0.0) - expected) <= 3e-4 * scale, name
    return reverse
