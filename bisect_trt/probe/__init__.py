"""One plan run on one runner, held against the reference, judged and remembered."""
