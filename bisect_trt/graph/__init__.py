"""The model as ONNX: its layers, and a plan written as another model."""

from bisect_trt.graph.model.graph import Graph, list_layers
from bisect_trt.graph.model.layers import Layer
from bisect_trt.graph.passes.emulated import to_emulated
from bisect_trt.graph.passes.typed import to_typed

__all__ = ["Graph", "Layer", "list_layers", "to_emulated", "to_typed"]
