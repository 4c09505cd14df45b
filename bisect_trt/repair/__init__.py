"""Edits of the graph that keep FP16 right without layers in FP32: proposals only, nothing runs."""
