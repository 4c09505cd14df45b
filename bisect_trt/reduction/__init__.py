"""The smallest subgraph that is bad by itself, and ways to build it right."""
