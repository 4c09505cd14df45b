"""Evaluations of plans, and their cache."""
