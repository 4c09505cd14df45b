"""Engines: built, executed and read back in processes of their own."""
