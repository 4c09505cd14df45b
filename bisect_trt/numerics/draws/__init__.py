"""Other inputs made from the given ones."""
