"""What a browser shows, also in a notebook."""
