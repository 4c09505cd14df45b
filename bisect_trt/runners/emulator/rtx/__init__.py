"""The FP16 sums of TensorRT for RTX, as they were measured."""
