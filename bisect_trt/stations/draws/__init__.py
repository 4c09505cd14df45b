"""Inputs beside the given ones, and how a plan is tested on them."""
