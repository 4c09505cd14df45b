"""Reduced precision on any machine: FP32 arithmetic with every rounding made explicit."""
