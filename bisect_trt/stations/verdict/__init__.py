"""The engine's word on what the emulators found."""
