"""The report's plots, as the records that its plotting library draws."""
