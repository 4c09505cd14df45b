"""The graph stage: load, layers, marks, patterns, the typed and the emulated model."""

from bisect_trt.graph.emulate import to_emulated
from bisect_trt.graph.layers import Layer, list_layers
from bisect_trt.graph.typed import to_typed

__all__ = ["Layer", "list_layers", "to_emulated", "to_typed"]
