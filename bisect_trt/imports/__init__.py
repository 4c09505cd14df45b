"""Reads lists of layers in FP32 that were made for other tools, as plans."""
