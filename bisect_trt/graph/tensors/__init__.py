"""What tensors are: operators' rules, types, ranks, values wherever they lie."""
