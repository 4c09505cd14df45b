"""Metrics, requirements and error tables."""
