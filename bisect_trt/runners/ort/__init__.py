"""ONNX Runtime: its sessions, devices and values, the reference."""
