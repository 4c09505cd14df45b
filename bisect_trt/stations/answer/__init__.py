"""The answer and what it holds on, also of a plan that was given."""
