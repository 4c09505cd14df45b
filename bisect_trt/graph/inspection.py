"""What can be said of a model without running it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bisect_trt.core.precision import Precision
from bisect_trt.graph.layers import Layer, kept_nodes, list_layers
from bisect_trt.graph.load import LoadedModel
from bisect_trt.graph.passes.opset import ALL_HAVE_BF16, HAS_LAYER_NORMALIZATION, lacks_bf16
from bisect_trt.graph.patterns import Pattern, find_patterns
from bisect_trt.graph.tensor_types import opset_of
from bisect_trt.graph.weight_range import Finding, weight_findings

_DELICATE = {
    "Pow": "squares leave FP16's range above 256",
    "ReduceSum": "sums of many values leave FP16's range",
    "ReduceSumSquare": "sums of squares leave FP16's range",
    "ReduceL2": "sums of squares leave FP16's range",
    "Exp": "leaves FP16's range above 11.09",
    "Softplus": "its exponential leaves FP16's range",
    "InstanceNormalization": "variances of large activations leave FP16's range",
    "GridSample": "coordinates lose precision in FP16",
    "CumSum": "a running sum accumulates rounding",
}


@dataclass(frozen=True)
class Inspection:
    """``suspects`` maps a layer's id to why it is delicate; ``kept`` the float nodes that are no
    layers to why.
    """

    model: str
    opset: int
    layers: tuple[Layer, ...]
    patterns: tuple[Pattern, ...]
    suspects: dict[str, str]
    kept: dict[str, str]
    findings: tuple[Finding, ...]
    advice: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """The content for machines."""
        return {
            "model": self.model,
            "opset": self.opset,
            "layers": [
                {"layer": x.name, "op": x.op, "scope": x.scope, "precisions": sorted(x.precisions)}
                for x in self.layers
            ],
            "patterns": [vars(p) for p in self.patterns],
            "suspects": self.suspects,
            "kept": self.kept,
            "findings": [vars(f) for f in self.findings],
            "advice": list(self.advice),
        }


def inspect_model(model: LoadedModel, precision: Precision) -> Inspection:
    """Layers, patterns, suspects, weights out of range, and advice."""
    layers = [x for x in list_layers(model.proto) if precision in x.precisions]
    patterns = find_patterns(model.proto)
    suspects = {x.name: f"{x.op}: {_DELICATE[x.op]}" for x in layers if x.op in _DELICATE}
    for pattern in patterns:
        if pattern.decomposed and pattern.kind in ("LayerNorm", "RMSNorm"):
            suspects |= dict.fromkeys(
                pattern.layers, f"part of a {pattern.kind} written out in primitive operators"
            )
    opset = opset_of(model.proto)
    return Inspection(
        model.name,
        opset,
        tuple(layers),
        tuple(patterns),
        suspects,
        kept_nodes(model.proto),
        tuple(weight_findings(model.proto, precision)),
        tuple(
            _advice(
                opset,
                patterns,
                precision is Precision.BF16 and lacks_bf16({x.op for x in layers}, opset),
            )
        ),
    )


def _advice(opset: int, patterns: list[Pattern], raises_opset: bool) -> list[str]:
    advice = []
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
    if raises_opset:
        advice.append(
            f"Some operators have no BF16 form in opset {opset}: the typed model will be raised to "
            f"{ALL_HAVE_BF16}."
        )
    return advice
