"""What computes a plan: ONNX Runtime, the emulators, TensorRT."""
