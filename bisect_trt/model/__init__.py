"""The model as ONNX: its layers, and a plan written as another model."""
