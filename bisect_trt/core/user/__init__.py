"""The user's own code: called, and told by what it depends on."""
