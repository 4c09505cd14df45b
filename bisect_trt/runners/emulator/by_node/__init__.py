"""The network run node by node, for every layer's values."""
