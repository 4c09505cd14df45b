"""The graph stage: load, layers, marks, patterns, the typed and the emulated model."""

from bisect_trt.graph.layers import Layer, list_layers
from bisect_trt.graph.passes.emulated import to_emulated
from bisect_trt.graph.passes.typed import to_typed

__all__ = ["Layer", "list_layers", "to_emulated", "to_typed"]
