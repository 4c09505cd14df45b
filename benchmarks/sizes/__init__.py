"""Real sizes: memory, time, neighbours, hardship."""
