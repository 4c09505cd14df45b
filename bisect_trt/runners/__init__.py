"""Runners execute a model under a plan, behind one small protocol."""
