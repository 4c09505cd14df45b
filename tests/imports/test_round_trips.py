"""A plan that is exported and imported is the same plan; long and hostile lists take seconds."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bisect_trt.base.errors import BadInputError
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.graph import to_typed
from bisect_trt.imports.entries import Form
from bisect_trt.imports.mapping import ImportedList, Status
from bisect_trt.imports.read import import_list
from bisect_trt.model.graph import Graph
from bisect_trt.model.weak_typing import polygraphy_script, trtexec_arguments
from bisect_trt.runners.tensorrt.network import parsed_network
from fixtures.encoders import encoder_decomposed
from fixtures.models import residual

GRAPH = Graph(encoder_decomposed().model)
NETWORK = parsed_network(GRAPH.proto, "tensorrt_rtx")
NAMES = [layer.name for layer in GRAPH.layers]
SECONDS = 30.0
"""What a list of 100,000 entries may take on a slow machine."""


def read(text: str, form: Form | None = None) -> ImportedList:
    return import_list(text, GRAPH, "m.onnx", parser=lambda: NETWORK, form=form)


plans = st.builds(
    PrecisionPlan,
    st.sampled_from(["fp16", "bf16"]),
    st.sets(st.sampled_from(NAMES), min_size=1).map(frozenset),
)
in_a_folder = settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@in_a_folder
@given(plan=plans)
def test_trtexec_there_and_back(plan: PrecisionPlan) -> None:
    assert read(trtexec_arguments(GRAPH, plan)).plan == plan


@in_a_folder
@given(plan=plans)
def test_polygraphy_there_and_back(plan: PrecisionPlan, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(polygraphy_script(GRAPH, plan))
    assert read(str(script)).plan == plan


@in_a_folder
@given(plan=plans.filter(lambda plan: len(plan.pinned) < len(NAMES)))
def test_a_mixed_model_there_and_back(plan: PrecisionPlan, tmp_path: Path) -> None:
    typed = tmp_path / "typed.onnx"
    typed.write_bytes(to_typed(GRAPH, plan).SerializeToString())
    found = read(str(typed))
    assert found.plan == plan
    assert found.rows_of(Status.REFUSED) == ()


@in_a_folder
@given(plan=plans)
def test_block_lists_there_and_back(plan: PrecisionPlan, tmp_path: Path) -> None:
    file = tmp_path / "lists.json"
    file.write_text(json.dumps({"node_block_list": sorted(plan.pinned)}))
    assert read(str(file)).plan.pinned == plan.pinned


@pytest.mark.parametrize("count", [100_000])
def test_unknown_names(count: int, tmp_path: Path) -> None:
    names = ",".join(f"layer{i}:fp32" for i in range(count))
    began = time.perf_counter()
    with pytest.raises(BadInputError, match="none of its 100,000 entries") as error:
        read(f"--layerPrecisions={names}")
    assert len(str(error.value)) < 300
    found = read(f"--layerPrecisions={names},{NAMES[0]}:fp32")
    assert time.perf_counter() - began < SECONDS
    assert found.plan.pinned == {NAMES[0]}
    assert len(found.rows_of(Status.REFUSED)) == count


def test_patterns_that_match_everything() -> None:
    began = time.perf_counter()
    patterns = ",".join(f"*{'x' * (i % 50)}{i}*:fp32" for i in range(50_000))
    found = read(f"--layerPrecisions=*:fp32,{patterns},/*:fp32")
    assert time.perf_counter() - began < SECONDS
    assert found.plan.pinned == set(NAMES)


def test_expressions_that_match_everything(tmp_path: Path) -> None:
    file = tmp_path / "lists.json"
    expressions = [*(f"/layer{i}/.*" for i in range(100_000)), ".*", "(", "[^a]*"]
    file.write_text(json.dumps({"nodes_to_exclude": expressions}))
    began = time.perf_counter()
    found = read(str(file))
    assert time.perf_counter() - began < SECONDS
    assert found.plan.pinned == set(NAMES)
    assert "no regular expression" in next(r.said for r in found.rows if r.entry.text == "(")


def test_duplicates_and_contradictions() -> None:
    name = NAMES[0]
    both = ",".join(f"{name}:fp32,{name}:fp16" for _ in range(10_000))
    found = read(f"--layerPrecisions={both},{NAMES[1]}:fp32")
    assert found.plan.pinned == {NAMES[1]}
    assert any("19,999 repeated entries" in note for note in found.notes)


def test_a_shared_name_and_another_one_for_the_same_layer() -> None:
    name = NAMES[0]
    found = read(f"--layerPrecisions={name}:fp32,PWN({name}):fp16")
    assert found.plan.pinned == frozenset()
    assert any(f"1 layer named with two precisions: {name}" in note for note in found.notes)


def test_fused_names_and_regions_are_widened_or_mapped() -> None:
    fused = f"{NAMES[0]} + {NAMES[1]}:fp32,{{ForeignNode[{NAMES[4]}...{NAMES[7]}]}}:fp32"
    found = read(f"'--layerPrecisions={fused}'")
    assert found.plan.pinned == {*NAMES[:2], *NAMES[4:8]}
    assert [row.status for row in found.rows] == [Status.MAPPED, Status.WIDENED]


def test_the_given_form_counts() -> None:
    model = residual().model
    text = f"--layerPrecisions={Graph(model).layers[0].name}:fp32"
    with pytest.raises(BadInputError, match="--form script"):
        read("x = 1", Form.SCRIPT)
    with pytest.raises(BadInputError, match="--form mixed needs an ONNX file"):
        read(text, Form.MIXED)
    with pytest.raises(BadInputError, match="no replay"):
        read(text, Form.REPLAY)
    with pytest.raises(BadInputError, match="neither a file nor options with a list"):
        read("nowhere.txt")
