"""Reading back what was built: which type each layer really got, and what the builder warned of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bisect_trt.base.outcomes import Finding
from bisect_trt.base.plan import Precision, PrecisionPlan
from bisect_trt.model.layers import Layer
from bisect_trt.runners.tensorrt.records import EngineAnswer, EngineLayer

_TYPE_NAME = {
    Precision.FP16: "HALF",
    Precision.BF16: "BF16",
    Precision.FP32: "FLOAT",
    Precision.TF32: "FLOAT",
}
_FLOATS = frozenset(_TYPE_NAME.values())
_SPELLINGS = {
    "HALF": r"\b(half|fp16|float16)\b",
    "BF16": r"\b(bf16|bfloat16)\b",
    "FLOAT": r"\b(float|fp32|float32)\b",
}
_NODE = re.compile(r"\[ONNX Layer: (.*?)\](?=[\x1e\x1f]|\[ONNX Layer|$|\s*\+)")
_NOTABLE = re.compile(
    r"layernorm|overflow|precision|FP16|half|subnormal|fp32|out of range|NaN|infin", re.IGNORECASE
)


def dishonoured_after_parsing(
    layers: Iterable[Layer], plan: PrecisionPlan, types: Mapping[str, Sequence[str]]
) -> list[Finding]:
    """A finding for each layer whose float outputs in the parsed network are not of the plan's
    type.
    """
    findings = []
    for layer in layers:
        if plan.base not in layer.precisions or layer.name not in types:
            continue
        wanted = _TYPE_NAME[plan.precision_of(layer.name)]
        wrong = [t for t in types[layer.name] if t in _FLOATS and t != wanted]
        if wrong:
            message = (
                f"layer {layer.name!r} is {wrong[0]} in the parsed network, the plan says {wanted}"
            )
            findings.append(Finding("pin-not-honoured", layer.name, message))
    return findings


def dishonoured_in_engine(plan: PrecisionPlan, layers: Iterable[EngineLayer]) -> list[Finding]:
    """A finding for each pin that the built engine runs in reduced types only.

    An engine layer that holds other ONNX nodes too may hide its inner types, so only those whose
    every node is pinned count.
    """
    reduced = _TYPE_NAME[plan.base]
    findings = []
    for layer in layers:
        if layer.nodes and set(layer.nodes) <= plan.pinned and reduced != "FLOAT":
            floats = [t for t in (*layer.inputs, *layer.outputs) if t in _FLOATS]
            if floats and all(t == reduced for t in floats):
                message = (
                    f"pinned layer {layer.nodes[0]!r} runs in {reduced} in the built engine "
                    f"(engine layer {layer.name[:80]!r})"
                )
                findings.append(Finding("pin-not-honoured", layer.nodes[0], message))
    return findings


def engine_layers(information: Any) -> list[EngineLayer]:
    """The layers of an engine inspector's JSON, in the form of TensorRT 10 (``Format/Datatype``) or
    of 11 (split fields).

    Without detailed profiling verbosity layers are bare names; those are left out.
    """
    return [
        EngineLayer(
            str(entry.get("Name", "")),
            _nodes(entry),
            _types(entry.get("Inputs")),
            _types(entry.get("Outputs")),
        )
        for entry in information.get("Layers", [])
        if isinstance(entry, dict)
    ]


def warnings_as_findings(
    messages: Iterable[tuple[str, str]], names: Iterable[str]
) -> list[Finding]:
    """The builder's warnings and errors that concern numerics, mapped to the layer they name where
    they name one.
    """
    findings, known = [], sorted(names, key=len, reverse=True)
    for severity, text in messages:
        if severity != "WARNING" or _NOTABLE.search(text):
            where = next(
                (
                    n
                    for n in known
                    if len(n) > 3
                    and n in text  # in many messages of many layers hardly any is
                    and re.search(rf"(?<![\w./]){re.escape(n)}(?![\w/])", text)
                ),
                "",
            )
            findings.append(
                Finding("builder", where, f"the builder says: {' '.join(text.split())[:400]}")
            )
    return findings


def _nodes(entry: Mapping[str, Any]) -> tuple[str, ...]:
    """The ONNX nodes that an engine layer was fused from; its metadata joins them with control
    characters.
    """
    found = _NODE.findall(str(entry.get("Metadata", "")))
    return tuple(dict.fromkeys(found))


def _types(tensors: Any) -> tuple[str, ...]:
    found = []
    for tensor in tensors or ():
        if not isinstance(tensor, dict):
            continue
        text = " ".join(
            str(v)
            for k, v in tensor.items()
            if k in ("Format/Datatype", "Datatype", "DataType", "Type", "Format")
        )
        named = [
            name
            for name, spelling in _SPELLINGS.items()
            if re.search(spelling, text, re.IGNORECASE)
        ]
        found.append(named[0] if named else "OTHER")
    return tuple(found)


def facts_of(
    layers: Sequence[Layer],
    typed: Sequence[Layer],
    plan: PrecisionPlan,
    answer: EngineAnswer,
    written: float,
) -> dict[str, Any]:
    """What the cache keeps of an engine beside its outputs."""
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
