"""Where work is done: processes here, actors on a cluster. Knows no models."""
