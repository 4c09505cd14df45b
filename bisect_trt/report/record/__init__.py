"""One record of a run and its tables, in numbers."""
