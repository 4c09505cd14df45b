"""What is asked: the settings and what they name, a saved plan, a project's file."""
