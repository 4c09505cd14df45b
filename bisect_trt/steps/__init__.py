"""The steps of a run; each takes the problem and the context."""
