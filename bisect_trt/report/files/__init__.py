"""A run's folder: its files written, and read again."""
