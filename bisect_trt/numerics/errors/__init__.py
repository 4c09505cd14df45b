"""How far tensors are from what they should be."""
