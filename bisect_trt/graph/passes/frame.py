"""A graph or body while it is written: its tensors and their versions."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx

from bisect_trt.core.precision import Precision
from bisect_trt.graph.tensors.constants import Constants
from bisect_trt.graph.tensors.tensor_types import Scope


@dataclass
class Frame:
    """One graph being written (nodes go straight into it), what its tensors are, and which versions
    of them exist.

    ``state`` says at which precision a tensor already is (stored so, or rounded so); absent means
    FP32. ``versions`` maps (tensor, precision) to the name under which that version can be read.
    """

    scope: Scope
    graph: onnx.GraphProto
    parent: Frame | None
    state: dict[str, Precision] = field(default_factory=dict)
    versions: dict[tuple[str, Precision], str] = field(default_factory=dict)
    constants: Constants = field(default_factory=lambda: Constants(onnx.GraphProto()))
    outputs: frozenset[str] = frozenset()
    converted: set[str] = field(default_factory=set)

    def owner(self, name: str) -> Frame:
        """The frame that defines ``name``."""
        frame: Frame | None = self
        while frame is not None:
            if name in frame.scope.types:
                return frame
            frame = frame.parent
        return self
