"""All plans in one model, run in segments: the fast way."""
