"""Segments of a model put together again, each as a plan sets its switches."""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from bisect_trt.graph.passes.segments.segment import Segment
from bisect_trt.graph.tensors.operator_rules import is_standard


def joined(segments: Sequence[Segment], outputs: Sequence[str]) -> Segment:
    """``segments`` one after the other as one; what crossed a cut is a tensor inside.

    Args:
        segments: of one model, in order, one at least.
        outputs: what it gives, each given by one of them.
    """
    first = segments[0].model
    target = onnx.ModelProto(ir_version=first.ir_version)
    target.opset_import.extend(first.opset_import)
    target.functions.extend(first.functions)
    graph = target.graph
    graph.name = first.graph.name
    # Constants stand in every segment that reads them.
    known: set[str] = set()
    for segment in segments:
        source = segment.model.graph
        graph.input.extend(i for i in source.input if i.name not in known)
        known.update(i.name for i in source.input)
        graph.initializer.extend(t for t in source.initializer if t.name not in known)
        known.update(t.name for t in source.initializer)
        for node in source.node:
            if node.op_type != "Constant" or not is_standard(node) or node.output[0] not in known:
                graph.node.append(node)
                known.update(node.output)
    given = {o.name: o for segment in segments for o in segment.model.graph.output}
    graph.output.extend(given[name] for name in outputs)
    for segment in segments:
        graph.value_info.extend(segment.model.graph.value_info)
    return Segment(
        target,
        tuple(dict.fromkeys(n for s in segments for n in s.takes if n not in given)),
        tuple(outputs),
        {name: flag for s in segments for name, flag in s.flags.items()},
        {name: weight for s in segments for name, weight in s.weights.items()},
    )
