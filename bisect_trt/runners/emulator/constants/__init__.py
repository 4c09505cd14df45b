"""A model's constants, exact and rounded, once for all sessions."""
