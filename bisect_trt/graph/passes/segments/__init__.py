"""A switched model in parts: where it is cut, what each part is, and the forms it is run in."""
