"""Faults of our own, put into the product: the random networks must find each of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from bisect_trt.base.outcomes import CauseFound, Diagnosis
from bisect_trt.base.plan import PrecisionPlan
from bisect_trt.metrics.requirements import Requirement
from bisect_trt.model import layers
from bisect_trt.model.cost import CostTable
from bisect_trt.model.emulated import EmulationRewriter
from bisect_trt.repair.rules import Edited
from bisect_trt.steps import repair
from bisect_trt.steps.fp32_proof import Change
from bisect_trt.steps.problem import Problem
from bisect_trt.steps.verify import Verification
from tests.fuzz import lists
from tests.fuzz.campaign import Tally, plan_failures, recipe_for, search_failures, smaller_search
from tests.fuzz.graphs import Recipe, generate

Patch = pytest.MonkeyPatch
PLANS = 40

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def no_rounding_of_products(patch: Patch) -> None:
    """The emulator keeps what a Mul gives in FP32."""
    usual = EmulationRewriter.write

    def write(self: Any, node: onnx.NodeProto, role: Any, *rest: Any) -> None:
        if node.op_type == "Mul":
            self.append(node, role, rest[-1])
        else:
            usual(self, node, role, *rest)

    patch.setattr(EmulationRewriter, "write", write)


def unrounded_weights(patch: Patch) -> None:
    """The emulator reads weights as they are stored."""

    def stored(tensor: Any, arrays: Any, *, source: str, name: str, **_: Any) -> onnx.TensorProto:
        return numpy_helper.from_array(np.asarray(arrays[source], np.float32), name)

    patch.setattr("bisect_trt.model.rewriter.rounded_tensor", stored)


def uncast_in_bodies(patch: Patch) -> None:
    """The last operand of a node in a body keeps its type."""
    usual = layers.role_of

    def role_of(*given: Any) -> Any:
        role = usual(*given)
        return replace(role, reduced_in=role.reduced_in[:1])

    patch.setattr("bisect_trt.model.rewriter.role_of", role_of)


def no_guards(patch: Patch) -> None:
    """NaN and infinities that kernels swallow are not put back."""
    patch.setattr("bisect_trt.model.emulated.guarded", lambda node, *_: [node])


def pins_that_save_time(patch: Patch) -> None:
    """Keeping layers in FP32 is predicted to be faster."""
    patch.setattr(CostTable, "predicted", lambda _, plan: 1.0 / (1 + len(plan.pinned)))


def lists_without_a_layer(patch: Patch) -> None:
    """The script for polygraphy forgets a layer that is kept."""
    usual = lists.polygraphy_script

    def script(graph: Any, plan: PrecisionPlan) -> str:
        return usual(graph, replace(plan, pinned=frozenset(sorted(plan.pinned)[1:])))

    patch.setitem(lists.FORMS, "polygraphy", ("list.py", script))


def verify_that_never_passes(patch: Patch) -> None:
    """``verify`` refuses what ``run`` found."""
    patch.setattr(Verification, "passed", property(lambda _: False))


def causes_without_layers(patch: Patch) -> None:
    """A diagnosis names the cause and not the place."""
    usual = Diagnosis.of

    def of(causes: list[CauseFound]) -> Diagnosis:
        return usual([replace(c, layers=("elsewhere",)) for c in causes])

    patch.setattr(Diagnosis, "of", staticmethod(of))


def lenient_scores(patch: Patch) -> None:
    """Errors count a thousandth of what they are."""
    usual = Requirement.score_of
    patch.setattr(Requirement, "score_of", lambda self, value: usual(self, value) / 1000.0)


def forgetful_cache(patch: Patch) -> None:
    """Answers are kept without the requirement that they were judged by."""
    patch.setattr(Problem, "key", property(lambda self: self.model.digest))


def unproved_repairs(patch: Patch) -> None:
    """A rule writes constants that are off by 0.3 %, and the proof takes everything."""
    usual = repair.edited

    def edited(graph: Any, rules: Any, measure: Any) -> Edited:
        found = usual(graph, rules, measure)
        new = set(found.graph.float_constants) - set(graph.float_constants)
        values = {name: found.graph.float_constants[name] * np.float32(1.003) for name in new}
        return replace(found, graph=found.graph.with_constants(values))

    patch.setattr(repair, "edited", edited)
    patch.setattr(Change, "is_exact", property(lambda _: True))


IN_PLANS = (no_rounding_of_products, unrounded_weights, uncast_in_bodies, no_guards)
IN_PLANS += (pins_that_save_time, lists_without_a_layer)
IN_SEARCHES = {
    verify_that_never_passes: (Recipe(3, "underflow"),),
    causes_without_layers: (Recipe(4, "offset"),),
    lenient_scores: (Recipe(4, "offset"), Recipe(104, "offset")),
    forgetful_cache: tuple(Recipe(n, "offset") for n in (1, 5, 9, 13)),
    unproved_repairs: tuple(Recipe(n, "overflow") for n in (1, 3, 5, 7)),
}


def found_by_plans() -> Iterator[str]:
    """What relations without a search find, until there is something."""
    for number in range(PLANS):
        yield from (failure.relation for _, failure in plan_failures(recipe_for(number)))


@pytest.mark.parametrize("fault", IN_PLANS, ids=lambda f: f.__name__)
def test_a_fault_in_writing_is_found(fault: Callable[[Patch], None], monkeypatch: Patch) -> None:
    fault(monkeypatch)
    assert next(found_by_plans(), None), f"{PLANS} networks do not show it"


@pytest.mark.parametrize("fault", IN_SEARCHES, ids=lambda f: f.__name__)
def test_a_fault_in_a_search_is_found(fault: Callable[[Patch], None], monkeypatch: Patch) -> None:
    fault(monkeypatch)
    assert any(search_failures(recipe, Tally()) for recipe in IN_SEARCHES[fault])


def test_a_failed_search_shrinks_to_the_planted_layer(monkeypatch: Patch) -> None:
    verify_that_never_passes(monkeypatch)
    recipe = Recipe(3, "underflow")
    failure = next(f for f in search_failures(recipe, Tally()) if f.relation.startswith("verify"))
    network = generate(recipe)
    line = smaller_search(recipe, failure, time.monotonic() + 120.0)
    (planted,) = network.planted[0].layers
    assert f"Mul {planted}" in line["nodes"]
    assert len(line["nodes"]) < len(network.model.graph.node) / 2
