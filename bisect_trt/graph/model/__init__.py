"""A model with what can be known of its graph, found out once."""
