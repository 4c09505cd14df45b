"""Inspects a model without running it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bisect_trt.base.outcomes import Finding
from bisect_trt.base.plan import Precision
from bisect_trt.model.cautions import cautions, open_sizes, refusals
from bisect_trt.model.graph import Graph
from bisect_trt.model.layers import Kind, Layer
from bisect_trt.model.lifted import lifted_form
from bisect_trt.model.load import LoadedModel
from bisect_trt.model.lost_constants import weight_findings
from bisect_trt.model.opsets import HAS_LAYER_NORMALIZATION, has_bf16, lacks_bf16
from bisect_trt.model.patterns import Pattern, find_patterns
from bisect_trt.model.precision_rules import (
    FLOAT,
    HAVE_BF16,
    STAYS_FP32,
    is_standard,
    reducible_slots,
)
from bisect_trt.model.tensor_types import UNKNOWN


@dataclass(frozen=True)
class Inspection:
    """Facts on a model; ``kept`` gives the reason for each float node that is no layer."""

    model: str
    opset: int
    layers: tuple[Layer, ...]
    patterns: tuple[Pattern, ...]
    kept: dict[str, str]
    findings: tuple[Finding, ...]
    advice: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """The content as a JSON object."""
        return {
            "model": self.model,
            "opset": self.opset,
            "layers": [
                {"layer": x.name, "op": x.op, "scope": x.scope, "precisions": sorted(x.precisions)}
                for x in self.layers
            ],
            "patterns": [vars(p) for p in self.patterns],
            "kept": self.kept,
            "findings": [vars(f) for f in self.findings],
            "advice": list(self.advice),
        }


def inspect_model(model: LoadedModel, precision: Precision) -> Inspection:
    """The layers, patterns, findings and advice for ``model`` at ``precision``."""
    source = lifted_form(model)
    graph, lifted = source.graph, source.lifted
    # A reduced source is inspected in its own format, unless another than the default is chosen.
    if lifted is not None and precision is Precision.FP16:
        precision = lifted.precision
    layers = graph.layers_at(precision)
    patterns = find_patterns(graph)
    raises = precision is Precision.BF16 and lacks_bf16({x.op for x in layers}, graph.opset)
    return Inspection(
        model.name,
        graph.opset,
        layers,
        tuple(patterns),
        _kept_nodes(graph),
        (
            *([Finding("lifted", "", lifted.sentence)] if lifted is not None else []),
            *refusals(graph, model.name),
            *open_sizes(graph),
            *cautions(graph),
            *_wrong_in_fp32(graph),
            *weight_findings(graph, precision),
        ),
        tuple(_advice(graph.opset, patterns, layers, layers if raises else ())),
    )


def _wrong_in_fp32(graph: Graph) -> Iterator[Finding]:
    """Findings on operators that TensorRT is reported to get wrong in FP32 too."""
    for node, name in graph.named_nodes():
        groups = next((a.i for a in node.attribute if a.name == "num_groups"), 0)
        if not is_standard(node):
            continue
        if node.op_type == "GridSample" and graph.opset >= 20:  # NVIDIA/TensorRT #4646
            kind, what = "grid-sample", f"GridSample of opset {graph.opset}"
            instead = "export with opset 16"
        elif node.op_type == "GroupNormalization" and groups == 1:  # NVIDIA/TensorRT #4756
            kind, what = "one-group", "GroupNormalization with one group"
            instead = "export it as LayerNormalization"
        else:
            continue
        message = (
            f"{name}: {what}, which TensorRT is reported to get wrong in FP32 too: compare its "
            f"FP32 engine first, or {instead}"
        )
        yield Finding(kind, name, message)


def _kept_nodes(graph: Graph) -> dict[str, str]:
    """The nodes that give floats but are no layers, with the reason."""
    kept = {}
    for index, (node, name) in enumerate(graph.named_nodes()):
        types = [graph.types.type_of(o) for o in node.output if o]
        if not graph.stored_inputs.isdisjoint(node.output):
            continue  # a cast of a reduced input, which only the lifted form has
        if not is_standard(node):
            kept[name] = f"{node.domain}.{node.op_type} is not a standard operator"
        elif node.op_type in STAYS_FP32 and FLOAT in types:
            kept[name] = f"{node.op_type}: {STAYS_FP32[node.op_type]}"
        elif FLOAT in types and graph.role(index, Precision.FP16).kind is Kind.KEPT:
            counts = len(node.input), len(node.output)
            _, outs = reducible_slots(node.op_type, graph.opset, *counts, Precision.FP16)
            untyped = outs and any(graph.types.type_of(i) == UNKNOWN for i in node.input if i)
            reason = f"has no FP16 form in opset {graph.opset}"
            if untyped:
                reason = "reads what no type is told of, behind an operator of another domain"
            kept[name] = f"{node.op_type} {reason}"
    return kept


def _advice(
    opset: int, patterns: list[Pattern], layers: Sequence[Layer], raising: Sequence[Layer]
) -> list[str]:
    advice = []
    if not layers:
        advice.append("no node computes floats that could be reduced: there is nothing to search")
    written_out = sum(p.decomposed and p.kind == "LayerNorm" for p in patterns)
    if written_out and opset < HAS_LAYER_NORMALIZATION:
        advice.append(
            f"{written_out} LayerNorms are written out in primitive operators: LayerNormalization "
            "exists from opset 17 (this model "
            f"has {opset}), and engines keep its inside in FP32; exporting again with opset 17 or "
            "later may need no pins."
        )
    elif written_out:
        advice.append(
            f"{written_out} LayerNorms are written out although opset {opset} has "
            "LayerNormalization, whose inside engines keep in "
            "FP32; export with the operator where the exporter can."
        )
    if raising:
        lacking = [f"{x.name} ({x.op})" for x in raising if not has_bf16(x.op, opset)]
        more = f" and {len(lacking) - 1} more have" if len(lacking) > 1 else " has"
        what = f"{lacking[0]}{more}" if lacking else "Cast has"
        advice.append(
            f"{what} no BF16 form in opset {opset}: the typed model will be raised to "
            f"{HAVE_BF16}; export with opset {HAVE_BF16} where ONNX's converter cannot."
        )
    return advice
