"""Reads ONNX models, finds their layers, and writes plans as other models."""
