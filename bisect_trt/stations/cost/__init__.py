"""What a run would cost, told before it starts."""
