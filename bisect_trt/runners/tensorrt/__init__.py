"""TensorRT 10, 11 and TensorRT for RTX: parse, build, execute and read back, in a child process."""
