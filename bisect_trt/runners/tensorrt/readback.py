"""Reads an engine back: the type that each layer really has, and the builder's warnings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import onnx

from bisect_trt.base.outcomes import Finding
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.model.graph import Graph
from bisect_trt.model.layers import Layer
from bisect_trt.model.trt_names import METADATA
from bisect_trt.runners.tensorrt.records import EngineAnswer, EngineLayer

TYPE_NAME = {
    Precision.FP16: "HALF",
    Precision.BF16: "BF16",
    Precision.FP32: "FLOAT",
    Precision.TF32: "FLOAT",
}
"""TensorRT's name of the type that a layer's tensors have."""
FLOATS = frozenset(TYPE_NAME.values())
"""The float types of tensors in an engine; others are OTHER, or UNKNOWN where it says none."""
_SPELLINGS = {
    "HALF": re.compile(r"\b(half|fp16|float16)\b", re.IGNORECASE),
    "BF16": re.compile(r"\b(bf16|bfloat16)\b", re.IGNORECASE),
    "FLOAT": re.compile(r"\b(float|fp32|float32)\b", re.IGNORECASE),
}
# TensorRT 10 writes ``Format/Datatype``, 11 two fields.
_TYPE_FIELDS = ("Format/Datatype", "Datatype", "DataType", "Type", "Format")
# A node's name may contain brackets: it ends before a separator or the next entry.
_NOTABLE = re.compile(
    r"layernorm|overflow|precision|FP16|half|subnormal|fp32|out of range|NaN|infin", re.IGNORECASE
)


def facts_of(
    layers: Sequence[Layer],
    typed: Sequence[Layer],
    plan: PrecisionPlan,
    answer: EngineAnswer,
    written: float,
) -> dict[str, Any]:
    """Returns a runner's facts of one engine, as the cache keeps them."""
    findings = [
        *dishonoured_after_parsing(typed, plan, answer.types),
        *dishonoured_in_engine(plan, answer.layers),
        *warnings_as_findings(answer.messages, [layer.name for layer in layers]),
    ]
    return {
        "seconds": {"write": written, **answer.seconds},
        "engine_bytes": answer.engine_bytes,
        "latency_ms": answer.latency_ms,
        "engine_layers": len(answer.layers),
        "read_back": sum(layer.name in answer.types for layer in layers),
        "findings": [vars(f) for f in findings],
    }


def producers_of(graph: Graph, written: onnx.ModelProto) -> dict[str, str]:
    """The layer that gives each tensor of ``written``, a plan of ``graph``: its first float output.

    An output of the model is another tensor there: the Cast that gives it is no layer.
    """
    nodes = graph.proto.graph.node
    slots = {x.name: list(nodes[x.index].output).index(x.outputs[0]) for x in graph.layers}
    return {
        node.output[slots[node.name]]: node.name
        for node in written.graph.node
        if len(node.output) > slots.get(node.name, len(node.output))
    }


def dishonoured_after_parsing(
    layers: Iterable[Layer], plan: PrecisionPlan, types: Mapping[str, Sequence[str]]
) -> list[Finding]:
    """A finding for each layer whose float outputs are not of the plan's type after parsing."""
    findings = []
    for layer in layers:
        if plan.base not in layer.precisions or layer.name not in types:
            continue
        wanted = TYPE_NAME[plan.precision_of(layer.name)]
        wrong = [t for t in types[layer.name] if t in FLOATS and t != wanted]
        if wrong:
            message = (
                f"layer {layer.name!r} is {wrong[0]} in the parsed network, the plan says {wanted}"
            )
            findings.append(Finding("pin-not-honoured", layer.name, message))
    return findings


def dishonoured_in_engine(plan: PrecisionPlan, layers: Iterable[EngineLayer]) -> list[Finding]:
    """A finding for each pinned layer that the built engine runs in reduced types only."""
    reduced = TYPE_NAME[plan.base]
    findings = []
    for layer in layers:
        # The types inside a fused layer are hidden: only those count whose nodes are all pinned.
        if reduced == "FLOAT" or not layer.nodes or not set(layer.nodes) <= plan.pinned:
            continue
        if {t for t in (*layer.inputs, *layer.outputs) if t in FLOATS} == {reduced}:
            message = (
                f"pinned layer {layer.nodes[0]!r} runs in {reduced} in the built engine "
                f"(engine layer {layer.name[:80]!r})"
            )
            findings.append(Finding("pin-not-honoured", layer.nodes[0], message))
    return findings


def warnings_as_findings(
    messages: Iterable[tuple[str, str]], names: Iterable[str]
) -> list[Finding]:
    """The builder's errors, and its warnings about numerics, by the layer that they name."""
    # Names of up to three letters appear in messages by chance. The longest match is the layer.
    searched = sorted((n for n in names if len(n) > 3), key=len, reverse=True)
    return [
        Finding(
            "builder",
            _named_in(text, searched),
            f"the builder says: {' '.join(text.split())[:400]}",
        )
        for severity, text in messages
        if severity != "WARNING" or _NOTABLE.search(text)
    ]


def _named_in(text: str, names: Iterable[str]) -> str:
    """The first of ``names`` that is a word of ``text``; empty if none is."""
    for name in names:
        # The substring test is fast, and rarely true.
        if name in text and re.search(rf"(?<![\w./]){re.escape(name)}(?![\w/])", text):
            return name
    return ""


def engine_layers(information: Any) -> list[EngineLayer]:
    """The layers of an engine inspector's JSON, as TensorRT 8, 10 or 11 writes it."""
    # Without detailed profiling verbosity a layer is a bare name, which is left out.
    layers = []
    for entry in information.get("Layers", []):
        if isinstance(entry, dict):
            inputs, outputs = _tensors(entry.get("Inputs")), _tensors(entry.get("Outputs"))
            layers.append(
                EngineLayer(
                    str(entry.get("Name", "")),
                    # The entries of fused nodes are joined with control characters.
                    tuple(dict.fromkeys(METADATA.findall(str(entry.get("Metadata", ""))))),
                    tuple(kind for _, kind in inputs),
                    tuple(kind for _, kind in outputs),
                    (*inputs, *outputs),
                )
            )
    return layers


def _tensors(tensors: Any) -> tuple[tuple[str, str], ...]:
    """The names and types of an entry's tensors."""
    found = []
    for tensor in tensors or ():
        if isinstance(tensor, dict):
            text = " ".join(str(v) for k, v in tensor.items() if k in _TYPE_FIELDS)
            matches = (name for name, spelling in _SPELLINGS.items() if spelling.search(text))
            # "N/A due to dynamic shapes" stands where no shape is chosen.
            untyped = "UNKNOWN" if not text or "N/A" in text else "OTHER"
            found.append((str(tensor.get("Name", "")), next(matches, untyped)))
    return tuple(found)
