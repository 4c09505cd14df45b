"""Applies the rules in their order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from bisect_trt.base.errors import BadInputError
from bisect_trt.model.graph import Graph
from bisect_trt.model.opsets import HAS_LAYER_NORMALIZATION
from bisect_trt.repair.constants import (
    propose_const_through,
    propose_fold_bn,
    propose_shift_to_norm,
)
from bisect_trt.repair.edits import (
    Edit,
    Proposal,
    Ranges,
    Refusal,
    Rule,
    applied,
)
from bisect_trt.repair.guards import propose_epsilon, propose_log_sum_exp, propose_mask
from bisect_trt.repair.integers import propose_integers
from bisect_trt.repair.layernorm import propose_layernorm
from bisect_trt.repair.scale import propose_scale

PROPOSE: Mapping[Rule, Callable[[Graph, Ranges], Proposal]] = {
    Rule.FOLD_BN: propose_fold_bn,
    Rule.CONST_THROUGH: propose_const_through,
    Rule.MASK: propose_mask,
    Rule.LOG_SUM_EXP: propose_log_sum_exp,
    Rule.EPSILON: propose_epsilon,
    Rule.SHIFT_TO_NORM: propose_shift_to_norm,
    Rule.SCALE: propose_scale,
    Rule.LAYERNORM: propose_layernorm,
    Rule.INTEGERS: propose_integers,
}
"""What each rule proposes for a graph and the ranges of its tensors, in order of application."""

IDENTITY: Mapping[Rule, str] = {
    Rule.FOLD_BN: "BN(W x + c) = (a W) x + (a c + b), a = scale / sqrt(var + eps)",
    Rule.CONST_THROUGH: "d * pool(c * x) = (c d) * pool(x)",
    Rule.MASK: "softmax(s + mask) = softmax(Where(mask < -1, -2^14, s))",
    Rule.LOG_SUM_EXP: "log(sum(exp(x))) = log(sum(exp(x - max(x)))) + max(x)",
    Rule.EPSILON: "x / max(|x|, eps) = x / Where(|x| > 0, max(|x|, eps), 1)",
    Rule.SHIFT_TO_NORM: "norm(x + c) = norm(x)",
    Rule.SCALE: "f(2^a x, 2^b c) = 2^e f(x, c); norm_eps(x) = norm_{eps 4^a}(2^a x); "
    "log(x) = log(2^a x) - a log(2)",
    Rule.LAYERNORM: "(x - mean) / sqrt(mean((x - mean)^2) + eps) * w + b = LayerNorm(x)",
    Rule.INTEGERS: "kept in FP32: it computes integers",
}
"""The formula of each rule, for reports."""


def rules_of(text: str) -> tuple[Rule, ...]:
    """The rules that ``--repair`` names with commas; all for ``auto``, none for ``none``.

    Raises:
        BadInputError: there is no such rule.
    """
    if text == "auto":
        return tuple(PROPOSE)
    if text == "none":
        return ()
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in list(PROPOSE)]
    if unknown:
        raise BadInputError(
            f"--repair {unknown[0]}: no such rule; choose auto, none, or some of "
            f"{', '.join(PROPOSE)}"
        )
    return tuple(rule for rule in PROPOSE if rule in names)


MAX_ROUNDS = 8
"""How often a rule may be applied: folding one BatchNorm can make room for the next."""

MAX_SCALE_ROUNDS = 2
"""How often *scale* may be, whose rounds take up to a minute each in a large network."""

_MAX_ROUNDS_OF = {Rule.SCALE: MAX_SCALE_ROUNDS, Rule.INTEGERS: 1}  # the latter changes no node


@dataclass(frozen=True)
class Edited:
    """A graph after edits, in the order in which they were made, and what was refused.

    ``ranges`` are those of its tensors.
    """

    graph: Graph
    ranges: Ranges
    edits: tuple[Edit, ...]
    refusals: tuple[Refusal, ...]

    @property
    def kept(self) -> frozenset[str]:
        """The layers that edits keep in FP32."""
        return frozenset(name for edit in self.edits for name in edit.kept)


def edited(graph: Graph, rules: Collection[Rule], measure: Callable[[Graph], Ranges]) -> Edited:
    """``graph`` after every edit that ``rules`` propose; ``measure`` gives FP32 ranges."""
    edits, refusals = list[Edit](), list[Refusal]()
    ranges = measure(graph)
    for rule in (r for r in PROPOSE if r in rules):
        for _ in range(_MAX_ROUNDS_OF.get(rule, MAX_ROUNDS)):
            found, refused = PROPOSE[rule](graph, ranges)
            if found and rule is Rule.LAYERNORM and graph.opset < HAS_LAYER_NORMALIZATION:
                try:
                    raised = graph.raised(HAS_LAYER_NORMALIZATION)
                except BadInputError as error:
                    refusals += (Refusal(rule, e.nodes, str(error)) for e in found)
                    break
                graph, (found, refused) = raised, PROPOSE[rule](raised, ranges)
            refusals += (r for r in refused if r not in refusals)
            if not found:
                break
            graph = applied(graph, found)
            edits += found
            ranges = measure(graph)
    # A graph without what the rules derived from it, which holds the weights again.
    return Edited(replace(graph) if edits else graph, ranges, tuple(edits), tuple(refusals))
