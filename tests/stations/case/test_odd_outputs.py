"""Outputs that the requirements do not fit are told of, at the start."""

from __future__ import annotations

import onnx
import pytest

from bisect_trt.graph.model.graph import Graph
from bisect_trt.numerics.requirements.requirement_text import parse_requirements
from bisect_trt.stations.case.odd_outputs import odd_outputs
from tests.graph.test_decided import MODEL

GRAPH = Graph(onnx.parser.parse_model(MODEL))


@pytest.mark.parametrize(
    ("texts", "kinds"),
    [
        ([], {"decided": "best"}),
        (["logits:max_abs<=1e-2"], {"unasked": "best"}),
        (["logits:max_abs<=1e-2", "best:argmax>=1", "mask:argmax>=1"], {"unasked": "ids"}),
        (["argmax>=1"], {}),
        (["mine<=1"], {}),
    ],
)
def test_what_is_not_asked_and_what_is_asked_of_classes(
    texts: list[str], kinds: dict[str, str]
) -> None:
    metrics = {"mine": lambda *_: 0.0} if texts == ["mine<=1"] else {}
    requirements = parse_requirements(texts, GRAPH.outputs, metrics)
    found = odd_outputs(GRAPH, requirements, ["product"])
    assert {finding.kind: finding.where for finding in found} == kinds
