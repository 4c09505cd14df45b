"""What reductions and cures say, and the folders they leave."""
