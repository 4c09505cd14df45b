"""A plan written as another model, one pass a file."""
