"""What kind of problem it is, and what each layer does alone."""
