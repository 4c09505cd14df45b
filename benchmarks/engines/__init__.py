"""Real engines, on a GPU."""
