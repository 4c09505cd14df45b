"""Files whole or not at all, scratch folders, copies by the system."""
