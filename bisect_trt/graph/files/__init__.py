"""Models out of files and into them."""
