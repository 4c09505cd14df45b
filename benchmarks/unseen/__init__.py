"""Whether plans hold on inputs that nothing has seen, and what foretells it."""
