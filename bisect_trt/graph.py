"""The public names for models: kept here wherever the code moves."""

from bisect_trt.model.emulated import to_emulated
from bisect_trt.model.graph import Graph, list_layers
from bisect_trt.model.layers import Layer
from bisect_trt.model.typed import to_typed

__all__ = ["Graph", "Layer", "list_layers", "to_emulated", "to_typed"]
