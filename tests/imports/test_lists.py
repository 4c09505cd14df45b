"""A list in twelve forms on three models: the plan is what TensorRT's own network says."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from bisect_trt.imports.mapping import Status
from bisect_trt.imports.read import import_list
from bisect_trt.model.graph import Graph
from bisect_trt.runners.tensorrt.network import parsed_network
from fixtures.encoders import encoder_decomposed, encoder_layernorm
from fixtures.fixture import Fixture
from fixtures.models import residual
from tests.imports.lists import lists_of


@pytest.mark.parametrize(
    "make", [encoder_layernorm, encoder_decomposed, residual], ids=lambda f: f.__name__
)
def test_each_form_is_the_plan_that_tensorrt_s_network_says(
    make: Callable[[], Fixture], tmp_path: Path
) -> None:
    model = make().model
    graph = Graph(model)
    # Asked once: each form asks for the same network.
    network = parsed_network(model, "tensorrt_rtx")
    floats = {layer.name for layer in graph.layers}
    for given in lists_of(model):
        path = given.write(tmp_path)
        found = import_list(str(path), graph, "m.onnx", parser=lambda: network)
        assert found.plan.pinned == given.kept & floats, given.name
        refused = [row.entry.text for row in found.rows_of(Status.REFUSED)]
        assert refused == [] or given.name == "mixed model", given.name


def test_without_tensorrt_names_and_types_are_found_by_rules(tmp_path: Path) -> None:
    model = encoder_layernorm().model
    graph = Graph(model)
    by_rules = partial(import_list, graph=graph, of="m.onnx", parser=lambda: (None, "not here"))
    lists = {given.name: given for given in lists_of(model)}
    for name in ("trtexec, a command", "trtexec, wildcards", "script, types and words"):
        found = by_rules(str(lists[name].write(tmp_path)))
        assert found.plan.pinned == lists[name].kept, name
        assert any("the parser's rule for names" in note for note in found.notes)
