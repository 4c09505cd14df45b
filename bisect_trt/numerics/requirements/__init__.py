"""What "good enough" means, in numbers."""
