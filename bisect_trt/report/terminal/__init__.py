"""What a person at a terminal gives and sees."""
