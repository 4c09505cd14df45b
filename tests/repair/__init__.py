"""Repairs of the graph."""
