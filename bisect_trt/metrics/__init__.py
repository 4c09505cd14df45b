"""Errors, requirements and statistics; no ONNX, no runtime."""
