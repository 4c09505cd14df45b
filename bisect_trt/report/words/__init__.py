"""What a record says to people, in sentences."""
