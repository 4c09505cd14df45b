"""The words of the tool: plans, verdicts, causes, errors. Imports the standard library only."""
