"""The whole network at each precision, emulated, before anything is searched."""
