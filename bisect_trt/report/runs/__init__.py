"""Several runs: what changed between two, what a gate over many found."""
