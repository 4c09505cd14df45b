"""Operator schemas and tables say which parts of a node may run at reduced precision.

A schema says whether a type variable admits float16 or bfloat16; the tables hold the exceptions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import onnx
from onnx import TensorProto, defs

from bisect_trt.base.plan import Precision

FLOAT = TensorProto.FLOAT
FLOATS = frozenset({FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE})
STORAGE_TYPE = {Precision.FP16: TensorProto.FLOAT16, Precision.BF16: TensorProto.BFLOAT16}
_TYPE_NAME = {Precision.FP16: "tensor(float16)", Precision.BF16: "tensor(bfloat16)"}

CONTROL_FLOW = frozenset({"If", "Loop", "Scan"})
"""One layer each, which is reduced or pinned together with its bodies."""

MATRIX_INPUTS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("Conv", "ConvTranspose", "DeformConv", "MatMul", "Gemm"), (0, 1)),
    **dict.fromkeys(("LSTM", "GRU", "RNN", "Attention"), (0, 1, 2)),
    "Einsum": tuple(range(8)),
}
"""The operands that TF32 rounds to 10 mantissa bits; everything else stays FP32."""

RANDOM = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
    | {"Multinomial", "Bernoulli"}
)
"""Operators that generate random numbers at every run."""

STAYS_FP32: dict[str, str] = {
    "TopK": "ranks values: rounding makes ties and changes the indices",
    "NonMaxSuppression": "compares box coordinates and scores against thresholds",
    "Range": "its values become indices and shapes",
    "MeanVarianceNormalization": "the standard's function body mixes the input with FP32 constants",
    "BitCast": "reinterprets the stored bits, whose width must not change",
    **dict.fromkeys(
        ("RoiAlign", "MaxRoiPool"), "box coordinates above 2048 lose whole pixels in FP16"
    ),
    **dict.fromkeys(
        (
            *("ConstantOfShape", "EyeLike", "MelWeightMatrix"),
            *("HannWindow", "HammingWindow", "BlackmanWindow"),
        ),
        "a constant: the consumer decides",
    ),
    **dict.fromkeys(RANDOM, "a random draw is not comparable across precisions"),
    **dict.fromkeys(
        (
            *("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"),
            *("QLinearConv", "QLinearMatMul"),
        ),
        "quantised models carry their own scales and types: Q/DQ is left alone",
    ),
    **dict.fromkeys(("Optional", "OptionalGetElement"), "holds a tensor of a fixed type"),
    **dict.fromkeys(("SequenceAt", "ConcatFromSequence"), "holds tensors of a fixed type"),
}
"""Operators that never run at reduced precision, with the reason."""

QUANTISES = frozenset(
    {"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"}
    | {"QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger"}
)
"""Operators that quantise, dequantise or compute with quantised values."""

HAVE_BF16 = 22
"""The opset in which every common operator has a BF16 form; no model is raised further."""

FIXED_SLOTS: dict[str, tuple[int, ...]] = {
    "Resize": (1, 2),  # roi and scales: they become the output's shape
    "Upsample": (1,),  # scales, likewise
    "OneHot": (0, 1),  # indices and depth may be float tensors: positions and a shape
}
"""Input slots that keep their type although the operator's schema would allow a reduced one."""

FIXED_OUTPUTS: dict[str, tuple[int, ...]] = {
    "LayerNormalization": (1, 2),  # mean and deviation have the type that stash_type names
}
"""Output slots that keep their type although the schema would allow a reduced one."""

MOVES = frozenset(
    {"Concat", "DepthToSpace", "Expand", "Flatten", "Gather", "GatherElements", "GatherND"}
    | {"Identity", "Reshape", "Slice", "SpaceToDepth", "Split", "Squeeze", "Tile"}
    | {"Transpose", "Unsqueeze"}
)
"""Operators that only move values: their outputs are rounded if their inputs are."""

TYPE_AGNOSTIC = frozenset({"Shape", "Size"})
"""Operators that read a shape and no values, so that they take any type without a cast."""


def is_standard(node: onnx.NodeProto) -> bool:
    """True for operators of the ONNX standard; custom domains stay in FP32."""
    return node.domain in ("", "ai.onnx")


@lru_cache(maxsize=4096)
def schema_of(op_type: str, opset: int) -> defs.OpSchema | None:
    """The schema of a standard operator at ``opset``; None where ONNX has none."""
    try:
        return defs.get_schema(op_type, opset, "")
    except defs.SchemaError:
        return None


def formals(
    parameters: list[defs.OpSchema.FormalParameter], count: int
) -> Iterator[tuple[int, defs.OpSchema.FormalParameter]]:
    """Pairs each actual slot with its formal parameter; a variadic one covers the rest."""
    for slot in range(count):
        if slot < len(parameters):
            yield slot, parameters[slot]
        elif parameters and parameters[-1].option == defs.OpSchema.FormalParameterOption.Variadic:
            yield slot, parameters[-1]


@lru_cache(maxsize=4096)
def reducible_slots(
    op_type: str, opset: int, inputs: int, outputs: int, precision: Precision
) -> tuple[frozenset[int], frozenset[int]]:
    """The input and output slots whose type in the schema admits ``precision`` (FP16 or BF16)."""
    # Control flow has no slots here: its bodies decide.
    if op_type in STAYS_FP32 or op_type in CONTROL_FLOW:
        return frozenset(), frozenset()
    # BF16 came to most operators with opset 13, to convolutions and pools with 22. An older model
    # is judged by opset 22, because the typed writer raises it.
    schema = schema_of(op_type, max(opset, HAVE_BF16) if precision is Precision.BF16 else opset)
    if schema is None or schema.deprecated:  # such as Upsample, which is judged by its own opset
        schema = schema_of(op_type, opset)
    if schema is None:
        return frozenset(), frozenset()
    wanted = _TYPE_NAME[precision]
    variables = {c.type_param_str for c in schema.type_constraints if wanted in c.allowed_type_strs}

    def slots(parameters: Sequence[defs.OpSchema.FormalParameter], count: int) -> set[int]:
        return {s for s, p in formals(list(parameters), count) if p.type_str in variables}

    ins = slots(schema.inputs, inputs).difference(FIXED_SLOTS.get(op_type, ()))
    outs = slots(schema.outputs, outputs).difference(FIXED_OUTPUTS.get(op_type, ()))
    return frozenset(ins), frozenset(outs)
