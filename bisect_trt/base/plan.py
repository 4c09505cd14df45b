"""Which layers a plan reduces and which it keeps in FP32."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

from bisect_trt.base.errors import BadInputError

EXACT = ""
"""The name of a neighbour that is FP32 in every plan, such as a graph input."""


@dataclass(frozen=True, eq=False)
class Movers:
    """The layers that only move values, in network order.

    ``sources``, ``readers``: by mover, the layers before and after it, or :data:`EXACT`.
    """

    sources: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    readers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def closed(self, pinned: frozenset[str]) -> frozenset[str]:
        """``pinned`` with the movers between two pinned layers."""
        if not pinned or not self.sources:
            return pinned
        # In network order, sources come first: which movers have FP32 values only, and whether a
        # pinned layer gives them. Then backwards: which of them a pinned layer reads.
        exact: dict[str, bool] = {}
        for name, sources in self.sources.items():
            if all(s in exact or s in pinned or s == EXACT for s in sources):
                exact[name] = any(s in pinned or exact.get(s, False) for s in sources)
        wanted: dict[str, bool] = {}
        for name in reversed(list(self.readers)):
            takers = [r for r in self.readers[name] if r in wanted or r in pinned or r == EXACT]
            if takers:
                wanted[name] = any(r in pinned or wanted.get(r, False) for r in takers)
        return pinned | {n for n in exact.keys() & wanted.keys() if exact[n] and wanted[n]}

    def apart_from(self, names: frozenset[str]) -> Movers:
        """The movers without ``names``, layers that stay reduced in every plan."""
        if names.isdisjoint(self.sources):
            return self
        return Movers(
            {n: s for n, s in self.sources.items() if n not in names},
            {n: r for n, r in self.readers.items() if n not in names},
        )

    def inherited(self, pinned: frozenset[str]) -> frozenset[str]:
        """The movers in ``pinned`` that its other layers imply."""
        others = pinned.difference(self.sources)
        return (self.closed(others) & pinned) - others


class Precision(StrEnum):
    """A number format that a layer computes in."""

    FP32 = "fp32"
    TF32 = "tf32"
    FP16 = "fp16"
    BF16 = "bf16"

    @property
    def is_storage(self) -> bool:
        """Whether tensors are stored in this format; TF32 exists inside matrix units only."""
        return self in (Precision.FP16, Precision.BF16)


@dataclass(frozen=True)
class PrecisionPlan:
    """A base precision and the layers that are pinned to FP32.

    ``pin_precision``: what pinned layers run in; TF32 on an engine whose FP32 is TF32.
    ``held``: layers that stay pinned in every plan made from this one.
    ``movers``: layers that are pinned where they stand between pinned ones.
    """

    base: Precision
    pinned: frozenset[str] = frozenset()
    pin_precision: Precision = Precision.FP32
    held: frozenset[str] = field(default=frozenset(), compare=False)
    movers: Movers = field(default_factory=Movers, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "base", Precision(self.base))
        object.__setattr__(self, "held", frozenset(self.held))
        if isinstance(self.pinned, str):  # its letters would be taken for layers
            raise TypeError(f"pinned takes the names of layers, such as [{self.pinned!r}]")
        pinned = frozenset(self.pinned)
        # Without a copy where nothing is held: a run has thousands of plans.
        pinned = self.held | pinned if self.held else pinned
        object.__setattr__(self, "pinned", self.movers.closed(pinned))
        object.__setattr__(self, "pin_precision", Precision(self.pin_precision))
        if self.pin_precision.is_storage:
            raise ValueError(f"a pin runs in fp32 or tf32, not {self.pin_precision}")

    def precision_of(self, layer: str) -> Precision:
        """The precision that ``layer`` runs in."""
        return self.pin_precision if layer in self.pinned else self.base

    def with_pins(self, pinned: Iterable[str]) -> PrecisionPlan:
        """The same plan with the layers ``pinned`` beside the held ones."""
        return replace(self, pinned=frozenset(pinned))

    @property
    def chosen(self) -> frozenset[str]:
        """The pinned layers without the held ones."""
        return self.pinned - self.held if self.held else self.pinned

    @property
    def inherited(self) -> frozenset[str]:
        """The pinned movers that other pinned layers imply."""
        return self.movers.inherited(self.pinned) - self.held

    def with_pins_in(self, precision: Precision) -> PrecisionPlan:
        """The same plan with its pins in ``precision``."""
        return replace(self, pin_precision=precision)

    def to_json(self) -> str:
        """The plan as text, the same for equal plans."""
        return json.dumps(
            {
                "base": self.base.value,
                "pin_precision": self.pin_precision.value,
                "pinned": sorted(self.pinned),
            },
            indent=2,
            sort_keys=True,
        )

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the text, for the cache's keys."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @staticmethod
    def from_json(text: str, where: str = "plan") -> PrecisionPlan:
        """Read what :meth:`to_json` wrote.

        Raises:
            BadInputError: it is no plan.
        """
        try:
            data: Any = json.loads(text)
            pinned = data["pinned"]
            if not isinstance(pinned, list) or not all(isinstance(p, str) for p in pinned):
                raise TypeError("'pinned' must be a list of layer names")
            return PrecisionPlan(
                Precision(data["base"]),
                frozenset(pinned),
                Precision(data.get("pin_precision", "fp32")),
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise BadInputError(
                f"{where}: not a plan that bisect-trt wrote ({error}); run `bisect-trt run` to "
                "make one"
            ) from error
