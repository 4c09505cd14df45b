"""A piece to blame: the smallest that shows a fault, and what cures it."""
