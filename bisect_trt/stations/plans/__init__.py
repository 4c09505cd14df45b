"""Which layers stay in FP32: the search, and the plans beside its answer."""
