"""What a run works on: the model, its inputs and requirements, read and checked."""
